"""A swap from its request to its end, and what is left when a step fails."""

import pytest

from modelswap_engine.backends.port import RequestPolicy
from modelswap_engine.limits import Memory
from modelswap_engine.protocol.errors import DigestMismatch, ManifestMismatch, NotReady, SourceUnreadable
from modelswap_engine.protocol.messages import VersionRef
from modelswap_engine.protocol.policy import Loading, LoadingMode, Traffic, TrafficMode, VerifyMode
from modelswap_engine.protocol.states import SwapState
from tests.support.fake_backend import Fault
from tests.support.fake_source import FakeCheckpoint
from tests.support.swapping import World, checkpoint, last, request


async def test_the_template_is_served_after_start(world):
    world.assert_serves(world.template)


async def test_a_swap_reads_whole_groups_of_what_changed_and_nothing_else(world):
    target = world.publish("1.1", checkpoint(q=b"QQQQ"))
    status = await world.swap(target)
    assert status.state is SwapState.SERVING
    assert status.error is None
    world.assert_serves(target)
    assert status.plan.changed_names == ["q"]
    assert status.plan.changed_bytes == 4
    assert status.bytes_fetched == status.bytes_staged == 8  # q and k are one parameter
    assert status.commit_window_microseconds == 6.0
    assert status.commit_method == "pointer"
    assert status.pause_seconds is not None
    assert world.state.previous == world.template
    assert world.state.swaps_completed == 1
    assert world.backend.policies == [RequestPolicy.NONE_RUNNING]


async def test_every_state_is_shown_in_order(world):
    target = world.publish("1.1", checkpoint(q=b"QQQQ"))
    seen = []

    async def follow():
        await world.coordinator.swap(request(target))
        async for status in world.coordinator.watch("op-1"):
            if not seen or seen[-1] != status.state:
                seen.append(status.state)

    await world.clock.run(follow())
    assert [str(state) for state in seen] == [
        "Planned", "Fetching", "Staged", "Prepared", "Pausing", "Committing", "Committed", "Verified", "Serving",
    ]  # fmt: skip


async def test_the_audit_follows_and_agrees(world):
    target = world.publish("1.1", checkpoint(q=b"QQQQ"))
    await world.swap(target)
    await world.clock.settle()
    assert world.state.audit.ok is True
    assert world.state.audit.digest == target.digest
    assert world.state.audit.tensors == 4


async def test_a_wanted_digest_that_is_live_already_only_takes_the_new_label(world):
    again = world.publish("1.0-bis", checkpoint())
    status = await world.swap(again)
    assert status.state is SwapState.SERVING
    world.assert_serves(again)
    assert "stage" not in world.backend.steps


async def test_without_a_pin_the_digest_is_found_at_the_source(world):
    target = world.publish("1.1", checkpoint(norm=b"NN"))
    status = await world.swap(VersionRef(version="1.1", uri=target.uri))
    assert status.target == target
    world.assert_serves(target)


async def test_full_loading_reads_every_tensor(world):
    target = world.publish("1.1", checkpoint(norm=b"NN"))
    status = await world.swap(target, loading=Loading(mode=LoadingMode.FULL))
    assert status.bytes_fetched == 18
    world.assert_serves(target)


async def test_side_files_alone_are_a_swap_without_tensors(world):
    config = b'{"architectures": ["Tiny"], "hidden_size": 4, "eos_token_id": 3}'
    base = checkpoint()
    target = world.publish("1.1", FakeCheckpoint(base.tensors, side={"config.json": config}))
    status = await world.swap(target)
    assert status.state is SwapState.SERVING
    assert status.bytes_fetched == 0
    assert status.plan.side_files == ["config.json: eos_token_id"]
    world.assert_serves(target)


async def test_going_back_to_the_retained_version_reads_nothing(world):
    target = world.publish("1.1", checkpoint(q=b"QQQQ"))
    await world.swap(target)
    del world.sources.checkpoints[world.template.uri]
    status = await world.swap(world.template, "op-2", revision=2)
    assert status.state is SwapState.SERVING
    assert status.bytes_fetched == 0
    assert world.backend.live == checkpoint().tensors
    assert world.state.previous == target


