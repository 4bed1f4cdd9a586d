"""The canary: named pods serve a version for a while, and their answers decide what follows. In no time."""

from datetime import timedelta

import pytest

from modelswap_operator.api.modelversion import Canary, OnFailure
from modelswap_operator.planning.actions import StartSwaps, Wait, WriteAssignment
from modelswap_operator.planning.canary import RESTARTS
from tests.support.sim_pod import GOOD, SimPod
from tests.support.slot_steps import started
from tests.support.slot_world import World


def soaking(*, pods: int = 4, on_failure: OnFailure = OnFailure.ROLLBACK, **canary: int) -> World:
    """A slot whose canary pods have just come to 1.1."""
    world = World(pods=pods, max_unavailable=2, on_failure=on_failure, canary=Canary(**({"pods": 2} | canary)))
    world.settle()
    world.bump("1.1")
    for _ in range(60):
        if isinstance(world.run_pass(), Wait):
            if world.serving().count("1.1") == world.spec.rollout.canary.pods:
                break
            world.tick()
    return world


def wait(world: World, seconds: float) -> None:
    """Let time go by, with passes when the operator wants them."""
    ends = world.now + timedelta(seconds=seconds)
    while world.now < ends:
        action = world.run_pass()
        if isinstance(action, Wait):
            world.tick()
            world.now = min(ends, max(world.now, action.until or ends))
    world.run_pass()


def canary_pods(world: World) -> list[SimPod]:
    return [p for p in world.pods if p.live == GOOD["1.1"]]


def ready_message(world: World) -> str:
    return next(c.message for c in world.status.conditions if c.type == "Ready")


def test_named_pods_go_first_and_the_others_follow_when_the_soak_is_over() -> None:
    world = soaking(soak_seconds=30)
    wait(world, 29)
    assert world.serving() == ["1.1", "1.1", "1.0", "1.0"]
    assert world.assignment is not None
    assert world.assignment.stable == GOOD["1.0"].target
    assert world.assignment.candidate is not None
    assert world.assignment.candidate.pod_uids == ["uid-1", "uid-2"]
    assert world.condition("Reconciling") == ("True", "Soaking")
    assert world.status.rollout is not None
    assert (world.status.rollout.state, len(world.status.rollout.soak)) == ("Soaking", 2)
    assert "canary pods pod-1, pod-2 soak until" in ready_message(world)
    writes = world.status_writes
    wait(world, 0.5)
    assert world.status_writes == writes, "a soak is written once, not with every look"
    world.settle()
    assert world.serving() == ["1.1"] * 4
    assert world.condition("Ready") == ("True", "Succeeded")
    promoted = world.actions(WriteAssignment)[-1]
    assert promoted.assignment.stable == GOOD["1.1"].target
    assert "canary pods pod-1, pod-2 served 1.1 for 30 s, 0 requests answered" in promoted.why
    assert world.status.rollout is not None
    assert world.status.rollout.soak == ()


def test_a_new_operator_counts_on_where_the_one_before_it_stopped() -> None:
    world = soaking(soak_seconds=60, min_requests=4)
    wait(world, 40)
    for pod in canary_pods(world):
        pod.answer(ok=2)
    world.kill_operator()
    wait(world, 19)
    assert len(canary_pods(world)) == 2
    wait(world, 2)
    world.settle()
    assert world.serving() == ["1.1"] * 4


def test_too_few_requests_are_waited_for_until_the_deadline_and_the_message_says_so() -> None:
    world = soaking(soak_seconds=30, min_requests=100)
    for pod in canary_pods(world):
        pod.answer(ok=22)
    wait(world, 31)
    assert "have soaked and wait for requests: 40 of 100 answered" in ready_message(world)
    wait(world, 560)
    assert len(canary_pods(world)) == 2
    assert world.condition("Stalled") is None  # the soak does not count against the deadline
    wait(world, 60)
    world.settle()
    assert world.serving() == ["1.0"] * 4
    assert world.condition("Stalled") == ("True", "RolledBack")
    assert [f.reason for f in world.status.failures] == ["ProgressDeadlineExceeded"]
    assert "40 of 100 answered" in world.status.failures[0].message


