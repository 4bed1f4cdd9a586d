"""A swap that waits once it has staged: by lease, beside the version that serves, until it is told to go on."""

import pytest

from modelswap_engine.backends.port import RequestPolicy
from modelswap_engine.protocol.errors import (
    Busy,
    ForeignOwner,
    NotFound,
    NotReady,
    StaleRevision,
    Unavailable,
    WrongPod,
)
from modelswap_engine.protocol.holding import Hold
from modelswap_engine.protocol.messages import (
    CancelRequest,
    CheckRequest,
    Fence,
    HoldRequest,
    PlanRequest,
    ProceedRequest,
    VersionRef,
)
from modelswap_engine.protocol.policy import Checks, PromptCheck, Traffic, TrafficMode
from modelswap_engine.protocol.states import SwapState
from tests.support.fake_backend import Fault
from tests.support.swapping import OWNER, POD, World, checkpoint, request

LEASE = 100.0


def fence(revision=1, **more):
    return Fence(**({"pod_uid": POD, "owner_uid": OWNER, "epoch": 1, "revision": revision} | more))


async def staged(world: World, target: VersionRef, **options) -> None:
    await world.coordinator.swap(request(target, hold=Hold(seconds=LEASE, mark="how"), **options))
    await world.clock.settle()


async def go_on(world: World, revision=1, **more) -> None:
    await world.coordinator.proceed("op-1", ProceedRequest(fence=fence(revision), **more))


async def test_it_stages_and_waits_while_the_old_version_serves(world, target):
    await staged(world, target, checks=Checks(prompts=[PromptCheck(prompt="hi")]))
    await world.clock.advance(LEASE / 4)
    state = world.state
    assert (state.operation.state, state.live, state.ready) == (SwapState.STAGED, world.template, True)
    assert (state.operation.hold.held, state.operation.hold.mark) == (True, "how")
    assert state.operation.hold.seconds_left == LEASE * 3 / 4
    assert state.operation.bytes_staged == 8
    assert state.memory.staged_bytes > 0
    assert world.backend.trials, "what can be looked at before the commit is looked at"
    assert "prepare" not in world.backend.steps
    assert state.gate.open
    assert world.holds(world.template)


async def test_told_to_go_on_it_reads_nothing_again(world, target):
    await staged(world, target)
    await go_on(world)
    status = await world.ended("op-1")
    assert (status.state, status.hold) == (SwapState.SERVING, None)
    assert world.backend.steps.count("stage") == 1
    assert status.staging_seconds is not None
    world.assert_serves(target)


async def test_the_decision_to_commit_is_one_of_its_own(world, target):
    """Staged under one revision, committed under the next: that one is what the pod has accepted."""
    await staged(world, target)
    await go_on(world, revision=2)
    status = await world.ended("op-1")
    accepted = world.journal.state.accepted
    assert (status.revision, accepted.revision, accepted.done) == (2, 2, True)
    with pytest.raises(StaleRevision):
        await world.coordinator.swap(request(world.template, "op-2", revision=1))


async def test_saying_it_again_changes_nothing(world, target):
    await staged(world, target)
    await go_on(world)
    await go_on(world)
    ended = await world.ended("op-1")
    assert await world.coordinator.proceed("op-1", ProceedRequest(fence=fence(9))) == ended
    assert await world.coordinator.hold("op-1", HoldRequest(fence=fence(9), seconds=5)) == ended


async def test_told_before_it_has_staged_it_does_not_wait(world, target):
    await world.coordinator.swap(request(target, hold=Hold(seconds=LEASE)))
    await go_on(world)
    before = world.clock.now
    assert (await world.ended("op-1")).state is SwapState.SERVING
    assert world.clock.now - before < LEASE


async def test_nobody_else_may_tell_it_and_no_older_decision(world, target):
    await staged(world, target, revision=3)
    for wrong, error in (
        (fence(3, pod_uid="pod-2"), WrongPod),
        (fence(9, owner_uid="owner-2"), ForeignOwner),
        (fence(2), StaleRevision),
        (fence(3, epoch=0), StaleRevision),
    ):
        with pytest.raises(error):
            await world.coordinator.proceed("op-1", ProceedRequest(fence=wrong))
        with pytest.raises(error):
            await world.coordinator.hold("op-1", HoldRequest(fence=wrong, seconds=5))
    assert world.state.operation.hold.held
    for call, order in (
        (world.coordinator.proceed, ProceedRequest(fence=fence(3))),
        (world.coordinator.hold, HoldRequest(fence=fence(3), seconds=5)),
    ):
        with pytest.raises(NotFound):
            await call("op-9", order)


