"""The operator as its chart installs it from this checkout: there, killed, and away for a while."""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Iterator

from tests.support.cache import REPOSITORY
from tests.support.cluster.provider import Cluster
from tests.support.reaching import WAIT, kill_on_node

OPERATOR_NAMESPACE = "modelswap-system"


def install_operator(cluster: Cluster, *settings: str) -> None:
    """Install the operator's chart from this checkout, with more values (``name=value``); wait until it is ready."""
    chart = str(REPOSITORY / "charts/modelswap")
    # The tag is the same for every build: the annotation makes pods of an older build go.
    cluster.helm(
        "upgrade", "--install", "modelswap", chart, "--namespace", OPERATOR_NAMESPACE, "--create-namespace",
        "--set=image.repository=modelswap/operator", "--set=image.tag=dev", "--set=image.pullPolicy=Never",
        "--set=rbac.adapterServices=true",  # which it is not by itself
        f"--set-string=podAnnotations.builtFor={uuid.uuid4()}", *(f"--set={setting}" for setting in settings),
        "--wait", "--timeout=3m",
    )  # fmt: skip


def kill_operator(cluster: Cluster) -> None:
    """Kill the operator's process without asking; the kubelet starts it again in the same pod."""
    items = json.loads(cluster.kubectl("-n", OPERATOR_NAMESPACE, "get", "pods", "-o", "json"))["items"]
    for pod in (item for item in items if "deletionTimestamp" not in item["metadata"]):
        kill_on_node(cluster, node=pod["spec"]["nodeName"], needle=f"POD_NAME={pod['metadata']['name']}")


@contextlib.contextmanager
def operator_down(cluster: Cluster) -> Iterator[None]:
    """No operator runs while the context lasts."""
    path = "jsonpath={.items[0].metadata.name}"
    name = cluster.kubectl("-n", OPERATOR_NAMESPACE, "get", "deployments", "-o", path)
    cluster.kubectl("-n", OPERATOR_NAMESPACE, "scale", f"deployment/{name}", "--replicas=0")
    cluster.kubectl("-n", OPERATOR_NAMESPACE, "wait", "pods", "--all", "--for=delete", WAIT)
    try:
        yield
    finally:
        cluster.kubectl("-n", OPERATOR_NAMESPACE, "scale", f"deployment/{name}", "--replicas=1")
        cluster.kubectl("-n", OPERATOR_NAMESPACE, "rollout", "status", f"deployment/{name}", WAIT)
