"""The operator's process against a real API server, with sidecars that speak the protocol behind its pods."""

from __future__ import annotations

import asyncio
import re

import msgspec
import pytest

from modelswap_engine.protocol.codec import encode
from modelswap_engine.protocol.errors import ErrorBody
from modelswap_engine.protocol.messages import SwapStatus, VersionRef
from modelswap_engine.protocol.states import SwapState
from tests.support.fake_pods import Slot, digest, eventually, ref
from tests.support.fake_sidecar import Content
from tests.support.operated import OperatorProcess
from tests.support.rest import Rest

pytestmark = pytest.mark.api

V10, V11, V12 = ref("1.0", "a"), ref("1.1", "b"), ref("1.2", "c")


async def prepared(slot: Slot, pods: int = 2, **spec: object) -> None:
    """A slot whose pods serve 1.0, as its ModelVersion says."""
    for _ in range(pods):
        await slot.add_pod(V10)
    slot.create(V10, **spec)
    await slot.ready_at(V10)


async def test_a_version_bump_swaps_pod_after_pod(slot: Slot, operator: OperatorProcess) -> None:
    await prepared(slot, 3)
    assert [len(p.sidecar.swaps) for p in slot.pods] == [0, 0, 0]
    assert slot.pods[0].sidecar.live == V10
    slot.bump(V11)
    await slot.ready_at(V11)
    assert [len(p.sidecar.swaps) for p in slot.pods] == [1, 1, 1]
    first = slot.pods[0].sidecar.swaps[0]
    thing = slot.object()
    assert first.fence.owner_uid == thing["metadata"]["uid"]
    assert first.fence.pod_uid == slot.pods[0].uid
    assert first.fence.epoch > 0
    status = thing["status"]
    assert status["observedGeneration"] == thing["metadata"]["generation"]
    assert status["target"]["digest"] == status["stable"]["digest"] == V11.digest
    assert status["versions"] == [{"version": "1.1", "digest": V11.digest, "pods": 3}]
    assert status["podCounts"] == {"total": 3, "counted": 3, "ready": 3, "excluded": 0}
    assert (status["history"][0]["version"], status["history"][0]["result"]) == ("1.1", "Succeeded")
    assert (status["history"][0]["bytesFetched"], status["history"][0]["commitWindowMicroseconds"]) == (600, 120)
    assert slot.message() == "3/3 pods serve 1.1"
    reasons = [reason for reason, _ in slot.events()]
    assert reasons.count("SwapStarted") == 3
    assert "AssignmentPublished" in reasons
    assert "Succeeded" in reasons
    assert not thing["metadata"].get("finalizers")
    assert not thing["metadata"].get("annotations")


async def test_a_bad_digest_stalls_with_its_reason_and_a_revert_heals(slot: Slot) -> None:
    await prepared(slot)
    slot.bump(V11, pin=digest("9"))
    await slot.stalled("DigestMismatch")
    assert slot.condition("Ready") == ("False", "DigestMismatch")
    assert slot.condition("Serving") == ("True", "PodsServe")
    assert slot.object()["status"]["observedGeneration"] == slot.object()["metadata"]["generation"]
    assert "2/2 pods serve 1.0" in slot.message()
    assert [len(p.sidecar.swaps) for p in slot.pods] == [0, 0]
    assert any(reason == "DigestMismatch" for reason, _ in slot.events())
    slot.bump(V10)
    await slot.ready_at(V10)
    assert slot.condition("Stalled") is None


async def test_a_version_that_fails_in_the_first_pod_is_withdrawn(slot: Slot) -> None:
    await prepared(slot)
    error = ErrorBody(code="ManifestMismatch", message="tensor lm_head.weight has other bytes", advice="copy it again")
    slot.contents["file:///models/1.1"] = Content(digest("b"), late=error)
    slot.bump(V11)
    await slot.stalled("ManifestMismatch")
    assert sum(len(p.sidecar.swaps) for p in slot.pods) == 1
    assert "tensor lm_head.weight has other bytes; copy it again" in slot.message()
    found = slot.assignment()
    assert found is not None
    assert found.stable is not None
    assert (found.stable.digest, found.candidate) == (V10.digest, None)


