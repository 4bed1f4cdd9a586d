"""The status: who may write it, what it holds, and what kubectl shows of it."""

from typing import Any

import pytest

from tests.support.custom import DIGEST, GROUP_VERSION, Namespace, lora_adapter, model_version

pytestmark = pytest.mark.api
NOW = "2026-01-02T03:04:05Z"

FULL: dict[str, Any] = {
    "observedGeneration": 1,
    "target": {"revision": 12, "version": "1.1", "digest": DIGEST, "resolvedURI": "file:///models/chat-1.1"},
    "stable": {"revision": 11, "version": "1.0", "digest": DIGEST},
    "versions": [{"version": "1.0", "digest": DIGEST, "pods": 3}, {"version": "1.1", "digest": DIGEST, "pods": 1}],
    "rollout": {
        "state": "Progressing",
        "attempt": 1,
        "candidatePodUIDs": ["uid"],
        "soak": [{"uid": "uid", "bootID": "b", "since": NOW, "requestsBefore": 3, "errorsBefore": 1, "restarts": 1}],
        "lastProgressTime": NOW,
    },
    "plan": [
        {
            "fromDigest": DIGEST,
            "changedTensors": 18,
            "totalTensors": 272,
            "changedBytes": 1 << 40,
            "totalBytes": 1 << 41,
            "mode": "Diff",
            "adapters": ["support: file:///models/adapters/support"],
        }
    ],
    "pods": [
        {
            "name": "chat-0",
            "uid": "uid",
            "bootID": "boot",
            "version": "1.0",
            "digest": DIGEST,
            "state": "Swapping",
            "message": "fetching",
        }
    ],
    "podCounts": {"total": 5, "counted": 4, "ready": 1, "excluded": 1},
    "failures": [
        {"generation": 1, "digest": DIGEST, "reason": "DigestMismatch", "message": "the pin differs", "time": NOW}
    ],
    "history": [
        {
            "revision": 11,
            "version": "1.0",
            "digest": DIGEST,
            "source": "file:///models/chat-1.0",
            "startTime": NOW,
            "completionTime": NOW,
            "result": "Succeeded",
            "commitWindowMicroseconds": 900,
            "bytesFetched": 1 << 40,
            "fieldManager": "kubectl",
            "provenance": {"who": "ci@example.org", "job": "train-41"},
            "signedBy": "key release.pub (sha256:c578808f711c3828)",
        }
    ],
    "conditions": [
        {
            "type": "Ready",
            "status": "Unknown",
            "observedGeneration": 1,
            "lastTransitionTime": NOW,
            "reason": "Progressing",
            "message": "1 of 4 pods serve 1.1",
        }
    ],
}


def status_of(kind: str, name: str, **status: Any) -> dict[str, Any]:
    return {"apiVersion": GROUP_VERSION, "kind": kind, "metadata": {"name": name}, "status": status}


def condition(kind: str, status: str = "True") -> dict[str, Any]:
    return {"type": kind, "status": status, "reason": "Because", "message": "why", "lastTransitionTime": NOW}


def test_whole_status_is_kept_as_applied(namespace: Namespace) -> None:
    namespace.create(model_version())
    stored = namespace.apply(status_of("ModelVersion", "slot", **FULL), manager="operator", subresource="status")
    assert stored["status"] == FULL


def test_applying_the_same_status_again_changes_nothing(namespace: Namespace) -> None:
    namespace.create(model_version())
    versions = {
        namespace.apply(status_of("ModelVersion", "slot", **FULL), manager="operator", subresource="status")[
            "metadata"
        ]["resourceVersion"]
        for _ in range(2)
    }
    assert len(versions) == 1


