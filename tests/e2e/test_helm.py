"""Helm waits for a ModelVersion in a release, and takes a refused version back; the pods serve on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster.provider import ClusterError
from tests.support.gitops_steps import assert_left_alone, digest_of, identity, manifest, proved
from tests.support.stack import Slot

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


def test_helm_takes_a_refused_version_back(applied_slot: Slot, tmp_path: Path) -> None:
    chart = tmp_path / "models"
    (chart / "templates").mkdir(parents=True)
    (chart / "Chart.yaml").write_text("apiVersion: v2\nname: models\nversion: 0.1.0\n")

    def helm(command: str, version: str, model: str, *options: str) -> None:
        (chart / "templates/model.yaml").write_text(manifest(applied_slot, version, model))
        applied_slot.cluster.helm(
            command, "models", str(chart), "--namespace", applied_slot.namespace, "--timeout=4m", *options
        )

    before, old = identity(applied_slot.pods()), digest_of(applied_slot, "v1")
    helm("install", "1.0", "v1", "--wait")
    assert proved(applied_slot) == {old}
    served: set[str] = set()
    with applied_slot.watch() as objects:
        watcher = threading.Thread(target=take_in, args=(objects, served))
        watcher.start()
        with pytest.raises(ClusterError, match=r"rolled back|rollback|Failed"):
            helm("upgrade", "1.2", "flipped", "--rollback-on-failure")
        applied_slot.wait_ready(applied_slot.get()["metadata"]["generation"])
    watcher.join(30)
    assert applied_slot.get()["spec"]["version"] == "1.0"
    assert served == {old}
    assert proved(applied_slot) == {old}
    assert identity(applied_slot.pods()) == before
    applied_slot.cluster.helm("uninstall", "models", "--namespace", applied_slot.namespace, "--wait")
    assert_left_alone(applied_slot)


def take_in(objects: Iterator[dict[str, Any]], served: set[str]) -> None:
    """Note each digest that any pod was ever shown to serve."""
    for found in objects:
        served |= {version["digest"] for version in found.get("status", {}).get("versions", [])}
