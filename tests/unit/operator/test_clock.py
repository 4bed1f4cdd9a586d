"""Clocks that are set, or were wrong: soaks, deadlines and windows keep their length and their place in the day."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from modelswap_operator.api.modelversion import Canary
from modelswap_operator.planning.changes import parse
from modelswap_operator.runtime.clock import SteadyClock
from tests.support.slot_world import World

HOUR = timedelta(hours=1)
MONDAY = datetime(2026, 11, 30, tzinfo=UTC)


@pytest.mark.parametrize("step", [HOUR, -HOUR])
def test_the_operators_time_goes_on_when_the_system_clock_is_set(step: timedelta) -> None:
    system, seconds = [MONDAY], [5.0]
    clock = SteadyClock(system=lambda: system[0], monotonic=lambda: seconds[0])
    assert (clock.now(), clock.ahead()) == (MONDAY, timedelta())
    seconds[0] += 10
    system[0] += timedelta(seconds=10) + step
    assert (clock.now(), clock.ahead()) == (MONDAY + timedelta(seconds=10), step)


@pytest.mark.parametrize("ahead", [HOUR, -HOUR])
def test_a_window_opens_by_the_system_clock_and_is_waited_for_by_the_operators(ahead: timedelta) -> None:
    policy = replace(parse({"windows": "Mon 09:00-10:00 UTC"}), ahead=ahead)
    assert policy.hold(MONDAY + timedelta(hours=9, minutes=30) - ahead) is None
    held = policy.hold(MONDAY + timedelta(hours=8) - ahead)
    assert held is not None
    assert held.until == MONDAY + timedelta(hours=9) - ahead
    assert held.message == "outside of the change windows until 2026-11-30T09:00:00Z"


def test_a_soak_that_began_in_the_future_begins_again() -> None:
    world = World(pods=2, canary=Canary(pods=1, soak_seconds=30))
    world.settle()
    world.now += HOUR  # this operator's clock is wrong
    world.bump("1.1")
    while world.condition("Reconciling") != ("True", "Soaking"):
        world.run_pass()
        world.tick()
    world.now -= HOUR
    world.kill_operator()
    world.run_pass()
    assert world.status.rollout is not None
    (row,) = world.status.rollout.soak
    assert row.restarts == 0, "no engine was started again"
    begun = world.now
    world.now += timedelta(seconds=29)
    world.run_pass()
    assert world.serving() == ["1.1", "1.0"]
    world.settle()
    assert world.serving() == ["1.1", "1.1"]
    assert world.now - begun < HOUR


def test_a_deadline_is_not_counted_from_the_future() -> None:
    world = World(pods=1)
    world.settle()
    world.now += HOUR
    world.bump("1.1")
    world.pods[0].reachable = False
    for _ in range(5):
        world.run_pass()
        world.tick()
    world.now -= HOUR
    world.kill_operator()
    world.run_pass()
    world.now += timedelta(seconds=world.spec.rollout.progress_deadline_seconds + 1)
    world.run_pass()
    assert world.condition("Stalled") == ("True", "ProgressDeadlineExceeded")
