"""When versions may change: what the policy says, and what a slot does while nothing may. In no time."""

from datetime import UTC, datetime, timedelta

import pytest

from modelswap_engine.protocol.states import SwapState
from modelswap_operator.planning.actions import StartSwaps, Wait, WriteAssignment
from modelswap_operator.planning.changes import ChangePolicy, parse
from modelswap_operator.planning.snapshot import Asked
from tests.support.sim_pod import GOOD
from tests.support.slot_steps import started, until
from tests.support.slot_world import World

FROZEN = ChangePolicy(frozen=True, reason="year end")
MONDAY = datetime(2026, 11, 30, tzinfo=UTC)


def windows(*lines: str) -> ChangePolicy:
    found = parse({"windows": "\n".join(lines)})
    assert not found.wrong
    return found


@pytest.mark.parametrize(
    ("line", "hours", "open_"),
    [
        ("Mon-Fri 09:00-16:00 UTC", 9, True),
        ("Mon-Fri 09:00-16:00 UTC", 8.99, False),
        ("Mon-Fri 09:00-16:00 UTC", 16, False),
        ("Mon-Fri 09:00-16:00 UTC", 24 * 5 + 10, False),
        ("Sat-Mon 09:00-16:00 UTC", 10, True),
        ("Sat-Mon 09:00-16:00 UTC", 24 + 10, False),
        ("Mon 22:00-04:00 UTC", 24 + 3, True),
        ("Mon 22:00-04:00 UTC", 24 + 5, False),
        ("Mon 22:00-04:00 UTC", 3, False),
        ("Mon 09:00-10:00 Europe/Berlin", 8.5, True),
        ("Mon 09:00-10:00 Europe/Berlin", 9.5, False),
        ("Mon 00:00-00:00 UTC", 23, True),
    ],
)
def test_a_window_is_open_from_its_beginning_to_its_end(line: str, hours: float, open_: bool) -> None:
    assert (windows(line).hold(MONDAY + timedelta(hours=hours)) is None) is open_


def test_outside_of_all_windows_the_next_opening_is_named() -> None:
    held = windows("Tue 09:00-10:00 UTC", "# comment", "", "Wed-Thu 01:00-02:00 UTC").hold(MONDAY + timedelta(hours=35))
    assert held is not None
    assert held.until == MONDAY + timedelta(days=2, hours=1)
    assert held.message == "outside of the change windows until 2026-12-02T01:00:00Z"


def test_a_window_follows_its_zones_clock() -> None:
    berlin = windows("Mon-Sun 09:00-10:00 Europe/Berlin")
    summer = datetime(2026, 7, 1, tzinfo=UTC)
    assert berlin.hold(summer + timedelta(hours=7, minutes=30)) is None
    assert berlin.hold(summer + timedelta(hours=8, minutes=30)) is not None


@pytest.mark.parametrize(
    ("data", "named"),
    [
        ({"freeze": "maybe"}, "'maybe', neither true nor false"),
        ({"frozen": "true"}, "unknown key frozen"),
        ({"windows": "weekdays"}, "window 'weekdays' is not like"),
        ({"windows": "Mon 25:00-26:00 UTC"}, "is not like"),
        ({"windows": "Mon 09:00-10:00 Mars/Olympus"}, "is not like"),
        ({"windows": "Mon 09:00-10:00 Europe"}, "is not like"),
        ({"windows": "Foo 09:00-10:00 UTC"}, "is not like"),
    ],
)
def test_a_policy_that_cannot_be_read_lets_nothing_change_and_says_why(data: dict[str, str], named: str) -> None:
    held = parse(data).hold(MONDAY)
    assert held is not None
    assert named in held.message


def test_no_policy_holds_nothing_back() -> None:
    assert parse({}).hold(MONDAY) is None
    assert parse({"freeze": "false", "reason": "was year end"}).hold(MONDAY) is None


def work(world: World, passes: int = 30) -> None:
    for _ in range(passes):
        if isinstance(world.run_pass(), Wait):
            world.tick()


def test_while_changes_are_frozen_no_version_spreads_and_its_plan_is_published() -> None:
    world = World(pods=2)
    world.settle()
    world.policy = FROZEN
    world.bump("1.1")
    decisions = len(world.actions(WriteAssignment))
    work(world)
    assert (started(world), world.serving()) == ([], ["1.0", "1.0"])
    assert len(world.actions(WriteAssignment)) == decisions, (
        "a pod that restarts would load a version that is held back"
    )
    assert world.condition("Ready") == ("Unknown", "ChangesFrozen")
    assert world.condition("Reconciling") == ("True", "ChangesFrozen")
    assert "0/2 pods serve 1.1; changes are frozen: year end" in next(
        c.message for c in world.status.conditions if c.type == "Ready"
    )
    assert world.status.plan
    writes = world.status_writes
    world.now += timedelta(hours=5)
    work(world)
    assert world.status_writes == writes, "a freeze is told once"
    world.policy = ChangePolicy()
    world.run_pass()
    assert world.condition("Stalled") is None  # the freeze does not count against the deadline
    world.settle()
    assert world.serving() == ["1.1", "1.1"]


