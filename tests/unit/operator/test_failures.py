"""What becomes of a version that a pod refuses, and of an attempt that fails: withdrawn, taken back, or tried again."""

from modelswap_engine.protocol.errors import ErrorBody
from modelswap_engine.protocol.states import SwapState
from modelswap_operator.api.modelversion import OnFailure, Rollout
from modelswap_operator.planning.actions import StartSwaps, Wait, WriteAssignment
from modelswap_operator.planning.operations import covers
from tests.support.sim_pod import GOOD, digest
from tests.support.slot_steps import named_first, started, until
from tests.support.slot_world import World


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
    assert [plan.refusals for plan in world.status.plan] == [("DigestMismatch: other content",)]
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
    named_first(world)
    world.pods.pop(0)
    world.settle()
    assert world.serving() == ["1.1"]


def test_a_first_pod_that_restarts_into_a_version_it_cannot_load_gets_the_stable_one_back() -> None:
    world = World(pods=2)
    world.settle()
    world.bump("2.1")
    named_first(world)
    world.pods[0].restart()
    world.pods[0].memory.clear()  # the journal's volume was lost with it
    world.settle()
    assert world.serving() == ["1.0", "1.0"]
    assert world.condition("Stalled") == ("True", "LoadFailed")


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


def test_a_call_that_fails_does_not_make_the_attempt_before_it_count_again() -> None:
    assert covers("r3-a1-0123456789abcdef", "r3-a0-0123456789abcdef")
    assert covers("r3-a1-0123456789abcdef", "r3-a1-0123456789abcdef")
    assert not covers("r3-a0-0123456789abcdef", "r3-a1-0123456789abcdef")
    assert not covers("r2-a1-0123456789abcdef", "r3-a0-0123456789abcdef")
    assert not covers("r3-a1-0123456789abcdef", "r3-a0-fedcba9876543210")
    assert not covers("by-hand", "r3-a0-0123456789abcdef")
    assert covers("by-hand", "by-hand")
