"""The planner and the status together, on a slot in no time (`slot_world`)."""

from dataclasses import replace
from datetime import timedelta

import pytest

from modelswap_engine.protocol.engine_state import EngineState, RankState
from modelswap_engine.protocol.errors import ErrorBody
from modelswap_engine.protocol.messages import VersionRef
from modelswap_engine.protocol.states import SwapState
from modelswap_engine.swap.fence import Accepted
from modelswap_operator.api.modelversion import OnFailure, Rollout
from modelswap_operator.planning.actions import CancelSwaps, StartSwaps, Wait, WriteAssignment
from modelswap_operator.planning.assess import Assessment, proved
from modelswap_operator.planning.modelversion import POLL_SECONDS, rest
from modelswap_operator.planning.operations import covers
from modelswap_operator.planning.rollout import allowed
from tests.support.slot_world import GOOD, World, digest


def started(world: World) -> list[tuple[str, ...]]:
    return [tuple(o.pod.name for o in a.orders) for a in world.actions(StartSwaps)]


def until(world: World, state: SwapState, limit: int = 50) -> None:
    """Go on until some pod's operation is in a state."""
    for _ in range(limit):
        if any(p.operation is not None and p.operation.state is state for p in world.pods):
            return
        if isinstance(world.run_pass(), Wait):
            world.tick()
    raise AssertionError(f"no pod came to {state}")


def long_after(world: World) -> None:
    """Let two deadlines go by, with time for what can be done before and after each."""
    for _ in range(3):
        for _ in range(40):
            if isinstance(world.run_pass(), Wait):
                world.tick()
        world.now += timedelta(seconds=601)
    world.run_pass()


def test_pods_that_serve_the_wanted_version_are_adopted_without_a_swap() -> None:
    world = World(pods=2, serving="1.0", version="1.0")
    world.settle()
    assert world.condition("Ready") == ("True", "Succeeded")
    assert world.condition("WeightsVerified") == ("True", "ProvedByEngines")
    assert started(world) == []
    assert world.assignment is not None
    assert world.assignment.stable == GOOD["1.0"].target
    assert world.status.observed_generation == 1
    assert world.status.stable is not None
    assert world.status.stable.digest == digest("a")


def test_a_new_version_goes_pod_after_pod_and_becomes_stable_with_the_first() -> None:
    world = World(pods=3)
    world.settle()
    world.bump("1.1")
    world.settle()
    assert world.serving() == ["1.1"] * 3
    assert started(world) == [("pod-1",), ("pod-2",), ("pod-3",)]
    candidate, promoted = [a.assignment for a in world.actions(WriteAssignment)][-2:]
    assert candidate.candidate is not None
    assert (candidate.candidate.pod_uids, candidate.stable) == (["uid-1"], GOOD["1.0"].target)
    assert (promoted.stable, promoted.candidate) == (GOOD["1.1"].target, None)
    assert world.condition("Ready") == ("True", "Succeeded")
    assert [(h.version, h.result) for h in world.status.history] == [("1.1", "Succeeded"), ("1.0", "Succeeded")]


def test_max_unavailable_lets_several_pods_swap_at_once_after_the_first() -> None:
    world = World(pods=5, max_unavailable="40%")
    world.settle()
    world.bump("1.1")
    world.settle()
    assert [len(names) for names in started(world)][:2] == [1, 2]
    assert world.serving() == ["1.1"] * 5


def test_a_pod_that_is_not_ready_uses_up_the_budget() -> None:
    world = World(pods=3)
    world.settle()
    world.pods[2].ready = False
    world.pods[2].reachable = False
    world.bump("1.1")
    for _ in range(60):
        world.run_pass()
        world.tick()
    assert started(world) == []  # one of three is unavailable already, and maxUnavailable is 1
    world.pods[2].ready = world.pods[2].reachable = True
    world.settle()
    assert world.serving() == ["1.1"] * 3


