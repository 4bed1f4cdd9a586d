"""A leader that was stopped and wakes up again finds that another one decided, and can do no harm."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import pytest

from modelswap_engine.protocol.errors import ErrorBody
from modelswap_engine.protocol.states import SwapState
from tests.support.fake_pods import Slot, digest, eventually, ref
from tests.support.fake_sidecar import Content
from tests.support.operated import OperatorProcess

pytestmark = pytest.mark.api

V10, V11 = ref("1.0", "a"), ref("1.1", "b")
# A leader that gets no turn for some seconds on a busy machine is still the leader.
ELECTED = ("--leader-elect", "--lease-seconds=20", "--renew-seconds=10", "--retry-seconds=1")
EXIT_LEASE_LOST = 3


@pytest.fixture
async def replicas(operator: OperatorProcess) -> AsyncIterator[tuple[OperatorProcess, OperatorProcess]]:
    """A leader and a standby; afterwards the folder's operator runs as before."""
    operator.stop()
    operator.start(*ELECTED)
    await asyncio.to_thread(operator.wait_ready)
    standby = operator.another()
    standby.start(*ELECTED)
    await eventually(lambda: standby.get("/readyz") == (200, "standby"))
    yield operator, standby
    for process in (operator, standby):
        assert process.child is not None
        if process.child.status is None:
            os.kill(process.child.pid, signal.SIGCONT)
        process.stop()
    operator.start()
    await asyncio.to_thread(operator.wait_ready)


async def test_a_leader_that_wakes_up_with_the_opposite_decision_changes_nothing(
    slot: Slot, replicas: tuple[OperatorProcess, OperatorProcess]
) -> None:
    leader, standby = replicas
    assert leader.child is not None
    for _ in range(3):
        await slot.add_pod(V10)
    slot.create(V10)
    await slot.ready_at(V10)
    second = slot.pods[1].sidecar
    second.hold_at = SwapState.STAGED
    slot.bump(V11)
    await eventually(lambda: slot.serving() == ["1.1", "1.0", "1.0"] and second.swaps, what=slot.story)
    generation = slot.object()["metadata"]["generation"]
    before = second.swaps[0].fence.epoch

    os.kill(leader.child.pid, signal.SIGSTOP)  # it has decided for 1.1: one pod is there, one on the way, one to come
    broken = ErrorBody(code="ManifestMismatch", message="tensor lm_head.weight has other bytes")
    slot.contents[V11.uri] = Content(digest("b"), late=broken)
    second.hold_at = None
    second.restart(V10)
    leader.give_lease_up()
    await eventually(lambda: standby.get("/readyz") == (200, "ok"))
    await slot.stalled("RolledBack")  # the next leader sees the same spec, and decides against it
    assert slot.object()["metadata"]["generation"] == generation
    assert slot.serving() == ["1.0"] * 3
    settled, asked = slot.object(), [len(pod.sidecar.swaps) for pod in slot.pods]

    os.kill(leader.child.pid, signal.SIGCONT)
    await eventually(lambda: leader.child is not None and leader.child.status is not None)
    assert leader.child.status == EXIT_LEASE_LOST, leader.log()
    assert slot.object() == settled, "a status was written that was not the new leader's"
    assert [len(pod.sidecar.swaps) for pod in slot.pods] == asked
    assert slot.serving() == ["1.0"] * 3
    assert {pod.sidecar.swaps[-1].fence.epoch for pod in slot.pods[:2]} == {before + 1}
    assert slot.condition("Stalled") == ("True", "RolledBack")
