"""The door: same id same answer, fencing, one operation at a time, cancelling, watching, checking, leases."""

import asyncio
import errno
import json

import pytest

from modelswap_engine.protocol.assignment import Assignment, AssignmentTarget
from modelswap_engine.protocol.codec import decode
from modelswap_engine.protocol.errors import (
    BadRequest,
    Busy,
    ForeignOwner,
    ModelswapError,
    NotFound,
    NotReady,
    StaleRevision,
    StateMoved,
    Unavailable,
    WrongPod,
)
from modelswap_engine.protocol.looking import LookRequest
from modelswap_engine.protocol.messages import (
    CancelRequest,
    CheckRequest,
    Fence,
    PauseRequest,
    PlanRequest,
    ResumeRequest,
    RollbackRequest,
    VersionRef,
)
from modelswap_engine.protocol.policy import Loading, LoadingMode, Traffic
from modelswap_engine.protocol.states import SwapState
from modelswap_engine.protocol.version import PROTOCOL_VERSION
from modelswap_engine.swap.clock import OneThread
from modelswap_engine.swap.sourcing import LOOK_SECONDS
from tests.support.fake_backend import Fault
from tests.support.swapping import OWNER, POD, World, checkpoint, last, request


def fence(revision=1, **more):
    return Fence(**({"pod_uid": POD, "owner_uid": OWNER, "epoch": 1, "revision": revision} | more))


async def test_the_same_operation_id_is_the_same_operation(world, target):
    first = await world.coordinator.swap(request(target))
    again = await world.coordinator.swap(request(target), if_match='"long.gone"')
    assert first.operation_id == again.operation_id
    done = await world.ended("op-1")
    assert await world.coordinator.swap(request(target)) == done
    assert world.backend.steps.count("commit") == 1


async def test_two_callers_at_once_get_one_operation_and_one_refusal(world, target):
    answers = await world.clock.run(
        asyncio.gather(
            world.coordinator.swap(request(target, "op-1")),
            world.coordinator.swap(request(target, "op-2")),
            return_exceptions=True,
        )
    )
    assert sorted(type(answer).__name__ for answer in answers) == ["Busy", "SwapStatus"]
    await world.ended("op-1")


async def test_a_call_for_another_pod_is_refused_before_anything_else(world, target):
    await world.swap(target)
    for call in (
        world.coordinator.swap(request(target, pod="other")),
        world.coordinator.rollback(RollbackRequest(operation_id="op-2", fence=fence(2, pod_uid="other"))),
        world.coordinator.cancel("op-1", CancelRequest(fence=fence(pod_uid="other"))),
    ):
        with pytest.raises(WrongPod):
            await call


async def test_stale_and_foreign_callers_are_refused(world, target):
    await world.swap(target, revision=5)
    with pytest.raises(StaleRevision):
        await world.coordinator.swap(request(world.template, "op-2", revision=4))
    with pytest.raises(StaleRevision):
        await world.coordinator.swap(request(world.template, "op-3", revision=5))
    with pytest.raises(ForeignOwner):
        await world.coordinator.swap(request(world.template, "op-4", revision=9, owner="somebody"))
    world.assert_serves(target)


async def test_a_new_attempt_of_the_same_decision_is_a_new_operation(world, target):
    world.backend.faults["stage"] = Fault.ERROR
    assert (await world.swap(target, revision=5)).state is SwapState.ABORTED
    assert (await world.swap(target, "op-2", revision=5)).state is SwapState.SERVING


async def test_a_decision_on_an_older_state_is_refused(world, target):
    tag = world.coordinator.etag()
    world.gate.take_lease("x", owner="", seconds=1)
    with pytest.raises(StateMoved):
        await world.coordinator.swap(request(target), if_match=tag)
    world.gate.end_lease("x", owner="")
    await world.coordinator.swap(request(target), if_match=world.coordinator.etag())
    assert (await world.ended("op-1")).state is SwapState.SERVING


async def test_the_tag_moves_with_what_is_visible_and_not_with_single_requests(world, target):
    before = world.coordinator.etag()
    assert before == f'"{world.state.boot_id}.{world.state.seq}"'
    async with world.coordinator.admission():
        assert world.coordinator.etag() == before
        assert world.state.gate.in_flight == 1
    await world.swap(target)
    assert world.coordinator.etag() != before