def test_a_version_refused_by_the_plan_touches_no_pod_and_is_not_asked_for_again() -> None:
    world = World(pods=2)
    world.settle()
    writes = len(world.actions(WriteAssignment))
    world.bump("2.0")
    world.settle()
    assert world.condition("Stalled") == ("True", "DigestMismatch")
    assert world.condition("Ready") == ("False", "DigestMismatch")
    assert world.condition("Reconciling") is None
    assert world.condition("Serving") == ("True", "PodsServe")
    assert world.status.observed_generation == 2
    assert (started(world), len(world.actions(WriteAssignment))) == ([], writes)
    asked = len(world.log)
    world.kill_operator()
    world.settle()
    assert all(isinstance(a, Wait) for a in world.log[asked:])


def test_a_version_that_fails_on_the_first_pod_is_withdrawn() -> None:
    world = World(pods=2)
    world.settle()
    world.bump("2.1")
    world.settle()
    assert world.condition("Stalled") == ("True", "ChecksFailed")
    assert world.serving() == ["1.0", "1.0"]
    assert world.assignment is not None
    assert (world.assignment.stable, world.assignment.candidate) == (GOOD["1.0"].target, None)
    assert len(started(world)) == 1
    assert world.status.failures[0].digest == digest("e")
    assert (world.status.history[0].version, world.status.history[0].result) == ("2.1", "Failed")


def test_a_later_pod_that_refuses_takes_the_others_back() -> None:
    world = World(pods=3)
    world.settle()
    world.bump("1.1")
    world.pods[1].refuses.add("1.1")
    world.settle()
    assert world.serving() == ["1.0"] * 3
    assert world.condition("Stalled") == ("True", "RolledBack")
    assert "IncompatibleModel" in world.status.conditions[0].message
    assert world.status.history[0].result == "RolledBack"


def test_halt_leaves_every_pod_as_it_is() -> None:
    world = World(pods=3, on_failure=OnFailure.HALT)
    world.settle()
    world.bump("1.1")
    world.pods[1].refuses.add("1.1")
    world.settle()
    assert world.serving() == ["1.1", "1.0", "1.0"]
    assert world.condition("Stalled") == ("True", "IncompatibleModel")


def test_a_new_generation_tries_a_failed_digest_again() -> None:
    world = World(pods=2)
    world.settle()
    world.bump("1.1")
    world.pods[0].refuses.add("1.1")
    world.settle()
    assert world.condition("Stalled") == ("True", "IncompatibleModel")
    world.pods[0].refuses.clear()
    world.edit(rollout=Rollout(progress_deadline_seconds=601))
    world.settle()
    assert world.serving() == ["1.1", "1.1"]
    assert world.condition("Stalled") is None


def test_transient_failures_are_tried_again_with_growing_pauses() -> None:
    world = World(pods=1)
    world.settle()
    world.bump("1.1")
    world.pods[0].transient_faults = 3
    world.run_pass()
    world.settle()
    ids = [o.request.operation_id for a in world.actions(StartSwaps) for o in a.orders]
    assert len(ids) == len(set(ids)) == 4
    assert world.serving() == ["1.1"]


def test_with_halt_the_deadline_stalls_and_progress_lifts_it() -> None:
    world = World(pods=2, on_failure=OnFailure.HALT)
    world.settle()
    world.bump("1.1")
    world.pods[1].reachable = False
    world.pods[1].ready = True
    for _ in range(60):
        world.run_pass()
        world.tick()
    assert world.serving()[0] == "1.1"
    assert world.condition("Ready") == ("Unknown", "EngineUnreachable")
    assert world.condition("Reconciling") == ("True", "ProgressingWithRetry")
    world.now += timedelta(seconds=601)
    world.run_pass()
    assert world.condition("Stalled") == ("True", "ProgressDeadlineExceeded")
    assert world.condition("Reconciling") is None
    world.kill_operator()
    world.run_pass()
    assert world.condition("Stalled") == ("True", "ProgressDeadlineExceeded")
    world.pods[1].reachable = True
    world.settle()
    assert world.condition("Ready") == ("True", "Succeeded")


