"""Replicas: one that dies takes nobody with it, and serves again only when it has been caught up."""

import asyncio

import pytest

from modelswap_engine.limits import Memory
from modelswap_engine.protocol.errors import Internal, SourceUnreadable
from modelswap_engine.protocol.messages import CheckRequest
from modelswap_engine.protocol.states import SwapState
from modelswap_engine.protocol.updates import BeginUpdate, CommitUpdate
from modelswap_engine.swap.backoff import Backoff
from modelswap_engine.swap.companion import Alone
from tests.support.fake_backend import Fault
from tests.support.swapping import World, checkpoint
from tests.support.tensor_files import written


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


async def test_damage_on_the_one_that_lives_is_not_forgotten_because_the_other_was_loaded(world):
    world.coordinator._core.drifted(("norm",), Internal("a bit flipped").body())
    world.backend.lost.add(1)
    world.backend.faults["hashes"] = Fault.HANG  # before it is repaired
    world.coordinator.worker_lost()
    await world.clock.settle()
    assert digests(world) == [world.template.digest] * 2
    assert (world.state.drifted, world.state.reason, world.state.ready) == (["norm"], "Drifted", False)
    assert not world.state.gate.open


# A version that only the engine's memory holds.


async def sent(world, folder):
    """A trainer sends a tensor, and the result serves."""
    coordinator, file = world.coordinator, written(folder / "part.safetensors", {"norm": b"N" * 2})
    await world.clock.run(coordinator.updates.begin(BeginUpdate(update_id="u")))
    await world.clock.run(coordinator.parts.tensors("u", file, owner=""))
    status = await world.clock.run(coordinator.updates.commit("u", CommitUpdate(version="step-1")))
    assert status.state is SwapState.SERVING, status.error
    return world.state.live


async def test_a_lost_replica_gets_what_was_sent_from_one_that_has_it(world, tmp_path):
    live = await sent(world, tmp_path)
    loads = len(world.sources.resolved)
    world.backend.lost.add(1)
    world.coordinator.worker_lost()
    await world.clock.settle()
    assert digests(world) == [live.digest] * 2
    assert world.state.live == live
    assert world.backend.live == checkpoint(norm=b"N" * 2).tensors
    assert (world.state.message, world.state.restarts) == ("", 1)
    assert len(world.sources.resolved) == loads, "no source has it"
    assert world.backend.previous is None


async def test_a_replica_that_cannot_get_it_stays_away_and_the_state_says_so(world, tmp_path):
    live = await sent(world, tmp_path)
    world.backend.lost.add(1)
    world.backend.faults["load"] = Fault.RAISE
    world.coordinator.worker_lost()
    await world.clock.settle()
    assert world.state.live == live
    assert (world.state.reason, world.state.ready, world.state.gate.open) == ("", True, True)
    assert digests(world) == [live.digest, ""]
    assert world.state.message.startswith("ranks 1 of 2 are away: RuntimeError")
    await asyncio.wait_for(admitted(world), 5)
    await world.clock.advance(31)
    assert digests(world) == [live.digest] * 2
    assert world.state.message == ""


async def test_where_nobody_holds_it_any_more_the_gate_is_shut_and_the_state_says_so(world, tmp_path):
    await sent(world, tmp_path)
    world.backend.lost |= {0, 1}
    world.backend.faults["load"] = Fault.HANG
    world.coordinator.worker_lost()
    await world.clock.settle()
    assert (world.state.reason, world.state.ready, world.state.gate.open) == ("Recovering", False, False)
    assert world.template.digest in world.state.message


async def test_room_for_what_passes_from_one_to_the_other_is_asked_for(world, tmp_path):
    live = await sent(world, tmp_path)
    world.coordinator._core.memory._probe = Small(18 + 1)  # the model, and one of the two bytes that were sent
    world.backend.lost.add(1)
    world.coordinator.worker_lost()
    await world.clock.settle()
    assert world.state.message.startswith("ranks 1 of 2 are away: loading needs 0.0 MiB"), world.state.message
    assert digests(world) == [live.digest, ""]
    world.coordinator._core.memory._probe = Small(18 + 2)
    await world.clock.advance(31)
    assert digests(world) == [live.digest] * 2


class Small:
    """A container with room for so many bytes."""

    def __init__(self, available):
        self._available = available

    def read(self):
        return Memory(limit=1000, available=self._available)


class Watched(Alone):
    """Counts how often what lives on the base is brought back."""

    def __init__(self):
        self.restored = 0

    async def restore(self, digest):
        self.restored += 1


class Adapted(World):
    def companion(self):
        self.watched = Watched()
        return self.watched


async def test_adapters_are_brought_back_only_when_no_replica_was_left(tmp_path):
    world = Adapted(tmp_path, replicas=True)
    watched = world.watched
    await world.start()
    assert watched.restored == 1
    world.backend.lost.add(1)
    world.coordinator.worker_lost()
    await world.clock.settle()
    assert digests(world) == [world.template.digest] * 2
    assert watched.restored == 1
    world.backend.kill()
    world.coordinator.worker_lost()
    await world.clock.advance(40)
    world.assert_serves(world.template)
    assert watched.restored == 2
    await world.stop()


async def test_a_check_names_the_rank_that_holds_other_bytes(world):
    world.backend.astray = {1: {"norm": b"??"}}
    found = await world.clock.run(world.coordinator.check(CheckRequest()))
    (item,) = found.mismatched
    assert (item.name, item.ranks, found.ranks) == ("norm", [1], [0, 1])
    assert (item.expected, item.actual) == tuple(found.disagreed["norm"].values())
    assert "norm" not in found.tensors
    assert found.checked == 4
    await world.clock.advance(1)
    world.assert_serves(world.template)
    assert (world.state.repairs, world.state.repair.plan.changed_names) == (1, ["norm"])
    assert (await world.clock.run(world.coordinator.check(CheckRequest()))).ok


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
