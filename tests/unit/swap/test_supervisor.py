"""The right version comes back by itself, and nothing else ever does."""

import asyncio

import pytest

from modelswap_engine.protocol.assignment import Assignment, AssignmentTarget
from modelswap_engine.protocol.errors import NotReady, SourceUnreadable
from modelswap_engine.protocol.messages import VersionRef
from modelswap_engine.protocol.states import SwapState
from tests.support.fake_backend import Fault
from tests.support.swapping import OWNER, World, checkpoint, request


@pytest.fixture
async def world(tmp_path):
    world = World(tmp_path)
    yield world
    await world.stop()
    assert world.backend.violations == []


def assigned(version: VersionRef, revision: int = 1) -> Assignment:
    target = AssignmentTarget(version=version.version, uri=version.uri, digest=version.digest)
    return Assignment(owner_uid=OWNER, epoch=1, revision=revision, stable=target)


async def test_an_assigned_version_is_served_and_its_decision_remembered(world):
    target = world.publish("1.1", checkpoint(q=b"QQQQ"))
    world.assignment = assigned(target, 7)
    await world.start()
    world.assert_serves(target)
    assert (world.state.owner_uid, world.state.revision) == (OWNER, 7)


async def test_an_assigned_version_that_cannot_be_loaded_is_not_replaced_by_anything(world):
    target = world.publish("1.1", checkpoint(q=b"QQQQ"))
    world.assignment = assigned(target)
    world.sources.errors[target.uri] = SourceUnreadable("the volume is not mounted")
    await world.start()
    await world.clock.advance(300)
    assert world.backend.live == {}
    assert not world.coordinator.ready()
    assert world.state.reason == "LoadFailed"
    assert "not mounted" in world.state.message
    failure = world.state.load_failure
    assert failure is not None
    assert (failure.target.digest, failure.error.code) == (target.digest, "SourceUnreadable")
    with pytest.raises(NotReady, match="not mounted"):
        async with world.coordinator.admission():
            pass
    del world.sources.errors[target.uri]
    await world.clock.advance(31)
    world.assert_serves(target)
    assert world.state.load_failure is None


async def test_attempts_become_rarer_up_to_a_bound(world):
    world.sources.errors[world.template.uri] = SourceUnreadable("no")
    await world.start()
    await world.clock.advance(60)
    first_minute = len(world.sources.resolved)
    assert 5 <= first_minute <= 8
    await world.clock.advance(300)
    assert 9 <= len(world.sources.resolved) - first_minute <= 11


async def test_a_new_assignment_file_is_seen_while_the_old_one_cannot_be_loaded(world):
    world.assignment = assigned(VersionRef(uri="file:///gone", digest="sha256:gone"), 1)
    await world.start()
    assert not world.coordinator.ready()
    target = world.publish("1.1", checkpoint(q=b"QQQQ"))
    world.assignment = assigned(target, 2)
    await world.clock.advance(31)
    world.assert_serves(target)
    assert world.state.revision == 2


async def test_a_source_with_other_content_than_assigned_is_never_served(world):
    target = world.publish("1.1", checkpoint(q=b"QQQQ"))
    world.assignment = assigned(target)
    world.sources.checkpoints[target.uri] = checkpoint(q=b"EVIL")
    await world.start()
    await world.clock.advance(60)
    assert world.backend.live == {}
    assert "pinned" in world.state.message


async def test_a_swap_reaches_an_engine_that_could_not_start(world):
    world.sources.errors[world.template.uri] = SourceUnreadable("no")
    await world.start()
    target = world.publish("1.1", checkpoint(q=b"QQQQ"))
    status = await world.swap(target)
    assert status.state is SwapState.SERVING
    world.assert_serves(target)
    await world.clock.advance(100)
    world.assert_serves(target)