async def test_a_lease_that_nobody_renews_ends_it_and_frees_what_was_staged(world, target):
    await staged(world, target)
    await world.clock.advance(LEASE / 2)
    await world.coordinator.hold("op-1", HoldRequest(fence=fence(), seconds=LEASE))
    await world.clock.advance(LEASE * 3 / 4)
    assert world.state.operation.hold.held
    await world.clock.advance(LEASE)
    status = world.coordinator.operation("op-1")
    assert (status.state, status.error.code) == (SwapState.ABORTED, "HoldEnded")
    assert world.state.memory.staged_bytes == 0
    world.assert_serves(world.template)
    assert (await world.swap(target, "op-2")).state is SwapState.SERVING


async def test_it_can_be_cancelled_while_it_waits(world, target):
    await staged(world, target)
    await world.coordinator.cancel("op-1", CancelRequest(fence=fence()))
    assert (await world.ended("op-1")).state is SwapState.ABORTED
    world.assert_serves(world.template)


async def test_nothing_else_is_done_meanwhile(world, target):
    await staged(world, target)
    with pytest.raises(Busy):
        await world.coordinator.swap(request(world.template, "op-2", revision=2))
    with pytest.raises(Busy):
        await world.coordinator.check(CheckRequest())
    plan = await world.clock.run(world.coordinator.plan(PlanRequest(target=target)))
    assert plan.changed_tensors == 1


async def test_a_worker_that_dies_meanwhile_ends_it(world, target):
    await staged(world, target)
    world.backend.kill()
    await world.clock.advance(5)
    status = world.coordinator.operation("op-1")
    assert (status.state, status.error.code) == (SwapState.ABORTED, "WorkerLost")
    world.assert_serves(world.template)


async def test_a_bad_version_is_found_before_it_waits(world, target):
    world.backend.faults["stage"] = Fault.ERROR
    await staged(world, target)
    assert world.coordinator.operation("op-1").state is SwapState.ABORTED
    world.assert_serves(world.template)


@pytest.mark.parametrize("survives", [False, True])
async def test_a_crash_while_it_waits_comes_up_on_the_old_version(world, target, survives):
    await staged(world, target, revision=4)
    await world.crash(engine_survives=survives)
    await world.start()
    assert world.coordinator.operation("op-1").state is SwapState.ABORTED
    world.assert_serves(world.template)


async def test_a_process_that_is_told_to_end_does_not_wait_for_it(world, target):
    await staged(world, target)
    before = world.clock.now
    await world.clock.run(world.coordinator.drain(60))
    assert world.clock.now - before < LEASE
    assert world.coordinator.operation("op-1").state is SwapState.ABORTED


async def test_where_nothing_is_live_nothing_waits(world, target):
    world.coordinator._core.unpublish("LoadFailed", NotReady("gone").body())
    with pytest.raises(NotReady):
        await world.coordinator.swap(request(target, hold=Hold(seconds=LEASE)))
    assert world.coordinator._core.operations.current is None


async def test_damaged_tensors_are_repaired_first(world, target):
    world.backend.live["q"] = b"????"
    await world.coordinator.check(CheckRequest())
    with pytest.raises(Busy):
        await world.coordinator.swap(request(target, hold=Hold(seconds=LEASE)))
    await world.clock.advance(5)
    await staged(world, target)
    assert world.state.operation.hold.held


async def test_how_many_others_are_ready_is_told_when_it_goes_on(world, target):
    await staged(world, target, traffic=Traffic(peers_ready=2))
    await go_on(world, peers_ready=0)
    await world.clock.settle()
    assert world.coordinator.operation("op-1").state is SwapState.SERVING, "without peers no endpoints are left"


async def test_how_many_others_are_ready_counts_also_when_it_is_told_early(world, target):
    await world.coordinator.swap(request(target, hold=Hold(seconds=LEASE), traffic=Traffic(peers_ready=2)))
    await go_on(world, peers_ready=0)
    await world.clock.settle()
    assert world.coordinator.operation("op-1").state is SwapState.SERVING


async def test_a_second_instance_is_brought_up_only_when_it_goes_on(world, target):
    await staged(world, target, traffic=Traffic(mode=TrafficMode.OVERLAP))
    assert world.backend.second == ""
    await go_on(world)
    assert (await world.ended("op-1")).state is SwapState.SERVING
    assert world.backend.policies == [RequestPolicy.OVERLAP]


async def test_another_name_for_what_is_live_waits_too(world):
    again = world.publish("1.0-bis", checkpoint())
    await staged(world, again)
    assert world.state.live.version == "1.0"
    await go_on(world)
    await world.ended("op-1")
    world.assert_serves(again)


async def test_a_journal_that_cannot_be_written_lets_nothing_go_on(world, target, monkeypatch):
    await staged(world, target)

    def full(*records):
        raise Unavailable("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(world.journal, "append", full)
        with pytest.raises(Unavailable):
            await go_on(world)
        assert world.state.operation.hold.held
    await go_on(world)
    assert (await world.ended("op-1")).state is SwapState.SERVING