async def test_an_unknown_owner_passes_once_the_assignment_file_says_so(world, target):
    await world.swap(target, revision=5)
    other = world.publish("1.2", checkpoint(q=b"1234"))
    world.assignment = Assignment(
        owner_uid="new-owner", epoch=1, revision=6, stable=AssignmentTarget(uri=other.uri, digest=other.digest)
    )
    status = await world.swap(other, "op-2", owner="new-owner", revision=6)
    assert status.state is SwapState.SERVING
    assert world.state.owner_uid == "new-owner"
    with pytest.raises(ForeignOwner):
        await world.coordinator.swap(request(target, "op-3", revision=7))


async def test_a_released_pod_is_anybodys(world, target):
    await world.swap(target, revision=5)
    world.assignment = Assignment(owner_uid=OWNER, epoch=1, revision=6, released=True)
    status = await world.swap(world.template, "op-2", owner="next", revision=1)
    assert status.state is SwapState.SERVING
    assert world.state.owner_uid == "next"


async def test_cancelling_works_until_the_weights_become_live(world, target):
    world.sources.hanging.add(target.uri)
    await world.coordinator.swap(request(target))
    await world.clock.settle()
    await world.coordinator.cancel("op-1", CancelRequest(fence=fence()))
    status = await world.ended("op-1")
    assert status.state is SwapState.ABORTED
    assert status.error.code == "Cancelled"
    assert await world.coordinator.cancel("op-1", CancelRequest(fence=fence())) == status
    world.assert_serves(world.template)


@pytest.mark.parametrize("step", ["stage"])
async def test_cancelling_ends_a_staging_that_hangs(world, target, step):
    world.backend.faults[step] = Fault.HANG
    await world.coordinator.swap(request(target))
    await world.clock.settle()
    await world.coordinator.cancel("op-1", CancelRequest(fence=fence()))
    before = world.clock.now
    status = await world.ended("op-1")
    assert status.state is SwapState.ABORTED
    assert world.clock.now == before
    assert "load" not in world.backend.steps[2:]
    world.assert_serves(world.template)


async def test_cancelling_while_the_engine_is_parked_comes_before_the_commit(world, target):
    pause = world.backend.pause

    async def slow(operation_id, *, timeout):
        replies = await pause(operation_id, timeout=timeout)
        await world.coordinator.cancel("op-1", CancelRequest(fence=fence()))
        return replies

    world.backend.pause = slow
    status = await world.swap(target)
    assert status.state is SwapState.ABORTED
    assert "commit" not in world.backend.steps
    world.assert_serves(world.template)


async def test_cancelling_a_swap_that_only_renames_is_kept_too(world):
    again = world.publish("1.0-bis", checkpoint())
    await world.coordinator.swap(request(again))
    for _ in range(3):  # it is on its way, and has nothing to stage
        await asyncio.sleep(0)
    await world.coordinator.cancel("op-1", CancelRequest(fence=fence()))
    status = await world.ended("op-1")
    assert status.state is SwapState.ABORTED
    world.assert_serves(world.template)


async def test_cancelling_is_refused_once_the_weights_become_live(world, target):
    world.backend.faults["commit"] = Fault.HANG
    await world.coordinator.swap(request(target))
    await world.clock.settle()
    assert world.coordinator.operation("op-1").state is SwapState.COMMITTING
    with pytest.raises(Busy):
        await world.coordinator.cancel("op-1", CancelRequest(fence=fence()))
    assert (await world.ended("op-1")).state is SwapState.ROLLED_BACK


async def test_only_those_entitled_may_cancel(world, target):
    world.sources.hanging.add(target.uri)
    await world.coordinator.swap(request(target, revision=5))
    with pytest.raises(ForeignOwner):
        await world.coordinator.cancel("op-1", CancelRequest(fence=fence(owner_uid="you")))
    with pytest.raises(StaleRevision):
        await world.coordinator.cancel("op-1", CancelRequest(fence=fence(4)))
    await world.coordinator.cancel("op-1", CancelRequest(fence=fence(0, owner_uid="cli")))
    assert (await world.ended("op-1")).state is SwapState.ABORTED