async def test_a_swap_that_cannot_be_loaded_cold_is_aborted_and_the_old_duty_goes_on(world):
    world.sources.errors[world.template.uri] = SourceUnreadable("no")
    await world.start()
    status = await world.swap(VersionRef(uri="file:///nowhere"), owner="cli")
    assert status.state is SwapState.ABORTED
    assert status.error.code == "SourceNotFound"
    del world.sources.errors[world.template.uri]
    await world.clock.advance(60)
    world.assert_serves(world.template.__class__(version="1.0", uri=world.template.uri, digest=world.template.digest))


@pytest.mark.parametrize("told", [True, False])
async def test_a_worker_that_dies_is_restarted_with_the_live_version(world, told):
    await world.start()
    target = world.publish("1.1", checkpoint(q=b"QQQQ"))
    await world.swap(target)
    await world.clock.settle()
    world.backend.kill()
    assert not world.coordinator.ready()
    if told:
        world.coordinator.worker_lost()
        await world.clock.settle()
    else:
        await world.clock.advance(1.5)
    world.assert_serves(target)
    assert world.state.restarts == 1
    assert world.state.previous is None


async def test_requests_wait_while_a_worker_is_restarted(world):
    await world.start()
    world.backend.kill()
    world.backend.faults["load"] = Fault.HANG
    world.coordinator.worker_lost()
    await world.clock.settle()
    assert world.state.reason == "Recovering"
    waiting = asyncio.ensure_future(world.coordinator.admission().__aenter__())
    await world.clock.settle()
    assert not waiting.done()
    assert world.state.gate.queued == 1
    waiting.cancel()


async def test_a_worker_that_cannot_be_restarted_is_tried_again_for_ever(world):
    await world.start()
    world.backend.kill()
    world.sources.errors[world.template.uri] = SourceUnreadable("volume gone")
    await world.clock.advance(200)
    assert world.state.live is None
    assert not world.coordinator.ready()
    del world.sources.errors[world.template.uri]
    await world.clock.advance(31)
    world.assert_serves(world.template)


async def test_a_worker_that_dies_while_a_source_is_read_is_not_left_dead_until_that_ends(world):
    await world.start()
    target = world.publish("1.1", checkpoint(q=b"QQQQ"))
    world.sources.hanging.add(target.uri)
    await world.clock.run(world.coordinator.swap(request(target)))
    world.backend.kill()
    status = await world.ended("op-1")
    assert status.state is SwapState.ABORTED
    assert status.error.code == "WorkerLost"
    assert status.total_seconds < 5
    world.assert_serves(world.template)


async def test_a_worker_that_restarted_by_itself_is_not_believed(world):
    await world.start()
    live = dict(world.backend.live)
    world.backend.kill()
    await world.backend.start()
    world.backend.live = live  # it says it is well, but proved nothing as this process
    assert not world.coordinator.ready()
    await world.clock.advance(1.5)
    world.assert_serves(world.template)
    assert world.backend.steps.count("load") == 2


async def test_another_template_is_not_forgotten_when_it_cannot_be_loaded_at_once(world):
    await world.start()
    await world.swap(world.publish("1.1", checkpoint(q=b"QQQQ")), owner="cli")
    await world.crash()
    world.template = world.publish("2.0", checkpoint(embed=b"E" * 8))
    world.sources.errors[world.template.uri] = SourceUnreadable("not mounted yet")
    await world.start()
    await world.clock.advance(10)
    assert world.state.live is None
    del world.sources.errors[world.template.uri]
    await world.clock.advance(31)
    world.assert_serves(world.template)


async def test_an_engine_that_does_not_come_up_is_in_the_state(world):
    async def broken():
        raise NotReady("no memory for a worker")

    world.backend.start = broken
    await world.start()
    assert world.state.reason == "LoadFailed"
    assert "no memory for a worker" in world.state.message
    del world.backend.start
    await world.clock.advance(5)
    world.assert_serves(world.template)


async def test_a_bad_assignment_file_is_in_the_state_and_not_fatal(world):
    from modelswap_engine.protocol.errors import BadRequest

    def torn():
        raise BadRequest("not a valid Assignment: truncated")

    await world.clock.run(world.coordinator.start(world.template, None, reread=torn))
    assert "truncated" in world.state.message
    assert world.backend.live == {}