def test_conditions_belong_to_who_applied_them(namespace: Namespace) -> None:
    namespace.create(model_version())

    def apply(manager: str, *kinds: str) -> set[str]:
        wanted = status_of("ModelVersion", "slot", conditions=[condition(kind) for kind in kinds])
        stored = namespace.apply(wanted, manager=manager, subresource="status")
        return {found["type"] for found in stored["status"]["conditions"]}

    assert apply("operator", "Ready", "Reconciling") == {"Ready", "Reconciling"}
    assert apply("policy", "Approved") == {"Ready", "Reconciling", "Approved"}
    assert apply("operator", "Ready") == {"Ready", "Approved"}


def test_status_does_not_raise_the_generation_and_spec_does(namespace: Namespace) -> None:
    namespace.create(model_version())
    stored = namespace.apply(status_of("ModelVersion", "slot", **FULL), manager="operator", subresource="status")
    assert stored["metadata"]["generation"] == 1
    assert namespace.apply(model_version(suspend=True), manager="user")["metadata"]["generation"] == 2


def test_status_cannot_be_written_with_the_spec(namespace: Namespace) -> None:
    stored = namespace.create({**model_version(), "status": {"observedGeneration": 5}})
    assert stored["status"] == {"observedGeneration": -1}


@pytest.mark.parametrize(
    "status",
    [
        {"observedGeneration": -2},
        {"conditions": [condition("Ready", "Maybe")]},
        {"conditions": [condition("Not CamelCase")]},
        {"conditions": [{"type": "Ready", "status": "True"}]},
        {"pods": [{"message": "x" * 4097}]},
        {"pods": [{}] * 51},
        {"unheardOf": 1},
    ],
    ids=lambda status: next(iter(status)),
)
def test_malformed_status_is_refused(namespace: Namespace, status: dict[str, Any]) -> None:
    namespace.create(model_version())
    with pytest.raises(RuntimeError, match=next(iter(status))):
        namespace.apply(status_of("ModelVersion", "slot", **status), manager="operator", subresource="status")


def test_model_version_columns(namespace: Namespace) -> None:
    namespace.create(model_version())
    namespace.apply(status_of("ModelVersion", "slot", **FULL), manager="operator", subresource="status")
    head, row = namespace.table("mv")
    assert head.split() == ["NAME", "VERSION", "SERVING", "READY", "STATUS", "AGE"]
    assert row.split()[:4] == ["slot", "1.0", "1.0", "Unknown"]
    assert "1 of 4 pods serve 1.1" in row
    head, row = namespace.table("mv", "-o", "wide")
    assert head.split()[6:] == ["MODEL", "REASON", "ROLLOUT", "DIGEST"]
    assert row.split()[-4:] == ["chat", "Progressing", "Progressing", DIGEST]


def test_lora_adapter_columns_and_status(namespace: Namespace) -> None:
    namespace.create(lora_adapter())
    status = {
        "observedGeneration": 1,
        "target": {"uri": "file:///models/support", "digest": DIGEST, "baseDigest": DIGEST},
        "loadedPods": 2,
        "wantedPods": 3,
        "pods": [{"name": "p", "uid": "u", "bootID": "b", "digest": DIGEST, "state": "Loaded", "message": "ok"}],
        "conditions": [condition("Ready", "False")],
    }
    stored = namespace.apply(status_of("LoRAAdapter", "adapter", **status), manager="operator", subresource="status")
    assert stored["status"] == status
    head, row = namespace.table("lora", "-o", "wide")
    assert head.split() == ["NAME", "ADAPTER", "SLOT", "READY", "STATUS", "AGE", "LOADED", "REASON", "DIGEST"]
    assert row.split()[:5] == ["adapter", "support", "slot", "False", "why"]
    assert row.split()[-3:] == ["2", "Because", DIGEST]


def test_objects_of_an_older_field_set_keep_their_status(namespace: Namespace) -> None:
    # An operator one release back applies fewer fields: nothing that it leaves out is required.
    namespace.create(model_version())
    stored = namespace.apply(
        status_of("ModelVersion", "slot", observedGeneration=1), manager="operator", subresource="status"
    )
    assert stored["status"] == {"observedGeneration": 1}