async def test_unknown_operations_are_not_found(world):
    for call in (world.coordinator.operation, world.coordinator.watch):
        with pytest.raises(NotFound):
            call("nothing")
    with pytest.raises(NotFound):
        await world.coordinator.cancel("nothing", CancelRequest(fence=fence()))


@pytest.mark.parametrize("operation_id", ["", "x" * 257])
async def test_an_operation_needs_an_id(world, target, operation_id):
    with pytest.raises(BadRequest):
        await world.coordinator.swap(request(target, operation_id))


async def test_watching_from_any_moment_shows_the_present_and_then_every_change(world, target):
    seen = []

    async def follow():
        await world.coordinator.swap(request(target))
        seen.extend([status.seq async for status in world.coordinator.watch("op-1")])

    await world.clock.run(follow())
    assert seen == list(range(seen[0], seen[-1] + 1))
    late = [status async for status in world.coordinator.watch("op-1")]
    assert [status.state for status in late] == [SwapState.SERVING]


async def test_one_who_stops_watching_disturbs_nobody(world, target):
    async def glance():
        await world.coordinator.swap(request(target))
        watch = world.coordinator.watch("op-1")
        await anext(watch)
        await watch.aclose()

    await world.clock.run(glance())
    assert (await world.ended("op-1")).state is SwapState.SERVING


async def test_a_plan_touches_nothing_and_says_it_all(world, target):
    before = list(world.backend.steps)
    plan = await world.coordinator.plan(PlanRequest(target=target))
    assert (plan.from_digest, plan.to_digest) == (world.template.digest, target.digest)
    assert (plan.changed_tensors, plan.changed_bytes, plan.total_tensors, plan.total_bytes) == (1, 4, 4, 18)
    assert (plan.groups, plan.bytes_to_fetch, plan.memory_needed, plan.mode) == (1, 8, 8, LoadingMode.DIFF)
    assert plan.refusals == []
    assert world.backend.steps == before
    world.assert_serves(world.template)


async def test_a_plan_shows_all_refusals(world):
    bad = world.publish("bad", checkpoint(q=b"longer", extra=b"x"))
    plan = await world.coordinator.plan(PlanRequest(target=bad, loading=Loading(mode=LoadingMode.FULL)))
    assert [refusal.code for refusal in plan.refusals] == ["IncompatibleModel", "IncompatibleModel"]
    assert {refusal.details["tensor"] for refusal in plan.refusals} == {"q", "extra"}


async def test_rolling_back_takes_the_retained_version(world, target):
    await world.swap(target)
    await world.coordinator.rollback(RollbackRequest(operation_id="op-2", fence=fence(2)))
    status = await world.ended("op-2")
    assert status.state is SwapState.SERVING
    assert status.bytes_fetched == 0
    world.assert_serves(world.template)


async def test_without_a_retained_version_there_is_nothing_to_roll_back_to(world):
    with pytest.raises(NotFound, match="retained"):
        await world.coordinator.rollback(RollbackRequest(operation_id="op-2", fence=fence(2)))


async def test_a_check_reads_the_live_bytes_back(world, target):
    result = await world.clock.run(world.coordinator.check(CheckRequest()))
    assert result.ok
    assert result.checked == 4
    assert set(result.tensors) == {"embed", "q", "k", "norm"}
    one = await world.clock.run(world.coordinator.check(CheckRequest(pattern="n*")))
    assert one.ok
    assert set(one.tensors) == {"norm"}


async def test_a_check_does_not_wait_for_a_swap(world, target):
    world.sources.hanging.add(target.uri)
    await world.coordinator.swap(request(target))
    with pytest.raises(Busy):
        await world.coordinator.check(CheckRequest())
    await world.coordinator.cancel("op-1", CancelRequest(fence=fence()))
    await world.ended("op-1")


async def test_a_check_gives_way_to_a_swap(world, target):
    world.backend.faults["hashes"] = Fault.HANG
    checking = asyncio.ensure_future(world.coordinator.check(CheckRequest()))
    await world.clock.settle()
    before = world.clock.now
    status = await world.swap(target)
    assert status.state is SwapState.SERVING
    assert world.clock.now == before
    assert isinstance(checking.exception(), Busy)


