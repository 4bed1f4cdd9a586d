"""The door for new requests, and the way through it into the lock."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from modelswap_engine.protocol.errors import NotReady, Paused, VersionRequired
from modelswap_engine.protocol.messages import VersionRef
from modelswap_engine.swap.admission import Admissions
from modelswap_engine.swap.gate import Gate
from modelswap_engine.swap.lock import Scope, UpdateLock
from tests.support.clock import ManualClock

LIVE = VersionRef(version="1.0", digest="sha256:aa")


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def gate(clock):
    return Gate(clock=clock, max_queue=2, queue_seconds=10)


async def entering(gate, clock):
    task = asyncio.ensure_future(gate.enter())
    await clock.settle()
    return task


async def test_an_open_gate_lets_in_at_once(gate, clock):
    assert (await entering(gate, clock)).done()


async def test_a_closed_gate_holds_requests_until_everybody_has_let_go(gate, clock):
    gate.close("swap")
    gate.close("recovery")
    waiting = await entering(gate, clock)
    gate.open("swap")
    await clock.settle()
    assert not waiting.done()
    assert gate.queued == 1
    gate.open("recovery")
    await clock.settle()
    assert waiting.done()
    assert gate.queued == 0


async def test_the_queue_is_bounded_by_count(gate, clock):
    gate.close("swap")
    first, second = await entering(gate, clock), await entering(gate, clock)
    with pytest.raises(Paused) as refused:
        await gate.enter()
    assert refused.value.details["retryAfterSeconds"] == "1"
    assert refused.value.retryable
    gate.open("swap")
    await asyncio.gather(first, second)


@pytest.mark.parametrize(("seconds", "told"), [(0.2, "1"), (4, "4"), (600, "10")])
async def test_a_client_is_told_to_come_again_when_the_lease_is_over(gate, clock, seconds, told):
    gate.take_lease("l", owner="me", seconds=seconds)
    waiting = [await entering(gate, clock) for _ in range(2)]
    with pytest.raises(Paused) as refused:
        await gate.enter()
    assert refused.value.details["retryAfterSeconds"] == told
    gate.end_lease("l", owner="me")
    await asyncio.gather(*waiting)


async def test_the_queue_is_bounded_by_age(gate, clock):
    gate.close("swap")
    waiting = await entering(gate, clock)
    await clock.advance(9.9)
    assert not waiting.done()
    await clock.advance(0.2)
    assert isinstance(waiting.exception(), Paused)
    assert gate.queued == 0


async def test_a_hold_that_may_take_longer_gives_more_patience(gate, clock):
    gate.close("swap", allowance=100)
    waiting = await entering(gate, clock)
    await clock.advance(50)
    assert not waiting.done()
    gate.open("swap")
    await waiting


async def test_one_who_leaves_the_queue_makes_room(gate, clock):
    gate.close("swap")
    first, second = await entering(gate, clock), await entering(gate, clock)
    first.cancel()
    await clock.settle()
    third = await entering(gate, clock)
    gate.open("swap")
    await asyncio.gather(second, third)


async def test_a_gate_closed_again_before_the_waiter_ran_keeps_it_waiting(gate, clock):
    gate.close("swap")
    waiting = await entering(gate, clock)
    gate.open("swap")
    gate.close("swap")
    await clock.settle()
    assert not waiting.done()
    assert gate.queued == 1
    gate.open("swap")
    await waiting


async def test_refusing_answers_those_who_wait_and_those_who_come(gate, clock):
    gate.close("swap")
    waiting = await entering(gate, clock)
    gate.refuse(NotReady("quarantined").body())
    await clock.settle()
    assert isinstance(waiting.exception(), NotReady)
    with pytest.raises(NotReady, match="quarantined"):
        await gate.enter()
    gate.accept()
    gate.open("swap")
    await gate.enter()


async def test_a_lease_undoes_itself(gate, clock):
    gate.take_lease("a", owner="trainer", seconds=5)
    waiting = await entering(gate, clock)
    await clock.advance(4)
    assert not waiting.done()
    assert gate.lease.owner == "trainer"
    await clock.advance(2)
    assert waiting.done()
    assert gate.lease is None


async def test_the_same_lease_again_moves_its_deadline(gate, clock):
    gate.take_lease("a", owner="x", seconds=5)
    await clock.advance(4)
    gate.take_lease("a", owner="x", seconds=5)
    await clock.advance(4)
    assert not gate.is_open
    await clock.advance(2)
    assert gate.is_open


async def test_a_lease_given_back_opens_and_an_unknown_one_is_nothing(gate, clock):
    gate.take_lease("a", owner="x", seconds=5)
    gate.end_lease("other", owner="x")
    assert not gate.is_open
    gate.end_lease("a", owner="x")
    assert gate.is_open


async def test_two_leases_both_count(gate, clock):
    gate.take_lease("a", owner="x", seconds=5)
    gate.take_lease("b", owner="y", seconds=50)
    await clock.advance(10)
    assert not gate.is_open
    gate.end_lease("b", owner="y")
    assert gate.is_open


async def test_changes_are_told_but_not_single_requests(gate, clock):
    told = []
    gate.on_change(lambda: told.append(gate.is_open))
    gate.close("swap")
    waiting = await entering(gate, clock)
    gate.open("swap")
    await waiting
    assert told == [False, True]


# The lock


@pytest.fixture
def lock(clock):
    return UpdateLock(clock=clock)


async def test_a_writer_waits_for_readers_and_keeps_new_ones_out(lock, clock):
    reader = await lock.enter()
    lock.claim()
    late = asyncio.ensure_future(lock.enter())
    idle = asyncio.ensure_future(lock.idle(Scope.ALL))
    await clock.settle()
    assert not idle.done()
    assert not late.done()
    reader.leave()
    await clock.settle()
    assert idle.done()
    assert not late.done()
    lock.release()
    (await late).leave()
    assert lock.inside == 0


async def test_only_those_in_admission_matter_to_a_narrow_writer(lock, clock):
    admitting, streaming = await lock.enter(), await lock.enter()
    streaming.submit()
    lock.claim()
    idle = asyncio.ensure_future(lock.idle(Scope.ADMITTING))
    await clock.settle()
    assert not idle.done()
    admitting.submit()
    await clock.settle()
    assert idle.done()
    assert lock.inside == 2


async def test_the_age_is_that_of_the_oldest(lock, clock):
    assert lock.oldest_seconds == 0
    first = await lock.enter()
    await clock.advance(3)
    await lock.enter()
    await clock.advance(2)
    assert lock.oldest_seconds == 5
    first.leave()
    assert lock.oldest_seconds == 2


async def test_two_writers_are_a_defect(lock):
    lock.claim()
    with pytest.raises(RuntimeError):
        lock.claim()


async def test_leaving_twice_does_no_harm(lock):
    reader, other = await lock.enter(), await lock.enter()
    reader.leave()
    reader.leave()
    assert lock.inside == 1
    other.leave()


# Both together


@pytest.fixture
def admissions(gate, lock):
    return Admissions(gate=gate, lock=lock, live=lambda: LIVE)


async def test_an_admission_knows_its_version_and_is_released_once(admissions, lock):
    async with admissions.admit() as inside:
        assert inside.live == LIVE
        assert lock.inside == 1
        inside.submitted()
    assert lock.inside == 0


@pytest.mark.parametrize("leave", [RuntimeError("handler broke"), asyncio.CancelledError()])
async def test_every_way_out_releases(admissions, lock, leave):
    with pytest.raises(type(leave)):
        async with admissions.admit():
            raise leave
    assert lock.inside == 0


async def test_a_client_that_goes_away_while_it_waits_leaves_nothing_behind(admissions, gate, lock, clock):
    gate.close("swap")
    stack = AsyncExitStack()
    waiting = asyncio.ensure_future(stack.enter_async_context(admissions.admit()))
    await clock.settle()
    waiting.cancel()
    await clock.settle()
    gate.open("swap")
    assert gate.queued == 0
    assert lock.inside == 0


@pytest.mark.parametrize("wanted", ["1.0", "sha256:aa", None])
async def test_the_live_version_may_be_demanded_by_label_or_digest(admissions, wanted):
    async with admissions.admit(require_version=wanted):
        pass


async def test_another_version_is_refused_and_nothing_stays_inside(admissions, lock):
    with pytest.raises(VersionRequired) as refused:
        async with admissions.admit(require_version="2.0"):
            pass
    assert refused.value.details == {"live": "1.0", "digest": "sha256:aa"}
    assert lock.inside == 0


async def test_without_a_live_version_nobody_gets_in(gate, lock):
    with pytest.raises(NotReady):
        async with Admissions(gate=gate, lock=lock, live=lambda: None).admit():
            pass
    assert lock.inside == 0


async def test_one_caught_between_gate_and_lock_goes_back_into_the_queue(admissions, gate, lock, clock):
    lock.claim()
    stack = AsyncExitStack()
    waiting = asyncio.ensure_future(stack.enter_async_context(admissions.admit()))
    await clock.settle()
    gate.close("swap")
    lock.release()
    await clock.settle()
    assert not waiting.done()
    assert lock.inside == 0
    gate.open("swap")
    await waiting
    await stack.aclose()