def test_a_newer_spec_cancels_what_is_in_flight() -> None:
    world = World(pods=2)
    world.settle()
    world.bump("1.1")
    until(world, SwapState.STAGED)
    world.bump("1.2")
    world.settle()
    assert len(world.actions(CancelSwaps)) == 1
    assert world.serving() == ["1.2", "1.2"]
    assert [(h.version, h.result) for h in world.status.history] == [
        ("1.2", "Succeeded"),
        ("1.1", "Superseded"),
        ("1.0", "Succeeded"),
    ]


def test_a_pod_that_takes_its_time_to_stop_is_asked_again_after_a_pause() -> None:
    world = World(pods=1)
    world.settle()
    world.bump("1.1")
    until(world, SwapState.STAGED)
    world.pods[0].slow_to_stop = 3
    world.bump("1.2")
    for _ in range(4):
        while not isinstance(action := world.run_pass(), CancelSwaps):
            assert not isinstance(action, Wait)
        assert rest(action, world.now) == POLL_SECONDS  # it says the same until it has stopped
    world.settle()
    assert len(world.actions(CancelSwaps)) == 4
    assert world.serving() == ["1.2"]


def test_what_was_done_is_looked_at_at_once_and_what_is_waited_for_in_its_time() -> None:
    world = World(pods=1)
    world.settle()
    assert rest(Wait(), world.now) is None
    assert rest(Wait(until=world.now + timedelta(seconds=7)), world.now) == 7
    assert rest(StartSwaps(), world.now) == 0


def test_a_revert_in_the_middle_brings_the_swapped_pods_back() -> None:
    world = World(pods=3)
    world.settle()
    world.bump("1.1")
    until(world, SwapState.SERVING)
    world.run_pass()
    world.bump("1.0")
    world.settle()
    assert world.serving() == ["1.0"] * 3
    assert world.condition("Ready") == ("True", "Succeeded")


def test_suspended_finishes_the_operation_publishes_the_plan_and_does_nothing_else() -> None:
    world = World(pods=2)
    world.settle()
    world.bump("1.1")
    until(world, SwapState.FETCHING)
    world.edit(suspend=True)
    before = len(world.log)
    world.settle()
    assert not [a for a in world.log[before:] if isinstance(a, StartSwaps | CancelSwaps | WriteAssignment)]
    assert world.serving() == ["1.1", "1.0"]
    assert world.condition("Suspended") == ("True", "Suspended")
    assert world.condition("Ready") == ("Unknown", "Suspended")
    assert world.status.observed_generation == world.generation
    assert [(p.from_digest, p.changed_tensors) for p in world.status.plan] == [(digest("a"), 3)]
    world.edit(suspend=False)
    world.settle()
    assert world.serving() == ["1.1", "1.1"]
    assert world.condition("Suspended") is None


def test_no_pods_yet_waits_until_the_deadline_and_scaled_to_zero_is_ready() -> None:
    world = World(pods=0)
    world.run_pass()
    assert world.condition("Reconciling") == ("True", "WaitingForPods")
    world.now += timedelta(seconds=700)
    world.run_pass()
    assert world.condition("Stalled") == ("True", "ProgressDeadlineExceeded")
    pod = world.add_pod(GOOD["1.0"])
    world.settle()
    assert world.condition("Ready") == ("True", "Succeeded")
    world.pods.remove(pod)
    world.settle()
    assert world.condition("Ready") == ("True", "ScaledToZero")
    world.bump("1.1")
    world.run_pass()
    assert world.condition("Ready") == ("Unknown", "WaitingForPods")  # the pods would come up with 1.0
    world.add_pod()
    world.settle()
    assert world.serving() == ["1.1"]


