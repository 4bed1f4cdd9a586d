"""A slot without pods: nothing serves and nothing is wrong; what is decided meanwhile, and what new pods show."""

from datetime import timedelta

import msgspec
import pytest

from modelswap_operator.api.modelversion import Canary, OnFailure, Rollout
from modelswap_operator.planning.changes import ChangePolicy
from tests.support.sim_pod import BAD, GOOD, SimPod
from tests.support.slot_steps import named_first
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


@pytest.mark.parametrize("pinned", [True, False])
def test_pods_that_come_start_on_what_was_proved_and_the_first_one_reads_the_new_version(pinned: bool) -> None:
    world = at_zero(pinned=pinned)
    world.bump("1.1")
    world.settle()
    assert world.condition("Ready") == ZERO
    assert world.condition("Reconciling") is None
    assert world.status.observed_generation == world.generation
    assert stable(world) == "1.0"
    assert "those that come start on 1.0 from " in message(world)
    assert "and are taken to 1.1 from there" in message(world)
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
def test_a_bad_version_shows_when_a_pod_comes_and_the_last_good_one_serves(version: str, on_failure: OnFailure) -> None:
    world = at_zero(on_failure=on_failure)
    world.bump(version)
    world.settle()
    world.bump("2.0")  # however many nobody read
    world.bump(version)
    world.settle()
    assert (world.condition("Ready"), stable(world)) == (ZERO, "1.0")
    world.add_pod()
    world.settle()
    assert world.serving() == ["1.0"]
    assert world.condition("Stalled") is not None
    assert world.status.failures[0].digest == BAD[version].digest
    world.bump("1.1")
    world.settle()
    assert world.serving() == ["1.1"]


def test_why_a_pod_does_not_come_up_is_said() -> None:
    world = at_zero()
    world.bump("1.1")
    world.settle()
    pod = starting(world)
    assert world.assignment is not None
    pod.refuses.add("1.0")
    pod.load(world.assignment)
    world.run_pass()
    assert world.condition("Ready") == ("Unknown", "WaitingForPods")
    assert f"pod {pod.name} cannot load 1.0: another engine version here" in message(world)


def test_a_version_that_is_changed_as_the_last_pod_goes_is_not_at_rest_yet() -> None:
    world = World(pods=2, pinned=True)
    world.settle()
    world.pods.clear()
    world.run_pass()
    assert world.condition("Ready") == ZERO
    world.bump("1.1")
    world.run_pass()
    assert world.condition("Ready") == ("Unknown", "WaitingForPods")
    world.settle()
    assert world.condition("Ready") == ZERO


def test_another_place_of_the_same_content_is_not_said_to_be_assigned() -> None:
    world = at_zero()
    source = msgspec.structs.replace(world.spec.source, uri="s3://elsewhere/1.0")
    world.spec = msgspec.structs.replace(world.spec, source=source)
    world.generation += 1
    world.settle()
    assert world.condition("Ready") == ZERO
    assert f"start on 1.0 from {GOOD['1.0'].uri} and" in message(world)


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
    assert (world.condition("Ready"), stable(world)) == (ZERO, "1.0")


def test_scaled_to_zero_in_the_middle_of_a_rollout_is_at_rest_after_a_while() -> None:
    world = World(pods=2, pinned=True)
    world.settle()
    world.bump("1.1")
    named_first(world)
    world.pods.clear()
    world.run_pass()
    assert world.condition("Ready") == ("Unknown", "WaitingForPods")  # a pod may be on its way
    world.settle()
    assert (world.condition("Ready"), stable(world)) == (ZERO, "1.0")


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
        assert (world.condition("Ready"), stable(world)) == (ZERO, "1.0")
    world.add_pod(GOOD["1.0"])
    world.settle()
    assert world.condition("Ready") == ("True", "Succeeded")