def test_with_halt_a_canary_without_requests_stalls_and_goes_on_when_they_come() -> None:
    world = soaking(soak_seconds=10, min_requests=3, on_failure=OnFailure.HALT)
    wait(world, 700)
    assert world.condition("Stalled") == ("True", "ProgressDeadlineExceeded")
    assert "wait for requests: 0 of 3 answered" in ready_message(world)
    canary_pods(world)[0].answer(ok=3)
    world.settle()
    assert world.serving() == ["1.1"] * 4
    assert world.condition("Ready") == ("True", "Succeeded")


def test_too_many_errors_fail_the_version_and_it_goes_back() -> None:
    world = soaking(max_error_percent=10)
    canary_pods(world)[0].answer(ok=8, failed=1)
    world.settle()
    assert world.serving() == ["1.0"] * 4
    assert world.condition("Stalled") == ("True", "RolledBack")
    failure = world.status.failures[0]
    assert failure.reason == "CanaryFailed"
    assert "1 of 9 requests failed on canary pods pod-1, pod-2" in failure.message
    assert {name for names in started(world) for name in names} == {"pod-1", "pod-2"}
    world.kill_operator()
    world.settle()
    assert world.serving() == ["1.0"] * 4


def test_halt_leaves_a_failed_canary_where_it_is_but_nobody_starts_on_it() -> None:
    world = soaking(max_error_percent=10, on_failure=OnFailure.HALT)
    canary_pods(world)[0].answer(failed=1)
    world.settle()
    assert world.serving() == ["1.1", "1.1", "1.0", "1.0"]
    assert world.condition("Stalled") == ("True", "CanaryFailed")
    assert world.assignment is not None
    assert (world.assignment.stable, world.assignment.candidate) == (GOOD["1.0"].target, None)


def test_errors_are_judged_against_the_requests_that_there_are_to_be() -> None:
    world = soaking(soak_seconds=30, max_error_percent=10, min_requests=20)
    canary_pods(world)[0].answer(ok=1, failed=2)  # 2 of 20 at worst
    wait(world, 31)
    assert world.condition("Stalled") is None
    canary_pods(world)[1].answer(ok=17)
    world.settle()
    assert world.serving() == ["1.1"] * 4


def test_what_a_pod_answered_before_is_not_the_canarys() -> None:
    world = World(pods=2, canary=Canary(pods=1, soak_seconds=5))
    world.settle()
    world.pods[0].answers = {GOOD["1.1"].digest: (3, 7)}
    world.pods[0].answer(failed=5)  # by 1.0
    world.bump("1.1")
    world.settle()
    assert world.serving() == ["1.1", "1.1"]


def test_a_restarted_engine_soaks_anew_from_its_own_counts() -> None:
    world = soaking(soak_seconds=60, max_error_percent=50)
    wait(world, 50)
    first = canary_pods(world)[0]
    first.answer(ok=10)
    first.restart()
    wait(world, 30)
    assert len(canary_pods(world)) == 2
    assert world.status.rollout is not None
    assert [row.restarts for row in world.status.rollout.soak if row.uid == first.uid] == [1]
    world.settle()
    assert world.serving() == ["1.1"] * 4


def test_a_canary_that_keeps_restarting_has_failed() -> None:
    world = soaking(soak_seconds=60)
    first = canary_pods(world)[0]
    for _ in range(RESTARTS):
        first.restart()
        wait(world, 20)
    world.settle()
    assert world.serving() == ["1.0"] * 4
    assert "the engine of canary pod pod-1 was started again 3 times" in world.status.failures[0].message