async def test_the_previous_version_is_released_when_it_is_not_to_be_kept(world):
    target = world.publish("1.1", checkpoint(q=b"QQQQ"))
    await world.swap(target, loading=Loading(keep_previous=False))
    world.assert_serves(target)
    assert world.state.previous is None
    assert world.state.memory.previous_bytes == 0
    assert world.backend.previous is None


async def test_memory_is_made_by_dropping_the_retained_version(world):
    await world.swap(world.publish("1.1", checkpoint(embed=b"E" * 8)))
    world.backend.limit = 18 + 8 + 4
    target = world.publish("1.2", checkpoint(embed=b"F" * 8))
    status = await world.swap(target, "op-2", revision=2)
    assert status.state is SwapState.SERVING
    world.assert_serves(target)


async def test_a_version_dropped_for_room_is_not_said_to_be_retained(world):
    await world.swap(world.publish("1.1", checkpoint(embed=b"E" * 8)))
    world.backend.limit = 18 + 8 + 4
    world.backend.faults["stage"] = Fault.LATE_ERROR
    target = world.publish("1.2", checkpoint(embed=b"F" * 8))
    assert (await world.swap(target, "op-2", revision=2)).state is SwapState.ABORTED
    assert world.state.previous is None
    assert world.backend.previous is None


async def test_a_retained_version_that_the_engine_lost_is_read_at_the_next_attempt(world):
    await world.swap(world.publish("1.1", checkpoint(q=b"QQQQ")))
    world.backend.previous = None
    assert (await world.swap(world.template, "op-2", revision=2)).state is SwapState.ABORTED
    assert world.state.previous is None
    status = await world.swap(world.template, "op-3", revision=2)
    assert status.bytes_fetched == 8
    world.assert_serves(world.template)


async def test_too_little_memory_is_refused_in_mib_before_anything_is_touched(world):
    world.backend.limit = 20
    target = world.publish("1.1", checkpoint(embed=b"E" * 8))
    status = await world.swap(target)
    assert status.state is SwapState.ABORTED
    assert status.error.code == "InsufficientMemory"
    assert "MiB" in status.error.message
    assert "stage" not in world.backend.steps
    world.assert_serves(world.template)


@pytest.mark.parametrize(
    ("content", "code", "named"),
    [
        (checkpoint(q=b"longer than before"), "IncompatibleModel", "q"),
        (FakeCheckpoint({"embed": b"e" * 8, "q": b"q" * 4, "k": b"k" * 4}), "IncompatibleModel", "norm"),
        (checkpoint(extra=b"x"), "IncompatibleModel", "extra"),
        (FakeCheckpoint(checkpoint(q=b"QQQQ").tensors, architecture="Other"), "IncompatibleModel", "Other"),
        (
            FakeCheckpoint(checkpoint().tensors, side={"config.json": b'{"architectures": ["Tiny"], "rope_theta": 2}'}),
            "UnsupportedChange",
            "rope_theta",
        ),
    ],
)
async def test_an_incompatible_version_is_refused_before_anything_is_touched(world, content, code, named):
    status = await world.swap(world.publish("bad", content))
    assert status.state is SwapState.ABORTED
    assert status.error.code == code or code == "UnsupportedChange"
    assert any(named in refusal.message for refusal in status.plan.refusals)
    assert status.error.advice
    assert "stage" not in world.backend.steps
    assert not world.journal.state.intent
    world.assert_serves(world.template)


async def test_a_pin_that_the_source_does_not_hold_is_refused(world):
    target = world.publish("1.1", checkpoint(q=b"QQQQ"))
    status = await world.swap(VersionRef(version="1.1", uri=target.uri, digest="sha256:" + "0" * 64))
    assert status.state is SwapState.ABORTED
    assert status.error.code == "DigestMismatch"
    world.assert_serves(world.template)


