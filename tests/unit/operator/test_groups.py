"""Which pods are one of a group, by what schedulers write on them and by their engine's flags; where a port is."""

from typing import Any

import pytest

from modelswap_operator.effects.groups import group_of
from modelswap_operator.effects.objects import pod_of


def pod(
    *words: str, labels: dict[str, str] | None = None, annotations: dict[str, str] | None = None, **spec: Any
) -> dict[str, Any]:
    container = {"name": "engine", "command": ["vllm", "serve", "/models/m"], "args": list(words)}
    return {
        "metadata": {"name": "p", "uid": "u", "labels": labels or {}, "annotations": annotations or {}},
        "spec": {"containers": [container], **spec},
    }


LWS = {"leaderworkerset.sigs.k8s.io/name": "big"}


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (pod(labels=LWS), "LeaderWorkerSet big"),
        (pod(labels=LWS, annotations={"leaderworkerset.sigs.k8s.io/size": "2"}), "LeaderWorkerSet big"),
        (pod(labels={"ray.io/cluster": "r"}), "Ray cluster r"),
        (pod(labels={"llm-d.ai/role": "decode"}), "the decode half"),
        (pod("--data-parallel-size", "2"), "--data-parallel-size 2"),
        (pod("-dp=4"), "-dp 4"),
        (pod("--dp-size=2"), "--dp-size 2"),
        (pod("--nnodes", "2"), "several nodes"),
        (pod("--disaggregation-mode", "prefill"), "the prefill half"),
        (pod("--kv-transfer-config", '{"kv_connector":"NixlConnector","kv_role":"kv_producer"}'), "one half"),
        (pod("--kv-transfer-config", '{"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}'), "one half"),
        (pod('--kv_transfer_config={"kv_connector": "N",\n "kv_role": "kv_producer"}'), "one half"),
        (pod("-c", 'exec vllm serve m --kv-transfer-config \'{"kv_role": "kv_producer"}\''), "one half"),
        (pod("--data_parallel_size", "2"), "--data-parallel-size 2"),
        (pod("-c", "exec vllm serve m --data-parallel-size 8 --port 8000"), "--data-parallel-size 8"),
        (pod(initContainers=[{"args": ["--nnodes=3"]}]), "several nodes"),
    ],
    ids=str,
)
def test_a_pod_of_a_group_is_known_by_what_is_written_on_it(body: dict[str, Any], named: str) -> None:
    assert named in group_of(body)
    assert pod_of(body, ever_ready=(), default_port=8001).group == group_of(body)


@pytest.mark.parametrize(
    "body",
    [
        pod(),
        pod(labels=LWS, annotations={"leaderworkerset.sigs.k8s.io/size": "1"}),
        pod(labels={"llm-d.ai/role": "both"}),
        pod("--data-parallel-size", "1", "--tensor-parallel-size", "8", "--nnodes", "1"),
        pod("--data-parallel", "2"),  # replicas inside one of our own pods are one transaction
        pod("--disaggregation-mode", "null"),
        pod("--kv-transfer-config", '{"kv_connector":"LMCacheConnectorV1","kv_role":"kv_both"}'),
        {"metadata": {}, "spec": None},
        {"metadata": {}, "spec": {"containers": [{"name": "engine", "image": "none"}]}},
    ],
    ids=str,
)
def test_a_pod_of_its_own_is_none(body: dict[str, Any]) -> None:
    assert group_of(body) == ""


def test_a_pod_on_its_nodes_network_is_asked_at_its_own_port() -> None:
    """Two such pods share an address: the port tells them apart, and each call names the UID it is meant for."""
    ports = [{"name": "http", "containerPort": 8000}, {"name": "modelswap", "containerPort": 18001, "hostPort": 18001}]
    body = pod(hostNetwork=True) | {"status": {"podIP": "10.0.0.7", "hostIP": "10.0.0.7"}}
    body["spec"]["containers"][0]["ports"] = ports
    found = pod_of(body, ever_ready=(), default_port=8001)
    assert (found.ip, found.port, found.uid) == ("10.0.0.7", 18001, "u")
