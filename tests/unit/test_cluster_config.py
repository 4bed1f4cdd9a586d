"""What kind is told, and when a running cluster counts as another one."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from tests.support.cluster.config import KindConfig
from tests.support.cluster.existing import ExistingProvider
from tests.support.cluster.provider import ClusterError

CONFIG = KindConfig(
    image="modelswap/kind-node:v1",
    nodes=3,
    data_port=18081,
    site=Path("/cache/site/a"),
    engines=Path("/cache/engines"),
    models=Path("/cache/models"),
)


def test_only_the_control_plane_maps_the_port_and_only_on_loopback() -> None:
    first, *workers = json.loads(CONFIG.render())["nodes"]
    assert first["extraPortMappings"] == [{"containerPort": 30080, "hostPort": 18081, "listenAddress": "127.0.0.1"}]
    assert [node["role"] for node in workers] == ["worker", "worker"]
    assert all("extraPortMappings" not in node for node in workers)


def test_every_node_mounts_the_packages_read_only_and_the_models() -> None:
    for node in json.loads(CONFIG.render())["nodes"]:
        site, engines, models = node["extraMounts"]
        assert site == {"hostPath": "/cache/site/a", "containerPath": "/opt/modelswap/site", "readOnly": True}
        assert engines == {"hostPath": "/cache/engines", "containerPath": "/opt/modelswap/engines", "readOnly": True}
        assert (models["hostPath"], models["containerPath"]) == ("/cache/models", "/models")


@pytest.mark.parametrize(
    "change",
    [
        {"image": "other"},
        {"nodes": 1},
        {"data_port": 1},
        {"site": Path("/b")},
        {"engines": Path("/b")},
        {"models": Path("/b")},
    ],
)
def test_a_cluster_of_another_configuration_has_another_key(change: dict[str, object]) -> None:
    assert dataclasses.replace(CONFIG, **change).key() != CONFIG.key()  # type: ignore[arg-type]
    assert dataclasses.replace(CONFIG).key() == CONFIG.key()


def test_a_kubeconfig_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"MODELSWAP_KUBECONFIG names .*gone, which does not exist"):
        ExistingProvider(tmp_path / "gone")
