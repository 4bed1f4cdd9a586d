"""Pods stage a version before the first of them changes: the operator's process, a real API server, fake sidecars."""

from __future__ import annotations

import pytest

from modelswap_engine.protocol.errors import ErrorBody
from modelswap_engine.protocol.states import SwapState
from tests.support.fake_pods import FakePod, Slot, digest, eventually, ref
from tests.support.fake_sidecar import Content
from tests.support.operated import OperatorProcess

pytestmark = pytest.mark.api

V10, V11, V12 = ref("1.0", "a"), ref("1.1", "b"), ref("1.2", "c")


async def prepared(slot: Slot, *, protocols: tuple[int, ...] = (2, 2, 2), **spec: object) -> None:
    """A slot whose pods serve 1.0, as its ModelVersion says; each with a sidecar of one protocol version."""
    for protocol in protocols:
        (await slot.add_pod(V10)).sidecar.protocol = protocol
    slot.create(V10, **spec)
    await slot.ready_at(V10)


def holds(pod: FakePod) -> bool:
    operation = pod.sidecar.operation
    waits = operation is not None and operation.hold is not None and operation.hold.held
    return waits and operation is not None and not operation.state.terminal


def told(pod: FakePod) -> int:
    """How often it was told to go on."""
    return sum(call.endswith("/proceed") for call in pod.sidecar.calls)


async def staged(slot: Slot, count: int) -> None:
    """So many pods hold the version, and the status says so, while none has changed."""
    await eventually(lambda: sum(map(holds, slot.pods)) == count, what=slot.story)
    await eventually(lambda: slot.object()["status"]["rollout"].get("stagedPods") == count, what=slot.story)
    assert set(slot.serving()) == {"1.0"}


async def test_all_stage_before_the_first_one_changes_and_an_operator_that_dies_costs_nothing(
    slot: Slot, operator: OperatorProcess
) -> None:
    await prepared(slot)
    last = slot.pods[2]
    last.sidecar.hold_at = SwapState.STAGED
    slot.bump(V11)
    await staged(slot, 2)
    assert slot.condition("Reconciling") == ("True", "Staging")
    assert "2/3 pods have staged it" in slot.message()
    found = slot.assignment()
    assert found is not None
    assert found.candidate is not None
    assert (found.candidate.digest, found.candidate.pod_uids) == (V11.digest, [])
    operator.kill()
    last.sidecar.go.set()
    operator.start()
    await slot.ready_at(V11)
    assert [len(p.sidecar.swaps) for p in slot.pods] == [1, 1, 1], "nobody staged twice"
    assert [told(p) for p in slot.pods] == [1, 1, 1]
    reasons = [reason for reason, _ in slot.events()]
    assert (reasons.count("StagingStarted"), reasons.count("SwapStarted")) == (3, 3)
    assert "stagedPods" not in slot.object()["status"]["rollout"]


async def test_how_long_staging_takes_is_told_once_it_was_measured(slot: Slot) -> None:
    await prepared(slot, protocols=(2, 2))
    slot.bump(V11)
    await slot.ready_at(V11)
    status = slot.object()["status"]
    assert "stagingSeconds" not in status["plan"][0], "nothing was measured before"
    assert status["history"][0]["stagingBytesPerSecond"] == 100
    slot.bump(V12)
    await slot.ready_at(V12)
    plan = slot.object()["status"]["plan"][0]
    assert plan["stagingSeconds"] == 2
    assert plan["stagingBasis"] == "200 B to read at 100 B/s, as the slowest pod did for 1.1 (revision 4)"


async def test_what_one_pod_refuses_late_changes_none_and_holds_nothing(slot: Slot) -> None:
    await prepared(slot)
    last = slot.pods[2]
    error = ErrorBody(code="ManifestMismatch", message="tensor lm_head.weight has other bytes", advice="copy it again")
    last.sidecar.contents = slot.contents | {V11.uri: Content(digest("b"), late=error)}
    last.sidecar.hold_at = SwapState.STAGED
    slot.bump(V11)
    await staged(slot, 2)
    last.sidecar.go.set()
    await slot.stalled("ManifestMismatch")
    await eventually(lambda: not any(map(holds, slot.pods)), what=slot.story)
    assert slot.serving() == ["1.0", "1.0", "1.0"]
    assert [told(p) for p in slot.pods] == [0, 0, 0]


async def test_a_newer_spec_takes_the_place_of_what_is_held(slot: Slot) -> None:
    await prepared(slot)
    slot.pods[2].sidecar.hold_at = SwapState.STAGED
    slot.bump(V11)
    await staged(slot, 2)
    slot.bump(V12)
    await slot.ready_at(V12)
    assert "1.1" not in {v["version"] for v in slot.object()["status"]["versions"]}
    assert [told(p) for p in slot.pods] == [1, 1, 1]


@pytest.mark.parametrize("why", ["an old sidecar", "switched off"])
async def test_else_each_pod_stages_when_its_turn_comes(slot: Slot, why: str) -> None:
    old = why == "an old sidecar"
    await prepared(slot, protocols=(2, 1, 2) if old else (2, 2, 2), rollout={"stageAhead": old})
    slot.bump(V11)
    await slot.ready_at(V11)
    assert all(p.sidecar.swaps[0].hold is None for p in slot.pods)
    assert [told(p) for p in slot.pods] == [0, 0, 0]