def test_pods_never_ready_are_counted_apart() -> None:
    world = World(pods=2)
    world.settle()
    world.add_pod(None, ready=False).reachable = False
    for _ in range(5):
        world.run_pass()
    assert world.condition("Ready") == ("True", "Succeeded")
    counts = world.status.pod_counts
    assert counts is not None
    assert (counts.total, counts.counted, counts.ready, counts.excluded) == (3, 2, 2, 1)


def test_deletion_releases_the_assignment_once_and_recreation_takes_it_over_above() -> None:
    world = World(pods=2)
    world.settle()
    world.bump("1.1")
    world.settle()
    world.deleted = True
    world.settle()
    assert world.assignment is not None
    assert (world.assignment.released, world.assignment.stable) == (True, GOOD["1.1"].target)
    world.deleted, world.uid, world.generation = False, "owner-2", 1
    world.status = type(world.status)()
    for pod in world.pods:  # the sidecar sees the release in its mounted file
        assert pod.accepted is not None
        pod.accepted = type(pod.accepted)(revision=world.assignment.revision, epoch=1, released=True)
    world.bump("1.0")
    world.settle()
    assert world.serving() == ["1.0", "1.0"]
    assert world.revisions == sorted(set(world.revisions))


def test_steady_state_writes_nothing() -> None:
    world = World(pods=3)
    world.settle()
    world.bump("1.1")
    world.settle()
    writes = world.status_writes
    for _ in range(20):
        world.now += timedelta(seconds=60)
        world.run_pass()
    world.kill_operator()
    for _ in range(5):
        world.now += timedelta(seconds=60)
        world.run_pass()
    assert world.status_writes == writes


def test_ready_is_not_true_for_a_pod_that_has_not_proved_its_boot() -> None:
    world = World(pods=2)
    world.settle()
    world.pods[1].boot += 1
    world.pods[1].live = None
    world.run_pass()
    assert world.condition("Ready") == ("Unknown", "Progressing")
    assert world.condition("WeightsVerified") == ("Unknown", "NotProved")


def test_an_old_leader_does_not_release_what_a_newer_one_decided() -> None:
    world = World(pods=2)
    world.settle()
    world.epoch, current = 0, world.assignment
    world.deleted = True
    assert isinstance(world.run_pass(), Wait)
    assert world.assignment is current


def test_an_old_leader_does_nothing() -> None:
    world = World(pods=2)
    world.settle()
    world.epoch, current = 0, world.assignment
    world.bump("1.1")
    action = world.run_pass()
    assert isinstance(action, Wait)
    assert world.assignment is current


def test_a_lost_configmap_is_written_again_above_what_pods_have_accepted() -> None:
    world = World(pods=2)
    world.settle()
    world.bump("1.1")
    world.settle()
    seen = max(p.accepted.revision for p in world.pods if p.accepted)
    world.assignment, world.ledger = None, type(world.ledger)()
    world.settle()
    assert world.assignment is not None
    assert world.assignment.revision > seen
    assert world.condition("Ready") == ("True", "Succeeded")


def test_a_late_pod_that_refuses_does_not_take_a_finished_rollout_back() -> None:
    world = World(pods=2)
    world.settle()
    world.bump("1.1")
    world.settle()
    late = world.add_pod(GOOD["1.0"])
    late.refuses.add("1.1")
    world.settle()
    assert world.serving() == ["1.1", "1.1", "1.0"]
    assert world.condition("Stalled") == ("True", "IncompatibleModel")


def test_an_unreachable_candidate_gives_its_place_to_another_pod() -> None:
    world = World(pods=2)
    world.settle()
    world.bump("1.1")
    for _ in range(3):
        world.run_pass()
    assert world.assignment is not None
    assert world.assignment.candidate is not None
    world.pods.pop(0)
    world.settle()
    assert world.serving() == ["1.1"]


