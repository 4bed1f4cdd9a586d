"""How a version spreads over pods: one first, then as many at once as may be, and what cuts it short. In no time."""

from datetime import timedelta

import pytest

from modelswap_engine.protocol.policy import PromptCheck
from modelswap_engine.protocol.states import SwapState
from modelswap_operator.api.modelversion import ChecksSpec, PromptSpec
from modelswap_operator.planning.actions import AskPlans, CancelSwaps, StartSwaps, Wait, WriteAssignment
from modelswap_operator.planning.modelversion import POLL_SECONDS, rest
from modelswap_operator.planning.rollout import allowed
from tests.support.sim_pod import GOOD, digest
from tests.support.slot_steps import started, until
from tests.support.slot_world import World


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


def test_pods_follow_in_waves_that_double_however_many_may_be_unavailable() -> None:
    world = World(pods=8, max_unavailable="100%")
    world.settle()
    world.bump("1.1")
    world.settle()
    assert [len(names) for names in started(world)] == [1, 2, 4, 1]
    world.bump("1.2")
    until(world, SwapState.SERVING)
    while world.serving().count("1.2") < 7:
        if isinstance(world.run_pass(), Wait):
            world.tick()
    before = len(started(world))
    world.bump("1.1")  # what every pod served last needs no caution
    world.settle()
    assert max(len(names) for names in started(world)[before:]) >= 7
    assert world.serving() == ["1.1"] * 8


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
    (shown,) = world.status.plan
    assert (shown.from_digest, shown.changed_tensors, shown.changed_bytes, shown.mode) == (digest("a"), 3, 300, "Diff")
    assert (shown.groups, shown.bytes_to_fetch, shown.memory_needed_bytes) == (2, 250, 300)
    assert shown.refusals == ()
    world.edit(suspend=False)
    world.settle()
    assert world.serving() == ["1.1", "1.1"]
    assert world.condition("Suspended") is None


@pytest.mark.parametrize(
    ("value", "pods", "expected"),
    [(1, 10, 1), (3, 10, 3), ("25%", 10, 2), ("25%", 3, 1), ("100%", 4, 4), ("1%", 50, 1), (1, 0, 1)],
)
def test_max_unavailable_rounds_down_but_lets_one_through(value: int | str, pods: int, expected: int) -> None:
    assert allowed(value, pods) == expected


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


def test_prompts_are_tried_on_the_way_to_the_target_and_not_on_the_way_back() -> None:
    checks = ChecksSpec(prompts=(PromptSpec(prompt="Hello", max_logprob_delta="0.05"), PromptSpec(prompt="Hi")))
    world = World(pods=3)
    world.settle()
    world.bump("1.1", checks=checks)
    world.pods[1].refuses.add("1.1")
    world.settle()
    requests = [order.request for action in world.actions(StartSwaps) for order in action.orders]
    tried = {version: [r.checks.prompts for r in requests if r.target.version == version] for version in ("1.1", "1.0")}
    wanted = [PromptCheck(prompt="Hello", max_logprob_delta=0.05), PromptCheck(prompt="Hi")]
    assert tried == {"1.1": [wanted, wanted], "1.0": [[]]}


def test_a_pod_lost_while_it_reads_the_source_is_not_waited_for() -> None:
    world = World(pods=3)
    world.settle()
    world.pods[0].goes_silent = True  # it was asked, and then its node was gone
    world.bump("1.1")
    for _ in range(40):
        world.run_pass()
        world.tick()
    assert [order.pod.name for asked in world.actions(AskPlans) for order in asked.orders][-2:] == ["pod-1", "pod-2"]
    assert world.serving() == ["1.0", "1.1", "1.1"]


def test_a_source_that_does_not_answer_is_named_with_the_pod_that_reads_it() -> None:
    world = World(pods=2)
    world.settle()
    world.hanging.add(GOOD["1.1"].uri)
    world.bump("1.1")
    for _ in range(5):
        world.run_pass()
        world.tick()
    assert len(world.actions(AskPlans)[-1].orders) == 1
    assert message_of(world, "Ready") == "0/2 pods serve 1.1; pod pod-1 is reading file:///models/1.1"
    world.now += timedelta(seconds=601)
    world.run_pass()
    assert message_of(world, "Stalled") == (
        "no progress for 600 s: 0/2 pods serve 1.1; pod pod-1 is reading file:///models/1.1"
    )


def message_of(world: World, kind: str) -> str:
    return next(c.message for c in world.status.conditions if c.type == kind)