def test_a_canary_pod_that_is_gone_is_replaced_and_one_that_is_silent_is_waited_for() -> None:
    world = soaking(soak_seconds=30)
    first, second = canary_pods(world)
    second.reachable = False
    wait(world, 120)
    assert world.assignment is not None
    assert world.assignment.candidate is not None
    assert world.assignment.candidate.pod_uids == [first.uid, second.uid]
    second.reachable = True
    world.pods.remove(first)
    wait(world, 5)
    assert world.assignment.candidate is not None
    assert world.assignment.candidate.pod_uids == [second.uid, "uid-3"]
    world.settle()
    assert world.serving() == ["1.1"] * 3


def test_a_slot_smaller_than_its_canary_soaks_on_all_of_it() -> None:
    world = soaking(pods=2, soak_seconds=30)
    wait(world, 20)
    assert world.assignment is not None
    assert world.assignment.stable == GOOD["1.0"].target
    world.settle()
    assert world.serving() == ["1.1", "1.1"]


def test_going_back_to_what_every_pod_served_last_waits_for_no_canary() -> None:
    world = soaking(soak_seconds=30)
    wait(world, 31)
    assert world.assignment is not None
    assert world.assignment.stable == GOOD["1.1"].target
    world.bump("1.0")
    began = world.now
    while world.serving() != ["1.0"] * 4:
        if isinstance(world.run_pass(), Wait):
            world.tick()
    assert world.now - began < timedelta(seconds=30)


@pytest.mark.parametrize("min_requests", [0, 1])
def test_a_sidecar_that_cannot_count_shows_nothing_and_is_named(min_requests: int) -> None:
    world = World(pods=2, canary=Canary(pods=1, soak_seconds=5, min_requests=min_requests))
    for pod in world.pods:
        pod.answers = None
    world.settle()
    world.bump("1.1")
    wait(world, 60)
    assert world.serving() == ["1.1", "1.0"]  # its errors cannot be seen either
    assert "the sidecar of pod pod-1 is too old to count requests" in ready_message(world)


def test_a_newer_spec_supersedes_a_canary_and_soaks_from_the_beginning() -> None:
    world = soaking(soak_seconds=30)
    wait(world, 25)
    world.bump("1.2")
    for _ in range(200):
        if isinstance(world.run_pass(), Wait):
            world.tick()
        if world.serving().count("1.2") == 2:
            break
    wait(world, 20)
    assert world.serving() == ["1.2", "1.2", "1.0", "1.0"]
    world.settle()
    assert world.serving() == ["1.2"] * 4


def test_suspended_in_its_canary_a_slot_stays_as_it_is() -> None:
    world = soaking(soak_seconds=30)
    world.edit(suspend=True)
    before = len(world.log)
    wait(world, 120)
    assert not [a for a in world.log[before:] if isinstance(a, StartSwaps | WriteAssignment)]
    world.edit(suspend=False)
    world.settle()
    assert world.serving() == ["1.1"] * 4


@pytest.mark.parametrize("pods", [1, 3])
def test_the_canary_keeps_to_max_unavailable(pods: int) -> None:
    world = World(pods=4, max_unavailable=1, canary=Canary(pods=pods, soak_seconds=5))
    world.settle()
    world.bump("1.1")
    world.settle()
    assert all(len(names) == 1 for names in started(world))
    assert world.serving() == ["1.1"] * 4


def test_a_canary_that_no_client_reaches_has_not_soaked() -> None:
    world = soaking(soak_seconds=30)
    first = canary_pods(world)[0]
    first.ready = False
    wait(world, 60)
    assert world.serving().count("1.1") == 2
    first.ready = True
    world.settle()
    assert world.serving() == ["1.1"] * 4


def test_a_pod_that_was_down_before_is_no_part_of_a_canary_of_all() -> None:
    world = World(pods=2, canary=Canary(pods=2, soak_seconds=30), max_unavailable=2)
    world.settle()
    world.pods[1].quarantined, world.pods[1].ready = True, False
    world.bump("1.1")
    wait(world, 60)
    assert world.pods[0].live == GOOD["1.1"]
    assert world.assignment is not None
    assert world.assignment.stable == GOOD["1.1"].target