async def test_a_missing_source_names_pod_and_next_step_and_may_appear_later(slot: Slot) -> None:
    await prepared(slot)
    slot.bump(VersionRef(version="1.1", uri="file:///models/none"))
    await eventually(lambda: slot.condition("Ready") == ("False", "SourceNotFound"), what=slot.story)
    assert any(f"pod {pod.name}" in slot.message() for pod in slot.pods)
    assert "check spec.source.uri" in slot.message()
    assert slot.condition("Reconciling") == ("True", "ProgressingWithRetry")
    slot.contents["file:///models/none"] = Content(digest("b"))  # the copy was late
    await slot.ready_at(VersionRef(version="1.1", uri="file:///models/none", digest=digest("b")))


async def test_a_revert_in_the_middle_of_a_rollout(slot: Slot) -> None:
    await prepared(slot, 3)
    slot.pods[1].sidecar.hold_at = SwapState.PAUSING
    slot.bump(V11)
    await eventually(lambda: slot.serving() == ["1.1", "1.0", "1.0"] and slot.pods[1].sidecar.swaps)
    await eventually(lambda: "1/3 pods serve 1.1" in slot.message(), what=slot.story)
    await eventually(lambda: f"({slot.pods[1].name}: Prepared)" in slot.message(), what=slot.story)
    slot.bump(V10)
    await slot.ready_at(V10)
    assert "POST /swaps/" in " ".join(slot.pods[1].sidecar.calls)


async def test_a_newer_spec_supersedes(slot: Slot) -> None:
    await prepared(slot)
    slot.pods[0].sidecar.hold_at = SwapState.STAGED
    slot.bump(V11)
    await eventually(lambda: slot.pods[0].sidecar.swaps)
    slot.bump(V12)
    await slot.ready_at(V12)
    results = [(h["version"], h["result"]) for h in slot.object()["status"]["history"]]
    assert results == [("1.2", "Succeeded"), ("1.1", "Superseded"), ("1.0", "Succeeded")]


async def test_a_canary_waits_for_its_requests_and_errors_take_it_back(slot: Slot, operator: OperatorProcess) -> None:
    canary = {"pods": 1, "soakSeconds": 1, "minRequests": 10, "maxErrorPercent": 10}
    await prepared(slot, 3, rollout={"canary": canary})
    slot.bump(V11)
    await eventually(lambda: "have soaked and wait for requests: 0 of 10 answered" in slot.message(), what=slot.story)
    assert slot.condition("Reconciling") == ("True", "Soaking")
    assert sorted(slot.serving()) == ["1.0", "1.0", "1.1"]
    first = next(p for p in slot.pods if p.sidecar.live == V11)
    soak = slot.object()["status"]["rollout"]["soak"]
    assert [(row["uid"], row["bootID"]) for row in soak] == [(first.uid, first.sidecar.boot_id)]
    operator.kill()
    first.sidecar.answer(ok=9, failed=1)
    operator.start()
    await slot.ready_at(V11)
    assert "served 1.1 for 1 s, 10 requests answered, 1 of them failed" in str(slot.events())
    slot.bump(V12)
    await eventually(lambda: "1.2" in slot.serving(), what=slot.story)
    await eventually(lambda: slot.object()["status"]["rollout"].get("soak"), what=slot.story)
    next(p for p in slot.pods if p.sidecar.live == V12).sidecar.answer(failed=2)
    await slot.stalled("RolledBack")
    assert slot.serving() == ["1.1"] * 3
    assert "2 of 2 requests failed on canary pods" in slot.message()