async def test_an_audit_gives_way_to_a_swap_and_then_audits_what_is_live(world, target):
    world.backend.faults["hashes"] = Fault.HANG
    await world.swap(target)
    await world.clock.settle()
    assert world.state.audit is None
    other = world.publish("1.2", checkpoint(embed=b"E" * 8))
    before = world.clock.now
    assert (await world.swap(other, "op-2", revision=2)).state is SwapState.SERVING
    await world.clock.settle()
    assert world.clock.now == before
    assert world.state.audit.digest == other.digest
    assert world.backend.steps.count("hashes") == 2


async def test_a_pause_is_a_lease(world):
    state = await world.coordinator.leases.take(PauseRequest(lease_id="a", owner="trainer", seconds=5))
    assert (state.gate.open, state.gate.lease_owner, state.gate.lease_seconds_left) == (False, "trainer", 5)
    waiting = asyncio.ensure_future(world.coordinator.admission().__aenter__())
    await world.clock.settle()
    assert world.state.gate.queued == 1
    state = await world.coordinator.leases.give_back(ResumeRequest(lease_id="a", owner="trainer"))
    assert state.gate.open
    await waiting
    await world.coordinator.leases.give_back(ResumeRequest(lease_id="never was"))


@pytest.mark.parametrize(("lease_id", "seconds"), [("", 5), ("a", 0), ("a", -1), ("a", 1e9), ("a", float("nan"))])
async def test_a_pause_needs_an_id_and_a_sensible_time(world, lease_id, seconds):
    with pytest.raises(BadRequest):
        await world.coordinator.leases.take(PauseRequest(lease_id=lease_id, seconds=seconds))


async def test_a_journal_that_cannot_be_written_stops_the_swap_at_its_door(world, target, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(world.journal, "_sync", full)
    with pytest.raises(Unavailable, match="journal"):
        await world.coordinator.swap(request(target))
    monkeypatch.undo()
    assert (await world.swap(target)).state is SwapState.SERVING


async def test_a_journal_that_fills_up_before_the_intent_aborts(world, target, monkeypatch):
    await world.coordinator.swap(request(target))

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(world.journal, "_sync", full)
    status = await world.ended("op-1")
    assert status.state is SwapState.ABORTED
    assert "pause" not in world.backend.steps
    world.assert_serves(world.template)


async def test_the_state_says_who_decided(world, target):
    await world.swap(target, revision=5, epoch=3)
    state = world.state
    assert (state.owner_uid, state.epoch, state.revision, state.assignment_revision) == (OWNER, 3, 5, 5)
    assert state.operation.state is SwapState.SERVING
    assert state.pod_uid == POD
    assert state.protocol_version == PROTOCOL_VERSION


async def test_old_folders_of_side_files_are_removed(world):
    for number in range(4):
        await world.swap(world.publish(f"2.{number}", checkpoint(q=b"%04d" % number)), f"op-{number}", revision=number)
    assert len(list((world.folder / "versions").iterdir())) == 2


async def test_folders_that_cannot_be_removed_do_not_keep_an_operation_from_ending(world, target, monkeypatch):
    async def broken(_):
        raise OSError("read-only")

    monkeypatch.setattr(world.coordinator._core.store, "prune", broken)
    assert (await world.swap(target)).state is SwapState.SERVING
    world.assert_serves(target)


async def test_a_status_names_only_some_of_many_changed_tensors(world):
    many = {f"t{number}": b"x" for number in range(300)}
    await world.crash()
    world.template = world.publish("big", checkpoint(**many))
    await world.start()
    target = world.publish("big-1", checkpoint(**dict.fromkeys(many, b"y")))
    status = await world.swap(target)
    assert status.plan.changed_tensors == 300
    assert len(status.plan.changed_names) == 100


async def test_after_stopping_nothing_is_accepted(world, target):
    await world.clock.run(world.coordinator.drain(1))
    with pytest.raises(NotReady):
        await world.coordinator.swap(request(target))


async def test_errors_of_a_plan_are_typed(world):
    with pytest.raises(ModelswapError):
        await world.coordinator.plan(PlanRequest(target=VersionRef(uri="file:///nowhere")))


async def test_the_last_status_of_a_watch_is_terminal(world, target):
    await world.coordinator.swap(request(target))
    assert (await world.clock.run(last(world.coordinator, "op-1"))).state.terminal


@pytest.mark.parametrize("pattern", ["nothing.*", ""])
async def test_a_check_of_nothing_is_not_a_success(world, pattern):
    with pytest.raises(BadRequest, match="no tensor"):
        await world.coordinator.check(CheckRequest(pattern=pattern))
    assert world.state.ready


async def test_a_version_that_is_loaded_while_the_process_ends_lets_nobody_in(tmp_path, monkeypatch):
    world = World(tmp_path)
    loaded, load = asyncio.Event(), world.backend.load

    async def slow(order):
        await loaded.wait()
        return await load(order)

    monkeypatch.setattr(world.backend, "load", slow)
    starting = asyncio.ensure_future(world.coordinator.start(world.template, None))
    await world.clock.settle()
    await world.clock.run(world.coordinator.drain(0.5))
    loaded.set()
    await world.clock.run(starting)
    with pytest.raises(NotReady, match="stopping"):
        async with world.coordinator.admission():
            pass
    await world.stop()


async def test_a_lease_is_its_owners(world):
    await world.coordinator.leases.take(PauseRequest(lease_id="a", owner="trainer", seconds=5))
    with pytest.raises(ForeignOwner, match="trainer"):
        await world.coordinator.leases.take(PauseRequest(lease_id="a", owner="you", seconds=3600))
    with pytest.raises(ForeignOwner):
        await world.coordinator.leases.give_back(ResumeRequest(lease_id="a", owner="you"))
    assert world.state.gate.lease_seconds_left == 5
    await world.coordinator.leases.give_back(ResumeRequest(lease_id="a", owner="trainer"))
    assert world.state.gate.open


async def test_the_number_of_leases_is_bounded(world):
    for number in range(16):
        await world.coordinator.leases.take(PauseRequest(lease_id=f"{number}", seconds=5))
    with pytest.raises(Busy):
        await world.coordinator.leases.take(PauseRequest(lease_id="one more", seconds=5))
    await world.coordinator.leases.take(PauseRequest(lease_id="3", seconds=9))


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (Traffic, {"timeoutSeconds": -1}),
        (Traffic, {"timeoutSeconds": 86401}),
        (PauseRequest, {"leaseId": "a", "seconds": 0}),
        (PauseRequest, {"leaseId": "a", "seconds": 3601}),
        (PauseRequest, {"leaseId": "a" * 257}),
        (PauseRequest, {"leaseId": ""}),
        (ResumeRequest, {"leaseId": "a" * 257}),
    ],
)
def test_figures_and_ids_on_the_wire_are_bounded(kind, body):
    with pytest.raises(BadRequest):
        decode(json.dumps(body), kind)


