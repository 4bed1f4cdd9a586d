"""Versions that are fetched before anybody swaps to them: beside everything, in order, and given up when not wanted."""

import pytest

from modelswap_engine.protocol.errors import SourceUnreadable, WrongPod
from modelswap_engine.protocol.messages import Fence
from modelswap_engine.protocol.prefetch import PrefetchPhase, PrefetchRequest
from modelswap_engine.protocol.states import SwapState
from modelswap_engine.swap.prefetch import RETRY_SECONDS
from tests.support.swapping import checkpoint

PHASE = PrefetchPhase


def ask(world, *targets):
    state = world.state
    fence = Fence(pod_uid=state.pod_uid, owner_uid=state.owner_uid, epoch=state.epoch, revision=state.revision)
    return world.coordinator.prefetch(PrefetchRequest(fence=fence, targets=list(targets)))


def phases(world):
    return [found.phase for found in world.state.prefetch]


async def test_what_a_swap_would_read_comes_and_nothing_else_happens(world):
    target = world.publish("1.1", checkpoint(q=b"QQQQ"))
    world.sources.elsewhere.add(target.uri)
    steps = list(world.backend.steps)
    assert [found.phase for found in ask(world, target)] == [PHASE.PENDING]
    await world.clock.settle()
    (found,) = world.state.prefetch
    assert (found.phase, found.digest, found.bytes_fetched) == (PHASE.FETCHED, target.digest, 8)
    assert world.sources.obtained == [["k", "q"]]
    assert world.backend.steps == steps
    world.assert_serves(world.template)


async def test_versions_that_are_fetched_ahead_are_in_use(world):
    ahead = world.publish("2.0", checkpoint(q=b"AAAA"))
    target = world.publish("1.1", checkpoint(q=b"QQQQ"))
    ask(world, ahead)
    await world.clock.settle()
    assert (await world.swap(target)).state is SwapState.SERVING
    assert ahead.digest in world.sources.retained
    ask(world)
    assert (await world.swap(world.template, "op-2", revision=2)).state is SwapState.SERVING
    assert ahead.digest not in world.sources.retained


async def test_one_that_cannot_be_had_is_tried_again_and_keeps_nobody(world):
    away, there = world.publish("2.0", checkpoint(q=b"AAAA")), world.publish("1.1", checkpoint(q=b"QQQQ"))
    world.sources.errors[away.uri] = SourceUnreadable("503")
    ask(world, away, there)
    await world.clock.settle()
    assert phases(world) == [PHASE.FAILED, PHASE.FETCHED]
    assert world.state.prefetch[0].error.code == "SourceUnreadable"
    del world.sources.errors[away.uri]
    await world.clock.advance(RETRY_SECONDS + 1)
    assert phases(world) == [PHASE.FETCHED, PHASE.FETCHED]


async def test_what_is_not_wanted_any_more_is_given_up(world):
    hangs, there = world.publish("2.0", checkpoint(q=b"AAAA")), world.publish("1.1", checkpoint(q=b"QQQQ"))
    world.sources.hanging.add(hangs.uri)
    ask(world, hangs)
    await world.clock.settle()
    assert phases(world) == [PHASE.FETCHING]
    ask(world, there)
    await world.clock.settle()
    assert phases(world) == [PHASE.FETCHED]


async def test_asking_again_for_the_same_changes_nothing(world):
    target = world.publish("1.1", checkpoint(q=b"QQQQ"))
    ask(world, target)
    await world.clock.settle()
    before = len(world.sources.resolved)
    assert [found.phase for found in ask(world, target)] == [PHASE.FETCHED]
    await world.clock.settle()
    assert len(world.sources.resolved) == before


async def test_another_pods_order_is_refused(world):
    with pytest.raises(WrongPod):
        world.coordinator.prefetch(PrefetchRequest(fence=Fence(pod_uid="another"), targets=[world.template]))


async def test_what_is_refused_for_good_is_not_asked_for_again_and_again(world):
    bad = world.publish("2.0", checkpoint(q=b"longer than before"))
    ask(world, bad)
    await world.clock.settle()
    assert phases(world) == [PHASE.FAILED]
    asked = len(world.sources.resolved)
    await world.clock.advance(100 * RETRY_SECONDS)
    assert len(world.sources.resolved) == asked


async def test_one_that_stays_away_is_asked_for_less_and_less(world):
    away = world.publish("2.0", checkpoint(q=b"AAAA"))
    world.sources.errors[away.uri] = SourceUnreadable("503")
    ask(world, away)
    await world.clock.settle()
    asked = len(world.sources.resolved)
    await world.clock.advance(30 * RETRY_SECONDS)
    assert len(world.sources.resolved) - asked == 4


async def test_a_defect_of_ours_does_not_look_like_work(world):
    target = world.publish("1.1", checkpoint(q=b"QQQQ"))

    async def defect(uri, **asked):
        raise RuntimeError("oh")

    world.sources.resolve = defect
    ask(world, target)
    await world.clock.settle()
    assert phases(world) == [PHASE.FAILED]
    assert world.state.prefetch[0].error.code == "Internal"


async def test_what_is_taken_off_the_list_makes_room_at_once(world):
    first, second = world.publish("2.0", checkpoint(q=b"AAAA")), world.publish("2.1", checkpoint(q=b"BBBB"))
    ask(world, first)
    await world.clock.settle()
    ask(world, second)
    await world.clock.settle()
    assert first.digest not in world.sources.retained
    assert world.template.digest in world.sources.retained