async def test_a_freeze_of_the_fleet_holds_a_version_back_but_one_that_may_go(
    slot: Slot, operator: OperatorProcess, rest: Rest
) -> None:
    await prepared(slot)
    path = f"/api/v1/namespaces/{slot.namespace}/configmaps"
    policy = {"metadata": {"name": "changes.modelswap.dev"}, "data": {"freeze": "true", "reason": "year end"}}
    rest.call("POST", path, policy).accepted()
    try:
        await eventually(lambda: '"frozen": true' in operator.log(), what=operator.log)
        slot.bump(V11)
        await eventually(lambda: slot.condition("Ready") == ("Unknown", "ChangesFrozen"), what=slot.story)
        assert "0/2 pods serve 1.1; changes are frozen: year end" in slot.message()
        assert sum(len(p.sidecar.swaps) for p in slot.pods) == 0
        slot.mark(annotations={"modelswap.dev/change-now": str(slot.generation())})
        await slot.ready_at(V11)
        slot.bump(V12)
        await eventually(lambda: slot.condition("Ready") == ("Unknown", "ChangesFrozen"), what=slot.story)
    finally:
        rest.call("DELETE", f"{path}/changes.modelswap.dev").accepted()
    await slot.ready_at(V12)


async def test_a_rollout_is_given_up_by_an_annotation(slot: Slot) -> None:
    await prepared(slot)
    slot.pods[0].sidecar.hold_at = SwapState.STAGED
    slot.bump(V11)
    await eventually(lambda: slot.pods[0].sidecar.swaps, what=slot.story)
    slot.mark(annotations={"modelswap.dev/abort": str(slot.generation())})
    await eventually(lambda: slot.condition("Stalled") is not None, what=slot.story)
    assert "modelswap.dev/abort" in slot.message()
    assert slot.serving() == ["1.0", "1.0"]
    slot.bump(V12)
    await slot.ready_at(V12)


async def test_what_was_changed_by_hand_is_told_and_put_right(slot: Slot) -> None:
    await prepared(slot)
    slot.bump(V11)
    await slot.ready_at(V11)
    pod = slot.pods[0].sidecar
    pod.live, pod.operation = V12, SwapStatus(operation_id="by-hand", state=SwapState.SERVING, target=V12)
    pod.seq += 1
    await eventually(lambda: [reason for reason, _ in slot.events()].count("Drifted"), what=slot.story)
    await slot.ready_at(V11)


async def test_suspend_publishes_the_plan_and_changes_nothing(slot: Slot) -> None:
    await prepared(slot)
    slot.patch(version="1.1", source={"uri": V11.uri}, suspend=True)
    await eventually(lambda: slot.object()["status"].get("plan"), what=slot.story)
    assert slot.object()["status"]["plan"] == [
        {
            "fromDigest": V10.digest,
            "changedTensors": 2,
            "totalTensors": 10,
            "changedBytes": 200,
            "totalBytes": 1000,
            "mode": "Diff",
            "bytesToFetch": 200,
        }
    ]
    assert slot.condition("Suspended") == ("True", "Suspended")
    assert sum(len(p.sidecar.swaps) for p in slot.pods) == 0
    slot.patch(suspend=False)
    await slot.ready_at(V11)


async def test_an_unreachable_pod_is_named_and_holds_up_no_other(slot: Slot) -> None:
    await prepared(slot)
    lost = slot.pods[1]
    await lost.sidecar.stop()
    slot.bump(V11)
    await eventually(lambda: slot.serving()[0] == "1.1", what=slot.story)
    await eventually(lambda: slot.condition("Ready") == ("Unknown", "EngineUnreachable"), what=slot.story)
    await eventually(lambda: f"1/2 pods serve 1.1 ({lost.name}: Unreachable)" in slot.message(), what=slot.story)
    worst = slot.object()["status"]["pods"][0]
    assert (worst["name"], worst["state"]) == (lost.name, "Unreachable")
    assert worst["message"].startswith("EngineUnreachable: on node node-1: no connection")
    slot.delete_pod(lost)
    await slot.ready_at(V11)