async def test_bytes_that_are_not_the_manifests_are_refused_while_the_old_version_serves(world):
    target = world.publish("1.1", checkpoint(q=b"QQQQ"))
    resolve = world.sources.resolve

    async def then_damaged(uri, **asked):
        resolved = await resolve(uri, **asked)
        world.sources.checkpoints[target.uri] = checkpoint(q=b"QQQX")
        return resolved

    world.sources.resolve = then_damaged
    status = await world.swap(target)
    assert status.state is SwapState.ABORTED
    assert status.error.code == "ManifestMismatch"
    assert "pause" not in world.backend.steps
    world.assert_serves(world.template)


async def test_a_source_that_was_overwritten_while_it_was_read_aborts(world):
    target = world.publish("1.1", checkpoint(q=b"QQQQ"))
    world.sources.touched.add(target.uri)
    status = await world.swap(target)
    assert status.state is SwapState.ABORTED
    assert status.error.code == "SourceChanged"
    assert status.error.retryable
    world.assert_serves(world.template)


@pytest.mark.parametrize("error", [SourceUnreadable("disk on fire"), NotReady("not now")])
async def test_a_source_that_fails_aborts_with_its_error(world, error):
    target = world.publish("1.1", checkpoint(q=b"QQQQ"))
    world.sources.errors[target.uri] = error
    status = await world.swap(target)
    assert status.state is SwapState.ABORTED
    assert status.error.code == error.code
    world.assert_serves(world.template)


async def test_a_source_that_never_answers_is_given_up(world):
    target = world.publish("1.1", checkpoint(q=b"QQQQ"))
    world.sources.hanging.add(target.uri)
    status = await world.swap(target)
    assert status.state is SwapState.ABORTED
    assert "1800 s" in status.error.message
    world.assert_serves(world.template)


async def test_a_listener_that_cannot_serve_the_version_aborts(world):
    target = world.publish("1.1", checkpoint(q=b"QQQQ"))
    world.listener.refuse[target.digest] = DigestMismatch("no such tokenizer")
    status = await world.swap(target)
    assert status.state is SwapState.ABORTED
    assert "pause" not in world.backend.steps
    world.assert_serves(world.template)
    assert target.digest not in world.listener.prepared


EARLY = ("stage", "prepare", "pause")
LATE = ("commit", "verify", "resume")
FAULTS = (Fault.ERROR, Fault.LATE_ERROR, Fault.RAISE, Fault.DIE, Fault.DIE_AFTER, Fault.HANG)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("step", EARLY)
async def test_a_failure_before_the_commit_leaves_the_old_version(world, step, fault):
    target = world.publish("1.1", checkpoint(q=b"QQQQ"))
    world.backend.faults[step] = fault
    status = await world.swap(target)
    assert status.state is SwapState.ABORTED
    assert status.error is not None
    assert "Traceback" not in status.error.message
    world.assert_serves(world.template)
    assert (await world.swap(target, "op-2")).state is SwapState.SERVING
    world.assert_serves(target)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("step", LATE)
async def test_a_failure_from_the_commit_on_brings_the_old_version_back(world, step, fault):
    target = world.publish("1.1", checkpoint(q=b"QQQQ"))
    world.backend.faults[step] = fault
    status = await world.swap(target)
    assert status.state is SwapState.ROLLED_BACK
    assert status.error is not None
    world.assert_serves(world.template)
    assert (await world.swap(target, "op-2")).state is SwapState.SERVING
    world.assert_serves(target)


@pytest.mark.parametrize("step", ["prepare", "verify"])
async def test_a_rank_that_proves_something_else_stops_the_swap(world, step):
    target = world.publish("1.1", checkpoint(q=b"QQQQ"))
    world.backend.faults[step] = Fault.LIE
    status = await world.swap(target)
    assert not status.state.succeeded
    assert status.error.code == "DigestMismatch"
    world.assert_serves(world.template)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("step", ["rollback", "release"])
