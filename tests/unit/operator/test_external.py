"""Weights that a trainer changes: the operator brings each pod to its version once, reports, and puts nothing right."""

from modelswap_engine.protocol.assignment import WeightsPolicy
from modelswap_engine.protocol.errors import ErrorBody
from modelswap_engine.protocol.messages import SwapStatus, VersionRef
from modelswap_engine.protocol.states import SwapState
from modelswap_operator.planning.actions import CancelSwaps, WriteAssignment
from tests.support.sim_pod import digest
from tests.support.slot_steps import started
from tests.support.slot_world import World


def external(pods: int = 2) -> World:
    """A slot at rest whose pods a trainer may change."""
    world = World(pods=pods)
    world.edit(weights=WeightsPolicy.EXTERNAL)
    world.settle()
    assert world.assignment is not None
    assert world.assignment.weights is WeightsPolicy.EXTERNAL
    return world


def test_what_a_trainer_makes_of_it_is_reported_and_left_alone() -> None:
    world = external()
    before = len(started(world))
    world.pods[0].train("e")
    world.settle()
    world.pods[0].train("f")
    world.settle()
    assert len(started(world)) == before
    assert world.serving() == ["1.0+e+f", "1.0"]
    assert world.condition("Ready") == ("True", "Succeeded")
    ready = next(c for c in world.status.conditions if c.type == "Ready")
    assert "1 of them as a trainer changed it" in ready.message
    assert {(v.version, v.digest) for v in world.status.versions} == {("1.0+e+f", digest("f")), ("1.0", digest("a"))}
    row = next(p for p in world.status.pods if p.name == "pod-1")
    assert (row.digest, row.state) == (digest("f"), "Serving")
    assert "a trainer's change of 1.0" in row.message


def test_a_managed_slot_puts_the_same_right() -> None:
    world = World(pods=1)
    world.settle()
    world.pods[0].train("e")
    world.settle()
    assert world.serving() == ["1.0"]


def test_pods_are_told_once_that_this_is_where_they_begin() -> None:
    world = external(pods=3)
    # Nothing moves, but each pod has heard the decision: what it serves from now on is a trainer's.
    assert sorted(name for names in started(world) for name in names) == ["pod-1", "pod-2", "pod-3"]
    assert all(p.accepted is not None and p.accepted.done for p in world.pods)


def test_other_edits_do_not_undo_the_training() -> None:
    world = external()
    world.pods[0].train("e")
    before = len(started(world))
    world.edit(revision_history_limit=3)
    world.settle()
    world.kill_operator()
    world.settle()
    assert world.serving() == ["1.0+e", "1.0"]
    assert len(started(world)) == before


def test_a_new_version_is_rolled_out_over_it() -> None:
    world = external()
    world.pods[0].train("e")
    world.settle()
    world.bump("1.1")
    world.settle()
    assert world.serving() == ["1.1", "1.1"]
    assert world.condition("Ready") == ("True", "Succeeded")
    world.pods[1].train("f")
    world.settle()
    assert world.serving() == ["1.1", "1.1+f"]


def test_a_restarted_pod_begins_with_the_version_of_the_object() -> None:
    world = external()
    world.pods[0].train("e")
    world.settle()
    world.pods[0].restart()
    world.settle()
    assert world.serving() == ["1.0", "1.0"]
    world.pods[0].train("f")
    world.settle()
    assert world.serving() == ["1.0+f", "1.0"]


def test_back_to_managed_puts_all_right() -> None:
    world = external()
    for pod in world.pods:
        pod.train("e")
    world.edit(weights=WeightsPolicy.MANAGED)
    world.settle()
    assert world.serving() == ["1.0", "1.0"]
    assert world.assignment is not None
    assert world.assignment.weights is WeightsPolicy.MANAGED


def test_a_swap_that_failed_is_not_taken_for_a_trainers_change() -> None:
    world = external(pods=1)
    world.pods[0].train("e")
    world.pods[0].transient_faults = 1
    world.bump("1.1")
    world.settle()
    assert world.serving() == ["1.1"]


def test_a_trainers_own_operations_are_not_the_operators_to_cancel_or_to_judge() -> None:
    world = external(pods=1)
    pod = world.pods[0]
    target = VersionRef(version="1.0+e", digest=digest("e"))
    pod._show(SwapStatus(operation_id="trainer-1", state=SwapState.STAGED, target=target))
    world.run_pass()
    assert world.actions(CancelSwaps) == []
    error = ErrorBody(code="ChecksFailed", message="not finite")
    pod._show(SwapStatus(operation_id="trainer-1", state=SwapState.ABORTED, target=target, error=error))
    world.settle()
    assert world.status.failures == ()
    assert world.condition("Ready") == ("True", "Succeeded")


def test_what_was_sent_to_one_pod_becomes_nobody_elses_version() -> None:
    world = World(pods=2, serving="1.1", version="1.0")
    for pod in world.pods:
        pod.train("e")
    world.pods[0].live = pod.live
    world.run_pass()
    for action in world.actions(WriteAssignment):
        assert action.assignment.stable is None or not action.assignment.stable.uri.startswith("received:")
