"""Replicas: one that dies takes nobody with it, and serves again only when it has been caught up."""

import asyncio

import pytest

from modelswap_engine.protocol.errors import SourceUnreadable
from modelswap_engine.protocol.states import SwapState
from modelswap_engine.swap.backoff import Backoff
from tests.support.fake_backend import Fault
from tests.support.swapping import World, checkpoint


@pytest.fixture
async def world(tmp_path):
    world = World(tmp_path, replicas=True)
    await world.start()
    yield world
    await world.stop()
    assert world.backend.violations == []


def digests(world):
    return [rank.digest for rank in world.state.ranks]


async def admitted(world):
    async with world.coordinator.admission() as admission:
        admission.submitted()


async def test_a_replica_that_dies_is_caught_up_while_the_other_serves(world):
    world.backend.lost.add(1)
    world.backend.faults["load"] = Fault.HANG
    assert world.coordinator.ready(), "half of the engine is better than none"
    world.coordinator.worker_lost()
    await world.clock.settle()
    assert world.backend.steps[-1] == "load"
    assert digests(world) == [world.template.digest, ""]
    assert world.state.message == "ranks 1 of 2 are being restarted"
    assert (world.state.reason, world.state.ready, world.state.gate.open) == ("", True, True)
    await asyncio.wait_for(admitted(world), 5)


async def test_after_that_both_have_proved_it_and_the_next_swap_needs_both(world):
    world.backend.lost.add(1)
    world.coordinator.worker_lost()
    await world.clock.settle()
    assert digests(world) == [world.template.digest] * 2
    assert (world.state.message, world.state.restarts) == ("", 1)
    target = world.publish("1.1", checkpoint(q=b"QQQQ"))
    assert (await world.swap(target)).state is SwapState.SERVING
    world.assert_serves(target)


@pytest.mark.parametrize("step", ["stage", "prepare", "pause", "commit", "verify"])
async def test_a_replica_that_dies_in_a_swap_leaves_the_old_version_everywhere(world, step):
    target = world.publish("1.1", checkpoint(q=b"QQQQ"))
    world.backend.faults[step] = Fault.LOSE
    status = await world.swap(target)
    assert status.state in (SwapState.ABORTED, SwapState.ROLLED_BACK)
    assert status.error.code == "WorkerLost"
    await world.clock.advance(3)
    world.assert_serves(world.template)
    assert digests(world) == [world.template.digest] * 2
    # The one that lived was never loaded: the old tensors came back in its memory.
    assert world.backend.steps.count("settle") == 1
    assert (await world.swap(target, "op-2", revision=2)).state is SwapState.SERVING


async def test_the_gate_opens_when_the_others_are_well_not_when_the_dead_one_is_loaded(world):
    target = world.publish("1.1", checkpoint(q=b"QQQQ"))
    world.backend.faults |= {"commit": Fault.LOSE, "load": Fault.HANG}
    status = await world.swap(target)
    assert status.state is SwapState.ROLLED_BACK
    await world.clock.settle()
    assert world.backend.steps[-1] == "load"
    assert world.state.gate.open
    await asyncio.wait_for(admitted(world), 5)
    assert world.holds(world.template)


async def test_a_replica_that_cannot_be_caught_up_is_tried_again_and_the_other_serves_on(world):
    world.backend.lost.add(1)
    world.sources.errors[world.template.uri] = SourceUnreadable("volume gone")
    world.coordinator.worker_lost()
    await world.clock.advance(300)
    attempts = len(world.sources.resolved)
    assert world.state.live == world.template
    assert (world.state.ready, world.state.gate.open) == (True, True)
    assert 10 <= attempts <= 20, "pauses grow to half a minute"
    del world.sources.errors[world.template.uri]
    await world.clock.advance(31)
    assert digests(world) == [world.template.digest] * 2


async def test_memory_is_planned_for_every_replica(world):
    target = world.publish("1.1", checkpoint(q=b"QQQQ"))
    world.backend.limit = 18 + 7  # the fake holds one copy; both replicas stage q and k, eight bytes each
    status = await world.swap(target)
    assert (status.state, status.error.code) == (SwapState.ABORTED, "InsufficientMemory")
    assert (status.plan.memory_needed, status.plan.bytes_to_fetch) == (16, 8)


async def test_a_worker_that_dies_after_each_good_load_is_started_ever_more_rarely(tmp_path):
    world = World(tmp_path)
    await world.start()
    loads = world.backend.steps.count
    began = world.clock.now
    starts = []
    for _ in range(8):
        world.backend.kill()
        world.coordinator.worker_lost()
        before = loads("load")
        while loads("load") == before:
            await world.clock.advance(0.5)
        starts.append(world.clock.now - began)
        began = world.clock.now
        world.assert_serves(world.template)
    assert starts == [0.5, 1, 2, 4, 8, 16, 30, 30]  # the first at once, as finely as the test looks
    # One that was well for a minute is started at once again.
    await world.clock.advance(61)
    world.backend.kill()
    world.coordinator.worker_lost()
    await world.clock.settle()
    world.assert_serves(world.template)
    await world.stop()


async def test_while_it_waits_the_state_says_so(tmp_path):
    world = World(tmp_path)
    await world.start()
    for _ in range(2):
        world.backend.kill()
        world.coordinator.worker_lost()
        await world.clock.settle()
    assert (world.state.ready, world.state.reason) == (False, "Recovering")
    assert "keeps dying" in world.state.message
    await world.clock.advance(2)
    world.assert_serves(world.template)
    await world.stop()


def test_pauses_between_starts():
    backoff = Backoff(shortest=1, longest=30)
    assert [backoff.pause(up=5) for _ in range(8)] == [0, 1, 2, 4, 8, 16, 30, 30]
    backoff.tried(succeeded=False)
    assert backoff.pause(up=1000) == 30  # it was good long ago, but cannot be started now
    backoff.tried(succeeded=True)
    assert backoff.pause(up=1000) == 0
