"""What becomes of a rollout that comes no further: how long it is waited for, and what happens then."""

from datetime import timedelta

from modelswap_engine.protocol.states import SwapState
from modelswap_operator.api.modelversion import OnFailure, Rollout
from modelswap_operator.planning.actions import Wait
from tests.support.sim_pod import GOOD
from tests.support.slot_steps import long_after, started, until
from tests.support.slot_world import World


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


def test_a_request_makes_a_waiting_try_due_once() -> None:
    world = World(pods=1)
    world.settle()
    world.pods[0].transient_faults = 2
    world.bump("1.1")
    while world.pods[0].transient_faults == 2:
        if isinstance(world.run_pass(), Wait):
            world.tick()
    while not isinstance(world.run_pass(), Wait):
        pass
    assert len(started(world)) == 1
    world.requested_at = "now, please"
    world.run_pass()
    assert len(started(world)) == 2
    assert world.status.last_handled_request_at == "now, please"
    while world.pods[0].transient_faults == 1:
        if isinstance(world.run_pass(), Wait):
            world.tick()
    while not isinstance(world.run_pass(), Wait):
        pass
    assert len(started(world)) == 2
    world.requested_at = ""  # whoever owns the object has put it in order
    world.run_pass()
    assert len(started(world)) == 2
    assert world.status.last_handled_request_at == "now, please"
