"""What a GitOps controller sees of the operator's work: nothing that is its own, and answers to what it asks."""

from __future__ import annotations

import pytest

from modelswap_operator.api.labels import FIELD_MANAGER, MANAGED_BY_LABEL, REQUESTED_AT, SLOT_LABEL
from tests.support.fake_pods import Slot, eventually, ref

pytestmark = pytest.mark.api

V10, V11 = ref("1.0", "a"), ref("1.1", "b")
TRACKING_LABELS = {
    "app.kubernetes.io/instance": "models",
    "argocd.argoproj.io/instance": "models",
    "kustomize.toolkit.fluxcd.io/name": "models",
    "app.kubernetes.io/managed-by": "Helm",
}
TRACKING_ANNOTATIONS = {
    "argocd.argoproj.io/tracking-id": "models:modelswap.dev/ModelVersion:default/slot",
    "meta.helm.sh/release-name": "models",
}


async def prepared(slot: Slot) -> None:
    await slot.add_pod(V10)
    slot.create(V10)
    slot.mark(labels=TRACKING_LABELS, annotations=TRACKING_ANNOTATIONS)
    await slot.ready_at(V10)


async def test_nothing_that_is_tracked_is_copied_or_changed(slot: Slot) -> None:
    """A copied label would make the assignment a resource of the application, to be pruned as one not in Git."""
    await prepared(slot)
    slot.bump(V11)
    await slot.ready_at(V11)
    assignment = slot.configmap()["metadata"]
    assert assignment["labels"] == {SLOT_LABEL: slot.name, MANAGED_BY_LABEL: FIELD_MANAGER}
    assert not {"annotations", "ownerReferences", "finalizers"} & assignment.keys()
    metadata = slot.object()["metadata"]
    assert (metadata["labels"], metadata["annotations"]) == (TRACKING_LABELS, TRACKING_ANNOTATIONS)
    written = [entry for entry in metadata["managedFields"] if entry["manager"] == FIELD_MANAGER]
    assert [(entry["operation"], entry["subresource"]) for entry in written] == [("Apply", "status")]
    assert "finalizers" not in metadata


async def test_a_request_for_another_try_is_acknowledged_and_no_edit(slot: Slot) -> None:
    await prepared(slot)
    before = slot.object()["metadata"]["generation"]
    slot.mark(annotations={REQUESTED_AT: "2026-01-01T00:00:00Z"})
    await eventually(lambda: slot.object()["status"].get("lastHandledRequestAt") == "2026-01-01T00:00:00Z")
    assert slot.object()["metadata"]["generation"] == before
    assert slot.condition("Ready") == ("True", "Succeeded")
    assert [pod.sidecar.swaps for pod in slot.pods] == [[]]
