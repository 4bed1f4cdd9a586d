"""Pods that no Deployment has: a StatefulSet's, whose names come back, an autoscaler's, and on their node's network."""

from __future__ import annotations

import json
import urllib.error
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from modelswap_engine.checkpoint.manifest import MANIFEST_FILE, decode
from tests.support.cluster.provider import Cluster
from tests.support.reaching import WAIT
from tests.support.stack import Slot

pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(900)]

_HOST_PORTS = (18100, 18110)


class Stateful(Slot):
    """A release whose pods are a StatefulSet's, with the pods that the chart renders."""

    def adopt(self, replicas: int) -> None:
        """Make the StatefulSet of the Deployment's pods; the Deployment has none."""
        spec = self._of_deployment()
        own = {"serviceName": self.name, "replicas": replicas, "podManagementPolicy": "Parallel"}
        self.create("StatefulSet", {**own, "selector": spec["selector"], "template": spec["template"]})
        self.wait_pods()

    def pod_beside(self, name: str, *, port: int) -> None:
        """Make a pod of the slot on the network of its node, with ports of its own."""
        template = self._of_deployment()["template"]
        spec = {**template["spec"], "hostNetwork": True}
        text = json.dumps({"metadata": template["metadata"], "spec": spec})
        for before, after in ((8000, port), (8001, port + 1)):
            text = text.replace(f"port={before}", f"port={after}")
            text = text.replace(f'"containerPort": {before}', f'"containerPort": {after}')
        made = json.loads(text)
        labels = {"modelswap.dev/slot": self.name}  # and none that a ReplicaSet or a Service selects
        self._apply("v1", "Pod", {"name": name, "labels": labels}, made["spec"])

    def create(self, kind: str, spec: dict[str, Any]) -> None:
        """Apply a workload with the slot's name."""
        self._apply("apps/v1", kind, {"name": self.name}, spec)

    def scale(self, replicas: int) -> None:
        """Change the number of pods, as an autoscaler does."""
        self._kubectl("scale", f"statefulset/{self.name}", f"--replicas={replicas}")

    def wait_pods(self) -> None:
        """Wait until the StatefulSet is rolled out."""
        self._kubectl("rollout", "status", f"statefulset/{self.name}", WAIT)

    def wait_scaled(self, replicas: int) -> None:
        """Wait until there are so many pods, whatever they do."""
        self._kubectl("wait", f"statefulset/{self.name}", f"--for=jsonpath={{.status.replicas}}={replicas}", WAIT)

    def wait_running(self, name: str) -> None:
        """Wait until a pod is Ready."""
        self._kubectl("wait", f"pod/{name}", "--for=condition=Ready", WAIT)

    def digest(self, model: str) -> str:
        """Return a checkpoint's digest."""
        return decode((self.models / model / MANIFEST_FILE).read_bytes()).digest

    def all_serve(self, model: str) -> None:
        """See that every pod proves a version."""
        for pod in self.pods().values():
            assert self.check(pod).digest == self.digest(model)

    def _of_deployment(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._kubectl("get", "deployment", self.deployment(), "-o", "json"))["spec"]
        return found

    def _apply(self, version: str, kind: str, metadata: dict[str, Any], spec: dict[str, Any]) -> None:
        manifest = {"apiVersion": version, "kind": kind, "spec": spec}
        manifest["metadata"] = {**metadata, "namespace": self.namespace}
        self.cluster.kubectl("apply", "-f", "-", stdin=json.dumps(manifest))


@pytest.fixture(scope="module")
def slot(cluster: Cluster, models: Path) -> Iterator[Stateful]:
    """A StatefulSet of two pods."""
    slot = Stateful(cluster, name="stateful", models=models)
    slot.install(replicas=0, model="v1", version="1.0", env={"MODELSWAP_FAULT": "stage:delay=2"})
    slot.adopt(2)
    slot.wait_ready(slot.apply("1.0", "v1"))
    yield slot
    slot.uninstall(wait=True)


def shown(slot: Slot) -> set[tuple[str, str]]:
    """Return name and UID of the pods that status speaks of."""
    return {(pod["name"], pod["uid"]) for pod in slot.get()["status"]["pods"]}


def test_a_pod_that_comes_back_under_its_name_is_another_one(slot: Stateful) -> None:
    generation = slot.apply("1.1", "v2")
    name = slot.swapping_pod()
    before = slot.pods()[name]
    slot.delete_pod(name)
    slot.wait_running(name)
    slot.wait_ready(generation)
    after = slot.pods()[name]
    assert after.uid != before.uid
    assert shown(slot) == {(pod.name, pod.uid) for pod in slot.pods().values()}
    slot.all_serve("v2")
    with slot.control(replace(after, uid=before.uid)) as control, pytest.raises(urllib.error.HTTPError) as caught:
        control.check()
    assert caught.value.code == 421


def test_an_autoscaler_that_changes_its_mind_in_the_middle(slot: Stateful) -> None:
    generation = slot.apply("1.2", "v3")
    slot.swapping_pod()
    for replicas in (3, 1, 3, 2):
        slot.scale(replicas)
        slot.wait_scaled(replicas)
    slot.wait_ready(generation)
    slot.wait_pods()
    slot.wait_ready(generation)
    assert len(slot.pods()) == 2
    slot.all_serve("v3")


def test_scaled_to_zero_and_back_a_pod_serves_what_was_decided_meanwhile(slot: Stateful) -> None:
    slot.scale(0)
    slot.wait_field('{.status.conditions[?(@.type=="Ready")].reason}=ScaledToZero')
    generation = slot.apply("1.3", "v4")
    slot.wait_field(f"{{.status.observedGeneration}}={generation}")
    slot.wait_field('{.status.conditions[?(@.type=="Ready")].reason}=ScaledToZero')  # nobody has read it yet
    slot.scale(1)
    slot.wait_pods()
    slot.wait_field('{.status.conditions[?(@.type=="Ready")].reason}=Succeeded')
    slot.wait_ready(generation)
    slot.wait_engine(f"{slot.name}-0", slot.digest("v4"))


def test_pods_on_the_network_of_one_node_are_told_apart(slot: Stateful) -> None:
    slot.scale(0)
    with two_beside(slot) as names:
        generation = slot.apply("1.4", "v2")
        slot.wait_ready(generation)
        there = slot.pods()
        assert set(there) == set(names)
        assert len({pod.ip for pod in there.values()}) == 1
        assert shown(slot) == {(pod.name, pod.uid) for pod in there.values()}
        slot.all_serve("v2")
    slot.wait_field('{.status.conditions[?(@.type=="Ready")].reason}=ScaledToZero')


@contextmanager
def two_beside(slot: Stateful) -> Iterator[list[str]]:
    """Two pods of the slot on the network of their node, side by side."""
    names = [f"host-{port}" for port in _HOST_PORTS]
    try:
        for name, port in zip(names, _HOST_PORTS, strict=True):
            slot.pod_beside(name, port=port)
        for name in names:
            slot.wait_running(name)
        yield names
    finally:
        slot.cluster.kubectl("-n", slot.namespace, "delete", "pods", *names, "--ignore-not-found", WAIT)
