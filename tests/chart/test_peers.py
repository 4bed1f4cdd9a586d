"""Pods that share what they fetched, as the engine chart installs them: how they find each other, and by what right."""

from typing import Any

import pytest
from typer.testing import CliRunner

from modelswap_engine.cli.main import app as command_line
from tests.support.charts import CHARTS, Charts, Object, of_kind, one, pod_templates

CHART = "modelswap-engine"
SOURCES: Object = {"allow": ["s3://b/m"], "store": {"sizeLimit": "1Gi"}}
EXTERNAL: Object = {
    "engine": {
        "kind": "vllm",
        "experimental": True,
        "image": {"repository": "vllm/vllm-openai-cpu", "tag": "v1"},
        "checkpoints": {"sizeLimit": "1Gi"},
    }
}
TLS: Object = {"controlTls": {"enabled": True, "secretName": "pair"}}


def rendered(charts: Charts, **values: Any) -> list[Object]:
    given = {"model": {"path": "/models/m"}, "slot": "chat", "sources": SOURCES, **values}
    return charts.template(CHART, given, namespace="team")


def sidecar(objects: list[Object]) -> Object:
    spec = next(pod_templates(objects))["spec"]
    containers = [*spec.get("initContainers", []), *spec["containers"]]
    return next(c for c in containers if any(port["containerPort"] == 8001 for port in c.get("ports", [])))


def peers_volume(objects: list[Object]) -> list[Object]:
    volumes = next(pod_templates(objects))["spec"]["volumes"]
    return [volume for volume in volumes if volume["name"] == "peers"]


def headless(objects: list[Object]) -> list[Object]:
    return [service for service in of_kind(objects, "Service") if service["spec"].get("clusterIP") == "None"]


@pytest.mark.parametrize("kind", [{}, EXTERNAL], ids=["embedded", "external"])
def test_pods_find_each_other_before_they_are_ready(charts: Charts, kind: Object) -> None:
    objects = rendered(charts, **kind)
    (service,) = headless(objects)
    labels = next(pod_templates(objects))["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert service["spec"]["publishNotReadyAddresses"] is True
    args = sidecar(objects)["args"]
    assert f"--peers={service['metadata']['name']}:8001" in args
    assert service["spec"]["ports"] == [{"name": "peers", "port": 8001, "protocol": "TCP"}]
    assert "--peer-bytes-per-second=268435456" in args


@pytest.mark.parametrize("kind", [{}, EXTERNAL], ids=["embedded", "external"])
def test_what_they_show_each_other_is_their_own_token_for_an_audience_of_the_slots(
    charts: Charts, kind: Object
) -> None:
    objects = rendered(charts, **kind)
    (volume,) = peers_volume(objects)
    assert volume["projected"]["sources"] == [
        {
            "serviceAccountToken": {
                "path": "token",
                "audience": "modelswap-peers.chat.team",
                "expirationSeconds": 3600,
            }
        }
    ]
    container = sidecar(objects)
    (mount,) = [mount for mount in container["volumeMounts"] if mount["name"] == "peers"]
    assert mount["readOnly"] is True
    assert "subPath" not in mount  # it is rotated
    assert f"--peer-token-file={mount['mountPath']}/token" in container["args"]
    for other in next(pod_templates(objects))["spec"]["containers"]:
        if other["name"] != container["name"]:
            assert not any(mount["name"] == "peers" for mount in other["volumeMounts"])


def test_with_tls_they_believe_the_authority_of_the_control_ports(charts: Charts) -> None:
    objects = rendered(charts, **TLS)
    (volume,) = peers_volume(objects)
    assert volume["projected"]["sources"][1] == {
        "secret": {"name": "pair", "optional": True, "items": [{"key": "ca.crt", "path": "ca.crt"}]}
    }
    args = sidecar(objects)["args"]
    assert "--peer-ca-file=/etc/modelswap/peers/ca.crt" in args
    assert "--peer-server-name=modelswap-control.team.svc" in args


def test_the_network_policy_admits_the_pods_of_the_slot(charts: Charts) -> None:
    objects = rendered(charts)
    policy = one(objects, "NetworkPolicy")["spec"]
    control = next(rule for rule in policy["ingress"] if rule["ports"][0]["port"] == 8001)
    assert {"podSelector": policy["podSelector"]} in control["from"]


@pytest.mark.parametrize("sources", [{}, {**SOURCES, "peers": {"enabled": False}}], ids=["nothing fetched", "off"])
def test_without_them_nothing_is_open(charts: Charts, sources: Object) -> None:
    objects = rendered(charts, sources=sources)
    assert not headless(objects)
    assert not peers_volume(objects)
    assert not [argument for argument in sidecar(objects)["args"] if argument.startswith("--peer")]
    control = next(r for r in one(objects, "NetworkPolicy")["spec"]["ingress"] if r["ports"][0]["port"] == 8001)
    assert len(control["from"]) == 1


def test_the_example_of_an_object_store_shares(charts: Charts) -> None:
    assert headless(charts.template(CHART, CHARTS / CHART / "ci" / "object-store-values.yaml"))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--peers", "chat-peers"], "not of the form HOST:PORT"),
        (["--peers", "chat-peers:0"], "not of the form HOST:PORT"),
        (["--peers", "chat-peers:99999"], "not of the form HOST:PORT"),
        (["--peers", ":8001"], "not of the form HOST:PORT"),
        (["--peers", "a:1", "--control-tls-cert", "c", "--control-tls-key", "k"], "needs --peer-ca-file"),
    ],
)
def test_what_contradicts_itself_is_refused(options: list[str], says: str) -> None:
    done = CliRunner().invoke(command_line, ["serve", "--model", "/none", "--insecure", *options])
    assert done.exit_code != 0
    assert says in str(done.exception) + done.output
