"""A cluster from the provider is what tests and demo assume: ready, found again, reachable, with images and mounts."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from tests.support.cache import run_script
from tests.support.cluster.config import MODELS_IN_NODE, SITE_IN_NODE
from tests.support.cluster.provider import DATA_NODE_PORT, Cluster, ClusterError
from tests.support.cluster.select import TEST_CLUSTER, TEST_PORT, cluster_provider

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

_FACTS = """
import json, os, socket, sys
def refused(path):
    try:
        open(path, "w").close()
    except OSError:
        return True
    os.unlink(path)
    return False
print(json.dumps({
    "uid": os.getuid(),
    "dns": socket.gethostbyname("kubernetes.default.svc.cluster.local"),
    "root is read-only": refused("/etc/written"),
    "site is read-only": refused(sys.argv[1] + "/written"),
    "models": os.path.isdir(sys.argv[2]),
}))
"""


@pytest.fixture
def namespace(bare_cluster: Cluster) -> Iterator[str]:
    """A namespace of this test, removed after it."""
    name = f"provider-{uuid.uuid4().hex[:8]}"
    bare_cluster.kubectl("create", "namespace", name)
    yield name
    bare_cluster.kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture(scope="module")
def image(bare_cluster: Cluster) -> str:
    """The operator's image, in the nodes."""
    run_script("images/build.sh", "operator")
    bare_cluster.load_image("modelswap/operator:dev")
    return "modelswap/operator:dev"


def _pod(image: str, command: list[str], labels: dict[str, str] | None = None) -> dict[str, Any]:
    """A pod under the rules that our charts set, with the folders that engine pods mount."""
    folders = {"site": SITE_IN_NODE, "models": MODELS_IN_NODE}
    container = {
        "name": "main",
        "image": image,
        "imagePullPolicy": "Never",
        "command": command,
        "securityContext": {"readOnlyRootFilesystem": True, "allowPrivilegeEscalation": False, "runAsNonRoot": True},
        "volumeMounts": [{"name": name, "mountPath": path, "readOnly": True} for name, path in folders.items()],
    }
    volumes = [{"name": name, "hostPath": {"path": path}} for name, path in folders.items()]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "main", "labels": labels or {}},
        "spec": {"restartPolicy": "Never", "containers": [container], "volumes": volumes},
    }


async def _first_answer(session: aiohttp.ClientSession, url: str) -> str:
    """A node's rules follow the pod's readiness a moment later, and nothing tells when."""
    async with asyncio.timeout(60):
        while True:
            try:
                async with session.get(url) as answer:
                    return await answer.text()
            except aiohttp.ClientConnectionError:
                await asyncio.sleep(0.1)


def test_every_node_is_ready_and_of_the_version_that_is_reported(bare_cluster: Cluster) -> None:
    nodes = json.loads(bare_cluster.kubectl("get", "nodes", "--output=json"))["items"]
    ready = [c["status"] for n in nodes for c in n["status"]["conditions"] if c["type"] == "Ready"]
    assert ready == ["True"] * len(nodes)
    assert {n["status"]["nodeInfo"]["kubeletVersion"] for n in nodes} == {bare_cluster.version}


def test_a_second_ensure_finds_the_same_cluster(bare_cluster: Cluster) -> None:
    def identity(cluster: Cluster) -> str:
        return cluster.kubectl("get", "namespace", "kube-system", "--output=jsonpath={.metadata.uid}")

    again = cluster_provider().ensure(name=TEST_CLUSTER, data_port=TEST_PORT)
    assert identity(again) == identity(bare_cluster)
    assert (again.kubeconfig, again.data_url) == (bare_cluster.kubeconfig, bare_cluster.data_url)


def test_a_pod_of_our_image_resolves_services_and_may_write_nowhere(
    bare_cluster: Cluster, namespace: str, image: str
) -> None:
    pod = _pod(image, ["python3", "-c", _FACTS, SITE_IN_NODE, MODELS_IN_NODE])
    bare_cluster.kubectl("apply", "-n", namespace, "-f", "-", stdin=json.dumps(pod))
    bare_cluster.kubectl(
        "wait", "-n", namespace, "pod/main", "--for=jsonpath={.status.phase}=Succeeded", "--timeout=60s"
    )
    facts = json.loads(bare_cluster.kubectl("logs", "-n", namespace, "main"))
    service = bare_cluster.kubectl("get", "service", "kubernetes", "--output=jsonpath={.spec.clusterIP}")
    assert facts == {
        "uid": 65532,
        "dns": service,
        "root is read-only": True,
        "site is read-only": True,
        "models": True,
    }


async def test_the_data_url_leads_to_the_pods_of_a_node_port(bare_cluster: Cluster, namespace: str, image: str) -> None:
    serve = ["python3", "-m", "http.server", "8000", "--directory", "/opt/modelswap/app"]
    pod = _pod(image, serve, {"app": "web"})
    pod["spec"]["containers"][0]["readinessProbe"] = {"tcpSocket": {"port": 8000}, "periodSeconds": 1}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "web"},
        "spec": {
            "type": "NodePort",
            "selector": {"app": "web"},
            "ports": [{"port": 8000, "nodePort": DATA_NODE_PORT}],
        },
    }
    items = {"apiVersion": "v1", "kind": "List", "items": [pod, service]}
    bare_cluster.kubectl("apply", "-n", namespace, "-f", "-", stdin=json.dumps(items))
    bare_cluster.kubectl("wait", "-n", namespace, "pod/main", "--for=condition=Ready", "--timeout=60s")
    async with aiohttp.ClientSession() as session:
        assert "modelswap_operator" in await _first_answer(session, bare_cluster.data_url)
    bare_cluster.kubectl("delete", "-n", namespace, "service", "web")


def test_what_kubectl_refuses_is_an_error_with_its_message(bare_cluster: Cluster) -> None:
    with pytest.raises(ClusterError, match=r'kubectl get pod nobody .*pods "nobody" not found'):
        bare_cluster.kubectl("get", "pod", "nobody")
    assert "kubernetes" in bare_cluster.kubectl("get", "services").lower()


def test_helm_speaks_to_the_cluster(bare_cluster: Cluster) -> None:
    assert json.loads(bare_cluster.helm("list", "--all-namespaces", "--output=json")) is not None