@pytest.mark.parametrize(
    ("value", "pods", "expected"),
    [(1, 10, 1), (3, 10, 3), ("25%", 10, 2), ("25%", 3, 1), ("100%", 4, 4), ("1%", 50, 1), (1, 0, 1)],
)
def test_max_unavailable_rounds_down_but_lets_one_through(value: int | str, pods: int, expected: int) -> None:
    assert allowed(value, pods) == expected


def test_a_first_pod_that_restarts_into_a_version_it_cannot_load_gets_the_stable_one_back() -> None:
    world = World(pods=2)
    world.settle()
    world.bump("2.1")
    for _ in range(3):
        world.run_pass()
    assert world.assignment is not None
    assert world.assignment.candidate is not None
    world.pods[0].restart()
    world.pods[0].memory.clear()  # the journal's volume was lost with it
    world.settle()
    assert world.serving() == ["1.0", "1.0"]
    assert world.condition("Stalled") == ("True", "LoadFailed")


def test_a_first_pod_that_is_down_keeps_its_place_until_the_deadline() -> None:
    world = World(pods=2)
    world.settle()
    world.bump("1.1")
    for _ in range(3):
        world.run_pass()
    world.pods[0].ready = world.pods[0].reachable = False
    for _ in range(20):
        world.run_pass()
        world.tick()
    assert world.assignment is not None
    assert world.assignment.candidate is not None
    assert world.assignment.candidate.pod_uids == ["uid-1"]
    assert world.serving()[1] == "1.0"
    world.now += timedelta(seconds=601)
    for _ in range(3):
        world.run_pass()
    assert world.condition("Stalled") == ("True", "CandidateLost")
    assert world.assignment.candidate is None


def test_an_outdated_candidate_is_withdrawn_although_nobody_can_be_asked() -> None:
    world = World(pods=1)
    world.settle()
    world.bump("2.1")
    for _ in range(2):
        world.run_pass()
    world.pods[0].restart()
    world.tick()
    assert world.pods[0].reason == "LoadFailed"
    world.bump("1.2")
    world.settle()
    assert world.serving() == ["1.2"]


def test_a_pod_lost_from_sight_in_mid_swap_uses_up_the_budget() -> None:
    world = World(pods=3)
    world.settle()
    world.bump("1.1")
    until(world, SwapState.SERVING)
    for _ in range(3):
        world.run_pass()
    second = world.pods[1]
    assert (second.busy, second.ready) == (True, True)
    second.reachable = False
    for _ in range(5):
        world.run_pass()
    assert started(world) == [("pod-1",), ("pod-2",)]
    world.kill_operator()  # the next process knows nothing of it
    for _ in range(5):
        world.run_pass()
    assert started(world) == [("pod-1",), ("pod-2",)]
    second.reachable = True
    world.settle()
    assert world.serving() == ["1.1"] * 3


def test_a_pod_whose_answer_was_lost_uses_up_the_budget() -> None:
    world = World(pods=3)
    world.settle()
    world.pods[1].goes_silent = True
    world.bump("1.1")
    for _ in range(40):
        world.run_pass()
        world.tick()
    assert started(world) == [("pod-1",), ("pod-2",)]
    world.pods[1].reachable = True
    world.settle()
    assert world.serving() == ["1.1"] * 3


def test_an_idle_pod_lost_from_sight_holds_up_no_other() -> None:
    world = World(pods=3)
    world.settle()
    world.pods[1].reachable = False
    world.bump("1.1")
    for _ in range(40):
        world.run_pass()
        world.tick()
    assert world.serving() == ["1.1", "1.0", "1.1"]


