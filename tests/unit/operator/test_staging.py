"""Pods stage the new version, in waves that double, before the first of them serves it."""

from datetime import timedelta

import msgspec
import pytest

from modelswap_engine.protocol.policy import TrafficMode
from modelswap_engine.protocol.states import SwapState
from modelswap_operator.api.modelversion import Canary, OnFailure, Rollout, TrafficSpec
from modelswap_operator.planning.actions import CancelSwaps, RenewHolds, StartSwaps, Wait
from modelswap_operator.planning.changes import ChangePolicy
from modelswap_operator.planning.snapshot import Asked
from modelswap_operator.planning.staging import LEASE_SECONDS
from tests.support.sim_pod import SimPod
from tests.support.slot_world import World


def rolled(**arguments: object) -> World:
    """A slot at 1.0 whose spec says 1.1 from now on."""
    world = World(**({"pods": 4, "protocol": 2} | arguments))  # type: ignore[arg-type]
    world.settle()
    world.log.clear()
    world.bump("1.1")
    return world


def go_on(world: World, passes: int) -> None:
    for _ in range(passes):
        if isinstance(world.run_pass(), Wait):
            world.tick()


def held(world: World) -> list[str]:
    return [p.name for p in world.pods if p.held]


def all_staged(world: World, but: int = 0, limit: int = 200) -> None:
    """Go on until all but some hold what they staged, none having changed."""
    for _ in range(limit):
        assert set(world.serving()) <= {"1.0", ""}
        if len(held(world)) >= len(world.pods) - but:
            return
        go_on(world, 1)
    raise AssertionError(f"only {held(world)} have staged")


def orders(world: World) -> list[list[str]]:
    """Each order: who stages (s), is told to go on (g), or swaps in one go (!)."""
    kinds = [list(a.orders) for a in world.actions(StartSwaps)]
    return [
        [f"{'s' if o.request.hold else 'g' if o.goes_on else '!'}{o.pod.name[-1]}" for o in found] for found in kinds
    ]


def test_all_pods_stage_before_the_first_one_changes() -> None:
    world = rolled(pods=7, max_unavailable="100%")
    all_staged(world)
    world.settle()
    assert set(world.serving()) == {"1.1"}
    assert sorted(o for found in orders(world) for o in found) == [f"{kind}{n}" for kind in "gs" for n in range(1, 8)]
    assert world.condition("Ready") == ("True", "Succeeded")
    assert world.status.rollout is not None
    assert world.status.rollout.staged_pods == 0


def test_waves_of_staging_double() -> None:
    world = rolled(pods=7)
    seen = [0]
    for _ in range(200):
        go_on(world, 1)
        staging = sum(
            p.busy and not p.held and p.operation is not None and p.operation.hold is not None for p in world.pods
        )
        there = len(held(world))
        assert staging <= 1 + there
        seen.append(staging)
        if there == 7:
            break
    assert max(seen) >= 3


def test_until_all_have_staged_the_assignment_names_nobody() -> None:
    world = rolled()
    all_staged(world, but=1)
    world.run_pass()
    assert world.assignment is not None
    assert world.assignment.candidate is not None
    assert world.assignment.candidate.pod_uids == []
    assert world.condition("Ready") == ("Unknown", "Progressing")
    assert world.condition("Reconciling") == ("True", "Staging")
    assert world.status.rollout is not None
    assert (world.status.rollout.state, world.status.rollout.staged_pods) == ("Staging", 3)
    assert "3/4 pods have staged it" in message(world)
    assert {row.state for row in world.status.pods} <= {"Staged", "Staging", "Waiting"}
    all_staged(world)
    for _ in range(3):
        world.run_pass()
    assert len(world.assignment.candidate.pod_uids) == 1


def message(world: World) -> str:
    return next(c.message for c in world.status.conditions if c.type == "Ready")


