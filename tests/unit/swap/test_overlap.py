"""Overlap: nobody waits, no answer changes hands, and the old instance goes when it is idle or its time is over."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from modelswap_engine.backends.port import RequestPolicy
from modelswap_engine.protocol.messages import RollbackRequest
from modelswap_engine.protocol.policy import Traffic, TrafficMode
from modelswap_engine.protocol.states import SwapState
from tests.support.fake_backend import Fault
from tests.support.fake_source import FakeCheckpoint
from tests.support.swapping import checkpoint, request

OVERLAP = Traffic(mode=TrafficMode.OVERLAP)


async def arrive(world, *, submitted=True):
    """Let a request in, which must not have to wait; return its admission and what ends it."""
    stack = AsyncExitStack()
    admission = await asyncio.wait_for(stack.enter_async_context(world.coordinator.admission()), 1)
    if submitted:
        admission.submitted()
    return admission, stack.aclose


async def begin(world, target, operation_id="op-1"):
    await world.coordinator.swap(request(target, operation_id, traffic=OVERLAP))
    await world.clock.settle()
    return world.coordinator.operation(operation_id)


async def test_new_requests_get_the_new_version_while_old_ones_end_on_theirs(world, target):
    closures = world.state.gate.closures
    old, end_old = await arrive(world)
    admitting, end_admitting = await arrive(world, submitted=False)
    status = await begin(world, target)
    assert status.state is SwapState.VERIFIED
    assert status.overlapped_requests == 2
    assert world.state.live == target
    assert world.coordinator.ready()
    assert (old.live, admitting.live) == (world.template, world.template)
    # Who was let in before the switch can still be handed to the instance that was promised.
    assert world.coordinator.serves(admitting.live.digest)
    new, end_new = await arrive(world)
    assert new.live == target
    await world.clock.advance(20)
    assert "retire" not in world.backend.steps
    await end_old()
    await world.clock.advance(1)
    assert "retire" not in world.backend.steps
    await end_admitting()
    status = await world.ended("op-1")
    assert status.state is SwapState.SERVING
    assert world.backend.policies == [RequestPolicy.OVERLAP]
    assert (status.forced_requests, status.waited_requests, status.pause_seconds) == (0, 0, None)
    assert not world.coordinator.serves(world.template.digest)
    assert world.state.gate.closures == closures
    assert world.state.gate.waits == 0
    await end_new()
    world.assert_serves(target)


async def test_an_old_instance_is_given_up_when_its_time_is_over(world, target):
    _, end = await arrive(world)
    world.backend.requests = 1
    await begin(world, target)
    await world.clock.advance(29)
    assert not world.coordinator.operation("op-1").state.terminal
    await world.clock.advance(2)
    status = await world.ended("op-1")
    assert status.state is SwapState.SERVING
    assert status.forced_requests == 1
    assert not world.coordinator.serves(world.template.digest)
    await end()
    world.assert_serves(target)


async def test_a_rollback_after_an_overlap_reads_nothing(world, target):
    assert (await world.swap(target, traffic=OVERLAP)).state is SwapState.SERVING
    assert world.state.previous == world.template
    await world.coordinator.rollback(
        RollbackRequest(operation_id="back", fence=request(target, revision=2).fence, traffic=OVERLAP)
    )
    status = await world.ended("back")
    assert (status.state, status.bytes_fetched) == (SwapState.SERVING, 0)
    world.assert_serves(world.template)


async def test_an_engine_that_dies_with_its_old_instance_comes_back_with_the_new_version(world, target):
    world.backend.faults |= {"retire": Fault.DIE, "load": Fault.DIE}
    status = await world.swap(target, traffic=OVERLAP)
    assert status.state is SwapState.SERVING
    await world.clock.advance(30)
    world.assert_serves(target)


@pytest.mark.parametrize("fault", [Fault.ERROR, Fault.LATE_ERROR, Fault.RAISE, Fault.DIE, Fault.HANG])
@pytest.mark.parametrize("step", ["prepare", "commit", "verify", "retire"])
async def test_whatever_fails_one_whole_version_serves_and_nothing_is_left_behind(world, target, step, fault):
    world.backend.faults[step] = fault
    status = await world.swap(target, traffic=OVERLAP)
    await world.clock.advance(10)
    expected = {"prepare": SwapState.ABORTED, "retire": SwapState.SERVING}.get(step, SwapState.ROLLED_BACK)
    assert status.state is expected
    world.assert_serves(target if step == "retire" else world.template)
    assert world.backend.second == ""
    assert world.state.gate.waits == 0
    again = await world.swap(target, "op-2", revision=2, traffic=OVERLAP)
    assert again.state is SwapState.SERVING


async def test_another_tokenizer_is_no_obstacle_because_old_requests_keep_theirs(world):
    config = b'{"architectures": ["Tiny"], "hidden_size": 4, "eos_token_id": 3}'
    target = world.publish("1.1", FakeCheckpoint(checkpoint(q=b"QQQQ").tensors, side={"config.json": config}))
    assert (await world.swap(target, traffic=OVERLAP)).state is SwapState.SERVING


async def test_it_is_refused_before_anything_is_read_when_the_second_instance_does_not_fit(world, target):
    world.backend.instance = 1000
    world.backend.limit = 18 + 8 + 1000 - 1
    status = await world.swap(target, traffic=OVERLAP)
    assert status.state is SwapState.ABORTED
    assert status.error.code == "InsufficientMemory"
    assert "second instance" in status.error.message
    assert status.plan.memory_needed == 1008
    assert "stage" not in world.backend.steps
    assert (await world.swap(target, "op-2", revision=2)).state is SwapState.SERVING
    # Nor does what is retained make room for itself.
    back = await world.swap(world.template, "op-3", revision=3, traffic=OVERLAP)
    assert back.error.code == "InsufficientMemory"
    world.backend.limit = 18 + 8 + 1000
    assert (await world.swap(world.template, "op-4", revision=4, traffic=OVERLAP)).state is SwapState.SERVING


async def test_an_engine_says_why_it_cannot_overlap(world, target):
    world.backend.modes = [TrafficMode.DRAIN]
    world.backend.why = {"Overlap": "it has two ranks"}
    status = await world.swap(target, traffic=OVERLAP)
    assert status.error.code == "UnsupportedChange"
    assert "it has two ranks" in status.error.message
