"""What tests of GitOps ask of a slot: a version as it lies in Git, what the pods prove, and that they were left alone.

Refuses to know which controller applies it.
"""

from __future__ import annotations

import stamina
import yaml

from modelswap_engine.checkpoint.manifest import MANIFEST_FILE, decode
from tests.support.pod import Pod
from tests.support.stack import Slot


def digest_of(slot: Slot, model: str) -> str:
    """Return the content digest of a model of the tests."""
    return decode((slot.models / model / MANIFEST_FILE).read_bytes()).digest


def manifest(slot: Slot, version: str, model: str) -> str:
    """A pinned version of a model, as it lies in Git."""
    thing = {
        "apiVersion": "modelswap.dev/v1alpha1",
        "kind": "ModelVersion",
        "metadata": {"name": slot.name, "namespace": slot.namespace},
        "spec": {
            "servedModelName": slot.name,
            "version": version,
            "source": {"uri": f"file://{slot.inside(model)}", "digest": digest_of(slot, model)},
        },
    }
    return yaml.safe_dump(thing)


def identity(pods: dict[str, Pod]) -> dict[str, tuple[str, int, str]]:
    """Return what changes when a pod or its container is another one."""
    return {name: (pod.uid, pod.restarts, pod.started) for name, pod in pods.items()}


def proved(slot: Slot) -> set[str]:
    """Return the digests that the pods prove when they hash what is live."""
    return {slot.check(pod).digest for pod in slot.pods().values()}


def assert_left_alone(slot: Slot) -> None:
    """The controller took the object along; the pods serve on, and the next owner finds the slot free."""
    assert slot.cluster.try_kubectl("-n", slot.namespace, "get", "modelversion", slot.name).returncode != 0
    assert all(pod.ready for pod in slot.pods().values())
    for attempt in stamina.retry_context(on=AssertionError, attempts=None, timeout=60, wait_max=1):
        with attempt:
            assert slot.assignment().released