async def test_a_way_back_that_fails_ends_in_a_whole_load_of_the_old_version(world, step, fault):
    target = world.publish("1.1", checkpoint(q=b"QQQQ"))
    world.backend.faults |= {"commit": Fault.LATE_ERROR, step: fault}
    status = await world.swap(target)
    assert status.state is SwapState.ROLLED_BACK
    assert world.backend.steps.count("load") == 2
    world.assert_serves(world.template)


async def test_where_no_way_back_works_the_engine_is_quarantined(world):
    target = world.publish("1.1", checkpoint(q=b"QQQQ"))
    world.backend.faults |= {"commit": Fault.LATE_ERROR, "rollback": Fault.ERROR, "load": Fault.ERROR}
    status = await world.swap(target)
    assert status.state is SwapState.QUARANTINED
    state = world.state
    assert state.quarantined
    assert not state.ready
    assert state.reason == "Quarantined"
    assert state.live is None
    assert world.coordinator.closing
    with pytest.raises(NotReady):
        async with world.coordinator.admission():
            pass


async def test_a_later_swap_ends_the_quarantine_by_a_whole_load(world):
    target = world.publish("1.1", checkpoint(q=b"QQQQ"))
    world.backend.faults |= {"commit": Fault.LATE_ERROR, "rollback": Fault.ERROR, "load": Fault.ERROR}
    await world.swap(target)
    status = await world.swap(target, "op-2")
    assert status.state is SwapState.SERVING
    assert not world.state.quarantined
    world.assert_serves(target)


async def test_a_bit_that_flipped_in_the_commit_is_found_by_the_audit_and_repaired(world):
    target = world.publish("1.1", checkpoint(q=b"QQQQ"))
    world.backend.faults["commit"] = Fault.FLIP
    status = await world.swap(target)
    assert status.state is SwapState.SERVING
    await world.clock.settle()
    assert world.state.repair.plan.changed_names == ["embed"]
    world.assert_serves(target)
    assert (world.state.repairs, world.state.swaps_completed) == (1, 1)


async def test_a_failure_after_the_gate_opened_takes_nothing_back(world):
    target = world.publish("1.1", checkpoint(q=b"QQQQ"))
    world.backend.faults["release"] = Fault.DIE
    status = await world.swap(target, loading=Loading(keep_previous=False))
    assert status.state is SwapState.SERVING
    await world.clock.advance(10)
    world.assert_serves(target)


@pytest.mark.parametrize(
    ("mode", "counted"),
    [(TrafficMode.RECOMPUTE, (3, 0, 0)), (TrafficMode.FREEZE, (0, 3, 0)), (TrafficMode.ABORT, (0, 0, 3))],
)
async def test_the_engine_is_told_the_mode_and_what_it_met_is_counted(world, mode, counted):
    world.backend.requests = 3
    target = world.publish("1.1", checkpoint(q=b"QQQQ"))
    status = await world.swap(target, traffic=Traffic(mode=mode))
    assert status.state is SwapState.SERVING
    assert [policy.value for policy in world.backend.policies] == [mode.value]
    assert (status.recomputed_requests, status.frozen_requests, status.aborted_requests) == counted


async def test_strict_verification_is_asked_for(world):
    target = world.publish("1.1", checkpoint(q=b"QQQQ"))
    status = await world.swap(target, loading=Loading(verify=VerifyMode.STRICT))
    assert status.state is SwapState.SERVING


async def test_a_caller_that_goes_away_cancels_nothing(world):
    import asyncio

    target = world.publish("1.1", checkpoint(q=b"QQQQ"))
    caller = asyncio.ensure_future(world.coordinator.swap(request(target)))
    await asyncio.sleep(0)
    caller.cancel()
    status = await world.clock.run(last(world.coordinator, "op-1"))
    assert status.state is SwapState.SERVING
    world.assert_serves(target)