def test_a_pod_is_not_tried_again_before_its_pause_is_over_unless_the_spec_changes() -> None:
    world = World(pods=1)
    world.settle()
    world.bump("1.1")
    world.pods[0].transient_faults = 1
    until(world, SwapState.ABORTED)
    for _ in range(5):
        world.run_pass()
    assert len(started(world)) == 1
    assert world.condition("Ready") == ("False", "DrainTimeout")
    assert world.condition("Reconciling") == ("True", "ProgressingWithRetry")
    world.bump("1.2")
    for _ in range(5):
        world.run_pass()
    assert len(started(world)) == 2


def test_an_edit_that_changes_no_version_does_not_make_it_stable_anew() -> None:
    world = World(pods=1)
    world.settle()
    assert world.status.stable is not None
    before = world.status.stable.revision
    world.edit(rollout=Rollout(progress_deadline_seconds=300))
    world.settle()
    assert world.status.stable.revision == before
    assert world.assignment is not None
    assert world.assignment.revision > before


def test_a_swap_by_a_person_is_undone_under_a_higher_revision() -> None:
    world = World(pods=2)
    world.settle()
    revision = world.revisions[-1] + 5
    world.pods[0].live = GOOD["1.2"]
    world.pods[0].accepted = Accepted(owner_uid=world.uid, epoch=world.epoch, revision=revision)
    world.settle()
    assert world.serving() == ["1.0", "1.0"]
    assert world.revisions[-1] > revision


RANK = RankState(rank=0, boot_id="r0", alive=True, digest=digest("a"))


@pytest.mark.parametrize(
    ("ranks", "boot_id", "quarantined", "expected"),
    [
        ([RANK, RANK], "b", False, True),
        ([], "b", False, False),
        ([RANK], "", False, False),
        ([RANK], "b", True, False),
        ([RANK, RankState(rank=1, boot_id="r1", alive=True, digest="")], "b", False, False),
        ([RANK, RankState(rank=1, boot_id="r1", alive=False, digest=digest("a"))], "b", False, False),
        ([RANK, RankState(rank=1, boot_id="", alive=True, digest=digest("a"))], "b", False, False),
    ],
)
def test_a_digest_is_proved_by_every_rank_under_its_boot_id(
    ranks: list[RankState], boot_id: str, quarantined: bool, expected: bool
) -> None:
    live = VersionRef(version="1.0", uri="u", digest=digest("a"))
    state = EngineState(boot_id=boot_id, live=live, ranks=ranks, quarantined=quarantined)
    assert proved(state, digest("a")) is expected
    assert not proved(state, digest("b"))
    assert not proved(state, "")


def test_after_the_deadline_the_pods_that_moved_go_back() -> None:
    world = World(pods=3)
    world.settle()
    world.bump("1.1")
    stuck = world.pods[2]
    stuck.transient_faults = 10_000
    world.settle()
    assert world.serving() == ["1.0"] * 3
    assert world.condition("Ready") == ("False", "RolledBack")
    assert world.condition("Stalled") == ("True", "RolledBack")
    assert world.assignment is not None
    assert (world.assignment.stable, world.assignment.candidate) == (GOOD["1.0"].target, None)
    assert [f.reason for f in world.status.failures] == ["ProgressDeadlineExceeded"]
    assert [(h.version, h.result) for h in world.status.history] == [("1.1", "RolledBack"), ("1.0", "Succeeded")]
    world.kill_operator()
    count = len(started(world))
    world.settle()
    assert len(started(world)) == count  # it is not tried again for this spec
    stuck.transient_faults = 0
    world.edit(rollout=Rollout(progress_deadline_seconds=601))
    world.settle()
    assert world.serving() == ["1.1"] * 3


def test_rolling_back_is_not_called_done_while_the_budget_forbids_it() -> None:
    world = World(pods=2)
    world.settle()
    world.bump("1.1")
    until(world, SwapState.SERVING)
    world.pods[1].reachable = world.pods[1].ready = False
    long_after(world)
    assert world.serving() == ["1.1", "1.0"]
    assert world.condition("Stalled") == ("True", "ProgressDeadlineExceeded")
    assert world.status.rollout is not None
    assert world.status.rollout.state == "RollingBack"
    world.pods[1].reachable = world.pods[1].ready = True
    world.settle()
    assert world.serving() == ["1.0", "1.0"]
    assert world.condition("Stalled") == ("True", "RolledBack")
    assert [h.result for h in world.status.history] == ["RolledBack", "Succeeded"]