def test_pods_that_stage_serve_and_do_not_count_as_unavailable() -> None:
    """With one pod down and a budget of one all stage, and then none may change."""
    world = rolled(pods=3, max_unavailable=1)
    world.pods[2].ready = False
    all_staged(world)
    go_on(world, 30)
    assert world.serving() == ["1.0", "1.0", "1.0"]
    world.pods[2].ready = True
    world.settle()
    assert world.serving() == ["1.1", "1.1", "1.1"]


def test_a_bad_version_is_found_before_any_pod_changed() -> None:
    world = rolled()
    world.bump("2.1")
    world.settle()
    assert world.serving() == ["1.0"] * 4
    assert [f.reason for f in world.status.failures] == ["ChecksFailed"]
    assert world.condition("Stalled") == ("True", "ChecksFailed")
    assert orders(world) == [["s1"]], "one pod found out for all"
    assert held(world) == []


@pytest.mark.parametrize("on_failure", list(OnFailure))
def test_one_pod_that_refuses_it_frees_the_others(on_failure: OnFailure) -> None:
    world = rolled(on_failure=on_failure)
    world.pods[3].refuses.add("1.1")
    world.settle()
    assert world.serving() == ["1.0"] * 4
    assert world.condition("Stalled") is not None
    assert held(world) == []
    assert world.actions(CancelSwaps)


def test_a_pod_without_memory_for_it_is_named_and_nobody_changes() -> None:
    world = rolled()
    world.pods[2].too_small = True
    go_on(world, 80)
    assert world.serving() == ["1.0"] * 4
    assert held(world) == ["pod-1", "pod-2", "pod-4"]
    assert world.condition("Ready") == ("False", "InsufficientMemory")
    assert "pod-3" in message(world)
    world.now += timedelta(seconds=200)
    go_on(world, 20)
    world.now += timedelta(seconds=450)
    go_on(world, 20)
    assert world.condition("Stalled") == ("True", "ProgressDeadlineExceeded")
    assert world.serving() == ["1.0"] * 4
    world.pods[2].too_small = False
    world.settle(2000)
    assert set(world.serving()) == {"1.1"}


def test_sidecars_that_are_too_old_are_rolled_as_before() -> None:
    world = rolled()
    world.pods[3].protocol = 1
    world.settle()
    assert set(world.serving()) == {"1.1"}
    assert all(o.startswith("!") for found in orders(world) for o in found)


@pytest.mark.parametrize("why", ["one pod", "switched off", "way back"])
def test_where_it_buys_nothing_nobody_stages_ahead(why: str) -> None:
    world = rolled(pods=1 if why == "one pod" else 4)
    if why == "switched off":
        world.edit(rollout=Rollout(stage_ahead=False))
    if why == "way back":
        all_staged(world)
        world.bump("1.0")
        world.log.clear()
    world.settle()
    assert not any(o.startswith("s") for found in orders(world) for o in found)
    assert set(world.serving()) == {"1.0" if why == "way back" else "1.1"}
    assert held(world) == []


def test_leases_are_renewed_for_as_long_as_pods_wait() -> None:
    world = rolled(canary=Canary(pods=1, soak_seconds=200), max_unavailable=2)
    all_staged(world)
    world.settle(3000)
    assert world.actions(RenewHolds)
    assert set(world.serving()) == {"1.1"}
    assert all(o[0] in "sg" for found in orders(world) for o in found), "what was staged was held through the soak"


def test_memory_is_not_held_through_a_long_soak() -> None:
    world = rolled(canary=Canary(pods=1, soak_seconds=601))
    all_staged(world)
    for _ in range(60):
        go_on(world, 1)
    assert world.serving() == ["1.1", "1.0", "1.0", "1.0"]
    assert held(world) == []
    assert world.condition("Reconciling") == ("True", "Soaking")
    world.settle(6000)
    assert set(world.serving()) == {"1.1"}


def test_with_the_operator_away_leases_end_and_the_next_one_begins_anew() -> None:
    world = rolled()
    all_staged(world)
    world.kill_operator()
    world.now += timedelta(seconds=LEASE_SECONDS + 1)
    world.run_pass()
    assert held(world) == []
    assert world.condition("Ready") == ("Unknown", "Progressing"), "that is no failed attempt"
    world.settle()
    assert set(world.serving()) == {"1.1"}