async def test_what_undoes_a_commit_is_released_after_the_swap_and_the_previous_version_stays(world):
    target = world.publish("1.1", checkpoint(q=b"QQQQ"))
    await world.swap(target)
    assert world.backend.steps.index("release") > world.backend.steps.index("resume")
    assert world.backend.previous is not None
    assert world.state.previous == world.template


@pytest.mark.parametrize("retained", [False, True])
async def test_a_held_digest_under_another_uri_is_looked_for_there(world, retained):
    wanted = world.template
    if retained:
        assert (await world.swap(world.publish("1.1", checkpoint(q=b"QQQQ")))).state is SwapState.SERVING
    live = world.state.live
    typo = VersionRef(version="1.0", uri="file:///models/typo", digest=wanted.digest)
    status = await world.swap(typo, "op-typo", revision=2)
    assert status.state is SwapState.ABORTED
    assert status.error.code == "SourceNotFound"
    other = world.publish("other", checkpoint(norm=b"NN"))
    status = await world.swap(VersionRef(version="1.0", uri=other.uri, digest=wanted.digest), "op-other", revision=3)
    assert status.error.code == "DigestMismatch"
    world.assert_serves(live)
    moved = world.publish("moved", checkpoint())
    status = await world.swap(moved, "op-moved", revision=4)
    assert status.state is SwapState.SERVING
    assert status.bytes_fetched == 0
    world.assert_serves(moved)


async def test_a_file_that_was_overwritten_while_it_was_staged_is_no_bad_version(world):
    target = world.publish("1.1", checkpoint(q=b"QQQQ"))
    world.backend.error = ManifestMismatch("tensor q: other bytes")
    world.backend.faults["stage"] = Fault.ERROR
    world.sources.touched.add(target.uri)
    status = await world.swap(target)
    assert (status.state, status.error.code, status.error.retryable) == (SwapState.ABORTED, "SourceChanged", True)
    world.sources.touched.clear()
    world.backend.faults["stage"] = Fault.ERROR
    status = await world.swap(target, "op-2", revision=2)
    assert (status.error.code, status.error.retryable) == ("ManifestMismatch", False)
    world.assert_serves(world.template)


async def test_a_whole_load_that_does_not_fit_is_refused_before_the_engine_is_touched(tmp_path):
    world = World(tmp_path)
    world.backend.limit = 17  # 18 bytes are needed
    await world.start()
    assert (world.state.reason, world.state.live) == ("LoadFailed", None)
    assert "MiB" in world.state.message
    assert "load" not in world.backend.steps
    world.backend.limit = 18
    await world.clock.advance(60)
    world.assert_serves(world.template)
    await world.stop()


async def test_what_the_engine_holds_makes_room_for_a_whole_load(world):
    world.backend.limit = 20
    target = world.publish("1.1", checkpoint(norm=b"NN"))
    world.backend.faults |= {"verify": Fault.ERROR, "rollback": Fault.ERROR}
    status = await world.swap(target)
    assert status.state is SwapState.ROLLED_BACK
    assert world.backend.steps.count("load") == 2
    world.assert_serves(world.template)


async def test_a_dead_engine_is_loaded_within_what_the_container_has(world):
    core = world.coordinator._core
    core.memory._probe = Bounded(17)
    world.backend.kill()
    await world.clock.advance(60)
    assert world.state.reason == "LoadFailed"
    core.memory._probe = Bounded(18)
    await world.clock.advance(60)
    world.assert_serves(world.template)


async def test_a_file_that_was_overwritten_during_a_whole_load_is_no_bad_version(tmp_path):
    world = World(tmp_path)
    world.backend.error = ManifestMismatch("tensor q: other bytes")
    world.backend.faults["load"] = Fault.ERROR
    world.sources.touched.add(world.template.uri)
    await world.start()
    assert "overwritten" in world.state.message
    await world.clock.advance(60)
    world.assert_serves(world.template)
    await world.stop()


class Bounded:
    """A container with so many bytes left."""

    def __init__(self, available: int) -> None:
        self.available = available

    def read(self) -> Memory:
        return Memory(limit=1000, available=self.available)