def test_after_the_deadline_a_first_pod_that_never_moved_is_tried_on() -> None:
    world = World(pods=2)
    world.settle()
    world.bump("1.1")
    world.pods[0].transient_faults = 10_000
    long_after(world)
    assert world.condition("Stalled") == ("True", "ProgressDeadlineExceeded")
    world.pods[0].transient_faults = 0
    world.settle()
    assert world.serving() == ["1.1", "1.1"]
    assert world.condition("Ready") == ("True", "Succeeded")


def test_a_pod_lost_after_a_finished_rollout_takes_no_other_back() -> None:
    world = World(pods=2)
    world.settle()
    world.bump("1.1")
    world.settle()
    world.pods[1].reachable = world.pods[1].ready = False
    long_after(world)
    assert world.serving() == ["1.1", "1.1"]
    assert world.status.failures == ()


def test_a_moment_without_pods_in_mid_rollout_is_not_ready() -> None:
    world = World(pods=1)
    world.settle()
    world.bump("1.1")
    for _ in range(3):
        world.run_pass()
    old = world.pods.pop()
    for _ in range(3):
        world.run_pass()
    assert world.condition("Ready") == ("Unknown", "WaitingForPods")
    world.pods.append(old)
    world.settle()
    assert world.condition("Ready") == ("True", "Succeeded")


def test_pods_that_are_leaving_are_not_none() -> None:
    world = World(pods=1)
    world.settle()
    snapshot = world.snapshot()
    leaving = replace(snapshot, pods=tuple(replace(p, terminating=True) for p in snapshot.pods))
    assert not Assessment(leaving).scaled_to_zero
    assert Assessment(replace(snapshot, pods=())).scaled_to_zero


def test_a_plan_that_cannot_be_followed_now_is_asked_for_again_and_refuses_nothing() -> None:
    world = World(pods=2)
    world.settle()
    world.bump("1.1")
    world.not_now = ErrorBody(code="InsufficientMemory", message="2 GiB short", retryable=True)
    for _ in range(10):
        world.run_pass()
        world.tick()
    assert world.condition("Ready") == ("False", "InsufficientMemory")
    assert world.condition("Reconciling") == ("True", "ProgressingWithRetry")
    assert (world.status.failures, started(world)) == ((), [])
    world.not_now = None
    world.settle()
    assert world.serving() == ["1.1", "1.1"]


def test_a_quarantined_pod_that_was_never_ready_is_not_counted_by_the_next_process() -> None:
    world = World(pods=1)
    world.settle()
    world.add_pod(GOOD["1.0"], ready=False).quarantined = True
    for _ in range(2):
        world.run_pass()
        world.kill_operator()
    counts = world.status.pod_counts
    assert counts is not None
    assert (counts.counted, counts.excluded) == (1, 1)


def test_a_call_that_fails_does_not_make_the_attempt_before_it_count_again() -> None:
    assert covers("r3-a1-0123456789abcdef", "r3-a0-0123456789abcdef")
    assert covers("r3-a1-0123456789abcdef", "r3-a1-0123456789abcdef")
    assert not covers("r3-a0-0123456789abcdef", "r3-a1-0123456789abcdef")
    assert not covers("r2-a1-0123456789abcdef", "r3-a0-0123456789abcdef")
    assert not covers("r3-a1-0123456789abcdef", "r3-a0-fedcba9876543210")
    assert not covers("by-hand", "r3-a0-0123456789abcdef")
    assert covers("by-hand", "by-hand")
