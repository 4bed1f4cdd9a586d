"""A slot without pods: nothing serves and nothing is wrong; what is decided meanwhile, and what new pods show."""

from datetime import timedelta

import pytest

from modelswap_engine.protocol.errors import ErrorBody
from modelswap_operator.api.modelversion import Canary, OnFailure, Rollout
from modelswap_operator.planning.changes import ChangePolicy
from tests.support.sim_pod import BAD, GOOD, SimPod
from tests.support.slot_steps import named_first, started
from tests.support.slot_world import World

ZERO = ("True", "ScaledToZero")


def at_zero(*, pinned: bool = True, on_failure: OnFailure = OnFailure.ROLLBACK) -> World:
    world = World(pods=2, pinned=pinned, on_failure=on_failure)
    world.settle()
    world.pods.clear()
    world.settle()
    assert world.condition("Ready") == ZERO
    return world


def stable(world: World) -> str:
    assert world.assignment is not None
    assert world.assignment.stable is not None
    return world.assignment.stable.version


def message(world: World) -> str:
    return next(c.message for c in world.status.conditions if c.type == "Ready")


def starting(world: World) -> SimPod:
    """Add a pod that has yet to load what it is assigned."""
    pod = world.add_pod(ready=False)
    pod.live, pod.ever_ready = None, False
    return pod


def test_a_pinned_version_is_what_pods_start_on() -> None:
    world = at_zero()
    world.bump("1.1")
    world.settle()
    assert world.condition("Ready") == ZERO
    assert world.condition("Reconciling") is None
    assert world.status.observed_generation == world.generation
    assert stable(world) == "1.1"
    assert "those that come start on 1.1" in message(world)
    swaps = started(world)
    world.add_pod()
    world.settle()
    assert (world.serving(), world.condition("Ready")) == (["1.1"], ("True", "Succeeded"))
    assert started(world) == swaps


def test_a_version_whose_content_nobody_knows_is_read_by_the_first_pod() -> None:
    world = at_zero(pinned=False)
    world.bump("1.1")
    world.settle()
    assert world.condition("Ready") == ZERO
    assert world.status.observed_generation == world.generation
    assert stable(world) == "1.0"
    assert "start on 1.0 and are taken to 1.1" in message(world)
    world.add_pod()
    world.settle()
    assert (world.serving(), world.condition("Ready")) == (["1.1"], ("True", "Succeeded"))


def test_nothing_is_stalled_however_long_it_lasts_and_whoever_operates() -> None:
    for pinned in (True, False):
        world = at_zero(pinned=pinned)
        world.bump("1.1")
        world.settle()
        writes = world.status_writes
        for _ in range(3):
            world.kill_operator()
            world.now += timedelta(seconds=700)
            world.settle()
            assert world.condition("Ready") == ZERO
        assert world.status_writes == writes


@pytest.mark.parametrize("on_failure", list(OnFailure))
@pytest.mark.parametrize("version", sorted(BAD))
def test_a_bad_version_shows_when_a_pod_comes_and_pods_get_the_last_good_one(
    version: str, on_failure: OnFailure
) -> None:
    world = at_zero(on_failure=on_failure)
    world.bump(version)
    world.settle()
    assert stable(world) == version
    starting(world)
    world.settle()
    assert world.serving() == ["1.0"]
    assert world.condition("Stalled") is not None
    assert world.status.failures[0].digest == BAD[version].digest
    assert "refused by pod" in world.status.failures[0].message
    world.bump("1.1")
    world.settle()
    assert world.serving() == ["1.1"]


def test_what_may_heal_is_waited_for_until_the_deadline_then_pods_get_the_last_good_one() -> None:
    world = at_zero()
    world.bump("1.1")
    world.settle()
    pod = starting(world)
    pod.refuses.add("1.1")
    for _ in range(5):
        world.run_pass()
        world.tick()
        assert pod.load_failure is not None
        pod.load_failure = type(pod.load_failure)(
            target=pod.load_failure.target, error=ErrorBody(code="SourceUnreadable", message="503", retryable=True)
        )
    world.run_pass()
    assert (world.condition("Ready"), stable(world)) == (("Unknown", "WaitingForPods"), "1.1")
    assert f"pod {pod.name} cannot load 1.1: 503" in message(world)
    world.now += timedelta(seconds=700)
    world.settle()
    assert (world.serving(), stable(world)) == (["1.0"], "1.0")
    assert world.condition("Stalled") == ("True", "RolledBack")