def test_another_operator_takes_over_what_is_staged() -> None:
    world = rolled()
    all_staged(world, but=1)
    world.kill_operator()
    world.settle()
    assert set(world.serving()) == {"1.1"}
    started = [o for found in orders(world) for o in found if o.startswith("s")]
    assert len(started) == 4, "nobody staged twice"


def test_a_newer_spec_takes_the_place_of_what_is_staged() -> None:
    world = rolled()
    all_staged(world)
    world.bump("1.2")
    world.settle()
    assert set(world.serving()) == {"1.2"}
    assert {o.why for a in world.actions(CancelSwaps) for o in a.orders} == {"superseded by a newer decision"}


def test_another_way_to_swap_means_to_stage_again() -> None:
    world = rolled()
    all_staged(world)
    world.edit(traffic=TrafficSpec(mode=TrafficMode.ABORT))
    world.settle()
    assert set(world.serving()) == {"1.1"}
    modes = {o.request.traffic.mode for a in world.actions(StartSwaps) for o in a.orders if o.goes_on}
    assert modes == {TrafficMode.ABORT}
    assert len(world.actions(CancelSwaps)) == 1


@pytest.mark.parametrize("what", ["freeze", "suspend"])
def test_under_a_freeze_or_suspended_nothing_is_held(what: str) -> None:
    world = rolled()
    all_staged(world)
    if what == "freeze":
        world.policy = ChangePolicy(frozen=True)
    else:
        world.edit(suspend=True)
    go_on(world, 10)
    assert held(world) == []
    assert world.serving() == ["1.0"] * 4
    if what == "freeze":
        assert world.condition("Ready") == ("Unknown", "ChangesFrozen")
        world.policy = ChangePolicy()
    else:
        assert world.status.observed_generation == world.generation
        world.edit(suspend=False)
    world.settle()
    assert set(world.serving()) == {"1.1"}


def test_a_freeze_from_the_beginning_lets_nobody_stage() -> None:
    world = rolled()
    world.policy = ChangePolicy(frozen=True)
    go_on(world, 30)
    assert orders(world) == []


def test_given_up_by_a_person_all_of_it_is_given_back() -> None:
    world = rolled()
    all_staged(world)
    world.asked = Asked(abort=str(world.generation))
    world.settle()
    assert held(world) == []
    assert world.condition("Stalled") == ("True", "Aborted")
    assert world.serving() == ["1.0"] * 4


def _restarts(pod: SimPod, world: World) -> None:
    pod.restart()


def _dies(pod: SimPod, world: World) -> None:
    world.pods.remove(pod)


def _comes(pod: SimPod, world: World) -> None:
    world.add_pod()


@pytest.mark.parametrize("fate", [_restarts, _dies, _comes])
def test_pods_come_and_go_while_the_others_wait(fate: object) -> None:
    world = rolled()
    all_staged(world, but=1)
    fate(world.pods[0], world)  # type: ignore[operator]
    all_staged(world)
    world.settle()
    assert set(world.serving()) == {"1.1"}


def test_a_pod_that_lost_it_once_the_first_one_is_named_stages_when_its_turn_comes() -> None:
    world = rolled()
    all_staged(world)
    while not world.assignment.candidate.pod_uids:  # type: ignore[union-attr]
        world.run_pass()
    world.pods[3].operation = msgspec.structs.replace(world.pods[3].operation, state=SwapState.ABORTED)  # type: ignore[type-var]
    world.settle()
    assert set(world.serving()) == {"1.1"}
    assert "!4" in [o for found in orders(world) for o in found]


def test_a_pod_that_stays_out_of_sight_holds_nobody_up() -> None:
    world = rolled()
    world.pods[1].reachable = False
    for _ in range(100):
        go_on(world, 1)
        if world.serving().count("1.1") == 1:
            break
    assert world.serving()[0] == "1.1"
    world.pods[1].reachable = True
    world.settle()
    assert set(world.serving()) == {"1.1"}