def test_a_freeze_in_the_middle_lets_the_operation_end_and_holds_the_others() -> None:
    world = World(pods=3)
    world.settle()
    world.bump("1.1")
    until(world, SwapState.FETCHING)
    world.policy = FROZEN
    work(world)
    assert world.serving() == ["1.1", "1.0", "1.0"]
    world.kill_operator()
    world.now += timedelta(hours=5)
    world.policy = ChangePolicy()
    world.settle()
    assert world.serving() == ["1.1"] * 3


def test_a_freeze_after_the_first_pods_holds_those_that_would_follow() -> None:
    world = World(pods=3)
    world.settle()
    world.bump("1.1")
    while world.assignment is None or world.assignment.stable != GOOD["1.1"].target:
        if isinstance(world.run_pass(), Wait):
            world.tick()
    world.policy = FROZEN
    work(world)
    assert world.serving() == ["1.1", "1.0", "1.0"]
    assert world.condition("Ready") == ("Unknown", "ChangesFrozen")
    world.policy = ChangePolicy()
    world.settle()
    assert world.serving() == ["1.1"] * 3


def test_going_back_and_healing_are_never_frozen() -> None:
    world = World(pods=3)
    world.settle()
    world.bump("1.1")
    until(world, SwapState.SERVING)
    world.run_pass()
    world.policy = FROZEN
    world.bump("1.0")
    world.settle()
    assert world.serving() == ["1.0"] * 3
    world.pods[0].train("e")
    world.settle()
    assert world.serving() == ["1.0"] * 3
    assert world.condition("Ready") == ("True", "Succeeded")


def test_one_generation_may_go_through_a_freeze() -> None:
    world = World(pods=2)
    world.settle()
    world.policy = FROZEN
    world.bump("1.1")
    world.asked = Asked(change_now="1")
    work(world)
    assert world.serving() == ["1.0", "1.0"]
    world.asked = Asked(change_now=str(world.generation))
    world.settle()
    assert world.serving() == ["1.1", "1.1"]


def test_a_slot_waits_for_the_window_and_looks_again_when_it_opens() -> None:
    world = World(pods=1)
    world.settle()
    opening = (world.now + timedelta(days=1)).replace(hour=9, minute=0, second=0, microsecond=0)
    world.policy = windows(f"{opening:%a} 09:00-10:00 UTC")
    world.bump("1.1")
    work(world)
    action = world.run_pass()
    assert isinstance(action, Wait)
    assert action.until == opening
    world.now = opening
    world.settle()
    assert world.serving() == ["1.1"]


def test_an_abort_names_its_generation_and_brings_the_pods_back() -> None:
    world = World(pods=3)
    world.settle()
    world.bump("1.1")
    until(world, SwapState.SERVING)
    until(world, SwapState.FETCHING)
    world.asked = Asked(abort=str(world.generation - 1))
    world.run_pass()
    assert world.status.failures == ()
    world.asked = Asked(abort=str(world.generation))
    world.settle()
    assert world.serving() == ["1.0"] * 3
    assert world.condition("Stalled") == ("True", "RolledBack")
    assert world.status.failures[0].reason == "Aborted"
    world.bump("1.2")
    world.settle()
    assert world.serving() == ["1.2"] * 3


def test_an_abort_before_anything_moved_and_one_after_the_end() -> None:
    world = World(pods=2)
    world.settle()
    world.asked = Asked(abort="2")
    world.bump("1.1")
    world.settle()
    assert not world.actions(StartSwaps)
    assert world.condition("Stalled") == ("True", "Aborted")
    world.bump("1.2")
    world.settle()
    world.asked = Asked(abort=str(world.generation))
    writes = len(world.actions(WriteAssignment))
    world.settle()
    assert (world.serving(), len(world.actions(WriteAssignment))) == (["1.2", "1.2"], writes)


def test_a_request_forgets_how_a_rollout_went_but_not_what_a_pod_refused() -> None:
    world = World(pods=3)
    world.settle()
    world.bump("1.1")
    world.pods[2].transient_faults = 10_000
    world.settle()
    assert [f.reason for f in world.status.failures] == ["ProgressDeadlineExceeded"]
    world.pods[2].transient_faults = 0
    world.requested_at = "1"
    world.settle()
    assert world.serving() == ["1.1"] * 3
    world.bump("2.1")
    world.settle()
    count = len(started(world))
    world.requested_at = "2"
    world.settle()
    assert len(started(world)) == count
    assert world.condition("Stalled") == ("True", "ChecksFailed")
