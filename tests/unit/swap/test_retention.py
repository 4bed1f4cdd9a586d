"""How long a previous version stays in memory, and how large it may be."""

import pytest

from modelswap_engine.protocol.errors import Busy, NotFound, StaleRevision, WrongPod
from modelswap_engine.protocol.messages import CancelRequest, Fence, ReleaseRequest
from modelswap_engine.protocol.policy import Loading
from modelswap_engine.protocol.states import SwapState
from tests.support.swapping import OWNER, POD, World, checkpoint, request


async def started(tmp_path, **bounds):
    world = World(tmp_path, **bounds)
    await world.start()
    return world, world.publish("1.1", checkpoint(q=b"QQQQ"))


def release(**fence):
    return ReleaseRequest(fence=Fence(**{"pod_uid": POD, "owner_uid": OWNER, "epoch": 1, "revision": 1, **fence}))


async def test_it_goes_when_its_time_is_over(tmp_path):
    world, target = await started(tmp_path, previous_seconds=600)
    await world.swap(target)
    await world.clock.advance(590)
    assert world.state.previous == world.template
    assert 0 < world.state.previous_seconds_left <= 10
    await world.clock.advance(12)
    assert world.state.previous is None
    assert world.state.previous_seconds_left == -1
    assert (world.backend.previous, world.state.memory.previous_bytes) == (None, 0)
    world.assert_serves(target)
    await world.stop()


async def test_each_swap_starts_its_time_again(tmp_path):
    world, target = await started(tmp_path, previous_seconds=600)
    await world.swap(target)
    await world.clock.advance(500)
    await world.swap(world.template, "op-2", revision=2)
    await world.clock.advance(500)
    assert world.state.previous == target
    await world.clock.advance(101)
    assert world.state.previous is None
    await world.stop()


async def test_without_a_bound_it_stays(tmp_path):
    world, target = await started(tmp_path)
    await world.swap(target)
    await world.clock.advance(5000)
    assert world.state.previous == world.template
    assert world.state.previous_seconds_left == -1
    await world.stop()


@pytest.mark.parametrize(("limit", "kept"), [(-1, True), (8, True), (7, False), (0, False)])
async def test_one_that_is_too_large_is_not_kept(tmp_path, limit, kept):
    world, target = await started(tmp_path, previous_bytes=limit)
    status = await world.swap(target)  # q and k, eight bytes, are replaced
    assert status.state is SwapState.SERVING
    assert (world.state.previous is not None) == kept
    assert world.state.memory.previous_bytes == (8 if kept else 0)
    await world.stop()


async def test_it_goes_when_somebody_says_so(tmp_path):
    world, target = await started(tmp_path)
    with pytest.raises(NotFound):
        await world.clock.run(world.coordinator.release(release()))
    await world.swap(target)
    with pytest.raises(WrongPod):
        await world.coordinator.release(release(pod_uid="other"))
    with pytest.raises(StaleRevision):
        await world.coordinator.release(release(revision=0))
    state = await world.clock.run(world.coordinator.release(release()))
    assert state.previous is None
    assert state.memory.previous_bytes == 0
    assert world.listener.prepared == {target.digest}
    world.assert_serves(target)
    await world.stop()


async def test_it_stays_while_an_operation_runs(tmp_path):
    world, target = await started(tmp_path)
    await world.swap(target)
    other = world.publish("1.2", checkpoint(norm=b"NN"))
    world.sources.hanging.add(other.uri)
    await world.coordinator.swap(request(other, "op-2", revision=2))
    with pytest.raises(Busy):
        await world.coordinator.release(release(revision=2))
    await world.coordinator.cancel(
        "op-2", CancelRequest(fence=Fence(pod_uid=POD, owner_uid=OWNER, epoch=1, revision=2))
    )
    await world.ended("op-2")
    assert world.state.previous == world.template
    await world.stop()


async def test_who_does_not_want_it_kept_gets_no_time_for_it(tmp_path):
    world, target = await started(tmp_path, previous_seconds=600)
    await world.swap(target, loading=Loading(keep_previous=False))
    assert world.state.previous is None
    assert world.state.previous_seconds_left == -1
    await world.stop()