def test_an_older_sidecar_that_cannot_load_it_is_waited_for_until_the_deadline() -> None:
    world = at_zero()
    world.bump("2.1")
    world.settle()
    pod = starting(world)
    for _ in range(5):
        world.run_pass()
        world.tick()
        pod.load_failure = None  # which it does not tell
    assert (pod.reason, stable(world)) == ("LoadFailed", "2.1")
    world.now += timedelta(seconds=700)
    world.settle()
    assert (world.serving(), world.condition("Stalled")) == (["1.0"], ("True", "RolledBack"))


def test_pods_that_are_not_scheduled_say_nothing_about_the_version() -> None:
    world = at_zero()
    world.bump("1.1")
    world.settle()
    starting(world).reachable = False
    world.run_pass()
    world.now += timedelta(seconds=700)
    world.run_pass()
    assert (world.condition("Stalled"), stable(world)) == (("True", "ProgressDeadlineExceeded"), "1.1")
    assert "1 starting" in message(world)
    world.pods[0].reachable = True
    world.pods[0].load(world.assignment)
    world.settle()
    assert (world.serving(), world.condition("Ready")) == (["1.1"], ("True", "Succeeded"))


def test_a_canary_still_decides_first() -> None:
    world = at_zero()
    world.edit(rollout=Rollout(canary=Canary(pods=1, soak_seconds=60)))
    world.bump("1.1")
    world.settle()
    assert (world.condition("Ready"), stable(world)) == (ZERO, "1.0")
    for _ in range(2):
        world.add_pod()
    assert len(named_first(world)) == 1
    world.settle()
    assert (world.serving(), world.condition("Ready")) == (["1.1", "1.1"], ("True", "Succeeded"))


def test_a_freeze_and_a_suspension_still_hold_it_back() -> None:
    world = at_zero()
    world.policy = ChangePolicy(frozen=True)
    world.bump("1.1")
    world.settle()
    assert (world.condition("Ready"), stable(world)) == (("Unknown", "ChangesFrozen"), "1.0")
    world.policy = ChangePolicy()
    world.edit(suspend=True)
    world.settle()
    assert (world.condition("Ready"), stable(world)) == (("Unknown", "Suspended"), "1.0")
    world.edit(suspend=False)
    world.settle()
    assert (world.condition("Ready"), stable(world)) == (ZERO, "1.1")


def test_scaled_to_zero_in_the_middle_of_a_rollout_is_at_rest_after_a_while() -> None:
    world = World(pods=2, pinned=True)
    world.settle()
    world.bump("1.1")
    named_first(world)
    world.pods.clear()
    world.run_pass()
    assert world.condition("Ready") == ("Unknown", "WaitingForPods")  # a pod may be on its way
    world.settle()
    assert (world.condition("Ready"), stable(world)) == (ZERO, "1.1")


def test_a_slot_that_never_had_a_pod_is_not_taken_for_one_that_was_scaled_to_zero() -> None:
    world = World(pods=0, pinned=True)
    world.run_pass()
    assert world.condition("Ready") == ("Unknown", "WaitingForPods")
    world.now += timedelta(seconds=700)
    world.run_pass()
    assert world.condition("Stalled") == ("True", "ProgressDeadlineExceeded")
    assert "no pod has the label modelswap.dev/slot: slot" in message(world)


def test_going_back_at_zero_is_no_failure() -> None:
    world = at_zero()
    for version in ("1.1", "1.0"):
        world.bump(version)
        world.settle()
        assert (world.condition("Ready"), stable(world)) == (ZERO, version)
    world.add_pod(GOOD["1.0"])
    world.settle()
    assert world.condition("Ready") == ("True", "Succeeded")