async def test_a_pod_that_refuses_the_token_is_engine_denied(slot: Slot) -> None:
    await prepared(slot)
    slot.pods[0].sidecar.audience = "somebody-else"
    await eventually(lambda: slot.condition("Ready") == ("Unknown", "EngineDenied"), what=slot.story)
    assert "--allowed-subject" in slot.message()
    slot.pods[0].sidecar.audience = slot.pods[0].uid
    await slot.ready_at(V10)


async def test_a_new_pod_counts_once_ready_and_is_brought_along(slot: Slot) -> None:
    await prepared(slot)
    slot.bump(V11)
    await slot.ready_at(V11)
    late = await slot.add_pod(V10, ready=False)
    await eventually(lambda: slot.object()["status"]["podCounts"]["excluded"] == 1, what=slot.story)
    assert slot.condition("Ready") == ("True", "Succeeded")
    slot.set_ready(late.name, True)
    await eventually(lambda: slot.serving() == ["1.1"] * 3, what=slot.story)
    await slot.ready_at(V11)


async def test_deletion_releases_and_recreation_goes_on_above(slot: Slot) -> None:
    await prepared(slot)
    slot.bump(V11)
    await slot.ready_at(V11)
    before = slot.assignment()
    assert before is not None
    slot.delete()
    await eventually(lambda: (found := slot.assignment()) is not None and found.released)
    released = slot.assignment()
    assert released is not None
    assert released.revision > before.revision
    assert released.stable == before.stable
    assert slot.serving() == ["1.1", "1.1"]
    for pod in slot.pods:  # what a sidecar does when its mounted assignment is marked as released
        assert pod.sidecar.accepted is not None
        pod.sidecar.accepted = type(pod.sidecar.accepted)(revision=released.revision, epoch=1, released=True)
    slot.create(V10)
    await slot.ready_at(V10)
    again = slot.assignment()
    assert again is not None
    assert again.revision > released.revision
    assert (again.released, again.owner_uid) == (False, slot.object()["metadata"]["uid"])


async def test_no_pods_waits_and_scaled_to_zero_is_ready(slot: Slot) -> None:
    slot.create(V10, rollout={"progressDeadlineSeconds": 1})
    await eventually(lambda: slot.condition("Reconciling") == ("True", "WaitingForPods"), what=slot.story)
    await slot.stalled("ProgressDeadlineExceeded")
    pod = await slot.add_pod(V10)
    await slot.ready_at(V10)
    slot.delete_pod(pod)
    await eventually(lambda: slot.condition("Ready") == ("True", "ScaledToZero"), what=slot.story)


async def test_a_version_that_is_changed_while_there_are_no_pods_waits_for_them_at_rest(slot: Slot) -> None:
    await prepared(slot, 1)
    slot.delete_pod(slot.pods[0])
    await eventually(lambda: slot.condition("Ready") == ("True", "ScaledToZero"), what=slot.story)
    slot.bump(V11, pin=V11.digest)
    said = f"no pod has the label modelswap.dev/slot: {slot.name}; those that come start on 1.0 from {V10.uri} and"
    await eventually(lambda: slot.message().startswith(said), what=slot.story)
    assert slot.object()["status"]["observedGeneration"] == slot.generation()
    assert slot.condition("Ready") == ("True", "ScaledToZero")
    assert slot.condition("Stalled") is None
    pod = await slot.add_pod(V10)
    await slot.ready_at(V11)
    assert [swap.target.digest for swap in pod.sidecar.swaps] == [V11.digest]


async def test_nothing_is_written_in_steady_state(slot: Slot, operator: OperatorProcess) -> None:
    await prepared(slot)
    slot.bump(V11)
    await slot.ready_at(V11)
    versions = set()
    asked = len(slot.pods[0].sidecar.calls)
    # Two resyncs at least: each asks every pod.
    while len(slot.pods[0].sidecar.calls) < asked + 2:
        versions.add(slot.object()["metadata"]["resourceVersion"])
        await asyncio.sleep(0.1)
    versions.add(slot.object()["metadata"]["resourceVersion"])
    assert len(versions) == 1