async def test_a_rollback_that_could_not_be_written_is_written_later(world, target, monkeypatch):
    world.backend.faults["verify"] = Fault.ERROR
    sync = world.journal._sync

    def full(_):
        if world.backend.live and world.journal.state.intent is not None:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(world.journal, "_sync", full)
    assert (await world.swap(target)).state is SwapState.ROLLED_BACK
    assert world.journal.state.intent is not None
    monkeypatch.setattr(world.journal, "_sync", sync)
    await world.clock.advance(2)
    assert world.journal.state.intent is None
    await world.crash()
    await world.start()
    world.assert_serves(world.template)
    assert world.coordinator.operation("op-1").state is SwapState.ROLLED_BACK


async def test_a_disk_that_hangs_holds_nobody_for_ever(world, target):
    core = world.coordinator._core

    async def hang(call, *arguments):
        await asyncio.Event().wait()

    core.journal_offload = hang
    with pytest.raises(Unavailable, match="journal"):
        await world.clock.run(world.coordinator.swap(request(target)))


async def test_the_journals_calls_run_in_order_and_wait_for_no_other_work():
    own, seen = OneThread("test"), []
    await asyncio.gather(*(own(seen.append, number) for number in range(50)))
    assert seen == list(range(50))


async def test_a_source_that_never_answers_ends_the_look_and_holds_up_no_swap(world):
    target = world.publish("1.1", checkpoint(q=b"QQQQ"))
    world.sources.hanging.add(world.template.uri)
    look = asyncio.create_task(world.coordinator.look(LookRequest(target=world.template)))
    await world.clock.settle()
    assert (await world.swap(target)).state is SwapState.SERVING
    await world.clock.advance(LOOK_SECONDS + 1)
    with pytest.raises(NotReady, match="did not answer within 30 s"):
        await look