async def test_the_operator_killed_in_the_middle_ends_where_it_would_have(
    slot: Slot, operator: OperatorProcess
) -> None:
    await prepared(slot, 3)
    slot.pods[1].sidecar.hold_at = SwapState.STAGED
    slot.bump(V11)
    await eventually(lambda: len(slot.pods[1].sidecar.swaps) == 1, what=slot.story)
    epoch = slot.pods[1].sidecar.swaps[0].fence.epoch
    operator.kill()
    slot.pods[1].sidecar.go.set()
    operator.start()
    await slot.ready_at(V11)
    assert [len(p.sidecar.swaps) for p in slot.pods] == [1, 1, 1]
    assert slot.pods[2].sidecar.swaps[0].fence.epoch == epoch + 1


async def test_deleted_while_the_operator_was_down(slot: Slot, operator: OperatorProcess) -> None:
    await prepared(slot)
    operator.stop()
    slot.delete()
    operator.start()
    await eventually(lambda: (found := slot.assignment()) is not None and found.released)


async def test_a_forged_epoch_does_not_freeze_the_slot(slot: Slot, operator: OperatorProcess, rest: Rest) -> None:
    await prepared(slot)
    current = slot.assignment()
    assert current is not None
    forged = msgspec.structs.replace(current, epoch=current.epoch + 1000)
    path = f"/api/v1/namespaces/{slot.namespace}/configmaps/modelswap-{slot.name}"
    data = {"data": {"assignment.json": encode(forged).decode()}}
    rest.call("PATCH", path, data, content="application/merge-patch+json").accepted()
    slot.bump(V11)
    await slot.ready_at(V11)
    assert slot.pods[0].sidecar.swaps[0].fence.epoch > forged.epoch
    assert "StaleLeader" in [reason for reason, _ in slot.events()]
    assert "modelswap_stale_leader_total" in operator.get("/metrics")[1]


async def test_probes_and_metrics(slot: Slot, operator: OperatorProcess) -> None:
    await prepared(slot, 1)
    assert operator.get("/livez") == (200, "ok")
    assert operator.get("/readyz") == (200, "ok")
    status, page = operator.get("/metrics")
    assert status == 200
    assert re.search(r'modelswap_reconcile_total\{kind="ModelVersion",result="success"\} [1-9]', page)
    assert re.search(r'modelswap_workqueue_adds_total\{kind="ModelVersion"\} [1-9]', page)
    assert re.search(r'modelswap_workqueue_depth\{kind="ModelVersion"\} \d', page)
    assert "modelswap_leader 1.0" in page
    await eventually(lambda: 'modelswap_objects{kind="ModelVersion",standing="Ready"}' in operator.get("/metrics")[1])
    assert 'modelswap_watch_last_event_timestamp_seconds{resource="pods"}' in page
    assert slot.name not in page
    assert not re.findall(r".*Traceback.*", operator.log())


async def test_a_standby_takes_over_under_a_higher_epoch(slot: Slot, operator: OperatorProcess) -> None:
    await prepared(slot)
    flags = ("--leader-elect", "--lease-seconds=8", "--renew-seconds=6", "--retry-seconds=1")
    operator.stop()
    operator.start(*flags)
    operator.wait_ready()
    standby = operator.another()
    standby.start(*flags)
    await eventually(lambda: standby.get("/readyz") == (200, "standby"))
    slot.bump(V11)
    await slot.ready_at(V11)
    first = slot.pods[0].sidecar.swaps[-1].fence.epoch
    operator.kill()
    slot.bump(V12)
    await slot.ready_at(V12)
    assert slot.pods[0].sidecar.swaps[-1].fence.epoch == first + 1
    standby.stop()
    operator.start()
    operator.wait_ready()
