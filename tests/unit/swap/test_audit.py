"""Looking at live tensors from time to time, and the snapshots for debugging."""

import asyncio

import pytest

from modelswap_engine.protocol.errors import BadRequest, Busy, DrainTimeout, NotFound
from modelswap_engine.protocol.messages import CheckAction, CheckRequest
from modelswap_engine.protocol.states import SwapState
from tests.support.swapping import World, checkpoint, request


async def started(tmp_path, **bounds):
    world = World(tmp_path, **bounds)
    await world.start()
    return world


async def test_it_is_repeated_at_its_rate_and_finds_what_changed_meanwhile(tmp_path):
    world = await started(tmp_path, audit_seconds=3600, audit_bytes_per_second=1000)
    await world.clock.advance(3590)
    assert world.state.audit is None
    await world.clock.advance(20)
    assert world.state.audit.ok
    world.backend.live["norm"] = b"??"
    await world.clock.advance(3610)
    world.assert_serves(world.template)
    assert world.state.repairs == 1
    assert world.backend.rates[:2] == [1000, 1000]
    await world.stop()


async def test_an_audit_after_a_swap_counts_as_one(tmp_path):
    world = await started(tmp_path, audit_seconds=3600)
    await world.clock.advance(3000)
    await world.swap(world.publish("1.1", checkpoint(q=b"QQQQ")))
    await world.clock.settle()
    assert world.backend.steps.count("hashes") == 1
    await world.clock.advance(3000)
    assert world.backend.steps.count("hashes") == 1
    await world.clock.advance(700)
    assert world.backend.steps.count("hashes") == 2
    await world.stop()


async def check(world, action, pattern="*"):
    return await world.clock.run(world.coordinator.check(CheckRequest(pattern=pattern, action=action)))


async def test_a_comparison_names_what_changed_since_the_snapshot_and_touches_nothing(tmp_path):
    world = await started(tmp_path, debug_checks=True)
    with pytest.raises(NotFound, match="no snapshot"):
        await check(world, CheckAction.COMPARE)
    assert (await check(world, CheckAction.SNAPSHOT)).ok
    assert (await check(world, CheckAction.COMPARE)).ok
    target = world.publish("1.1", checkpoint(q=b"QQQQ"))
    await world.swap(target)
    found = await check(world, CheckAction.COMPARE)
    assert [item.name for item in found.mismatched] == ["q"]
    assert found.digest == target.digest
    assert (await check(world, CheckAction.COMPARE, "n*")).ok
    world.assert_serves(target)
    with pytest.raises(BadRequest, match="nothing"):
        await check(world, CheckAction.COMPARE, "nothing")
    await world.stop()


async def test_a_parameter_that_was_made_with_a_loss_is_compared_as_it_is(tmp_path):
    world = await started(tmp_path, debug_checks=True)
    world.backend.lossy.add("q")
    assert (await check(world, CheckAction.SNAPSHOT)).runtime
    world.backend.live = {**world.backend.live, "q": b"!!!!"}
    (item,) = (await check(world, CheckAction.COMPARE)).mismatched
    assert (item.name, item.coordinates) == ("made of q", "runtime")
    await world.stop()


async def test_the_state_remembers_the_last_check(tmp_path):
    world = await started(tmp_path)
    assert world.state.last_check is None
    before = world.state.seq
    await check(world, CheckAction.VERIFY, "n*")
    found = world.state.last_check
    assert (found.action, found.pattern, found.ok, found.tensors) == ("Verify", "n*", True, 1)
    assert (found.digest, world.state.seq > before) == (world.template.digest, True)
    await world.stop()


@pytest.mark.parametrize("action", [CheckAction.SNAPSHOT, CheckAction.COMPARE])
async def test_snapshots_are_off_unless_asked_for(tmp_path, action):
    world = await started(tmp_path)
    with pytest.raises(BadRequest, match="switched off"):
        await check(world, action)
    await world.stop()


async def test_what_an_engine_hides_while_it_computes_is_named_and_seen_by_a_check_that_holds_it_still(tmp_path):
    world = await started(tmp_path)
    world.backend.hidden = {"q"}
    found = await check(world, CheckAction.VERIFY)
    assert (found.ok, found.unverifiable, "q" in found.tensors) == (True, ["q"], False)
    with pytest.raises(BadRequest) as error:
        await check(world, CheckAction.VERIFY, "q")
    assert "still" in error.value.advice
    world.backend.live["q"] = b"!!!!"
    assert (await check(world, CheckAction.VERIFY)).ok
    found = await world.clock.run(world.coordinator.check(CheckRequest(still=True)))
    assert [item.name for item in found.mismatched] == ["q"]
    assert found.unverifiable == []
    await world.stop()


async def test_a_check_that_holds_the_engine_still_waits_for_those_inside_and_lets_nobody_in(tmp_path):
    world = await started(tmp_path)
    async with world.coordinator.admission():
        looking = asyncio.ensure_future(world.coordinator.check(CheckRequest(still=True)))
        await world.clock.settle()
        assert not world.state.gate.open
        waiting = asyncio.ensure_future(world.coordinator.admission().__aenter__())
        await world.clock.settle()
        assert (waiting.done(), world.backend.steps.count("hashes")) == (False, 0)
    found = await looking
    await waiting
    assert found.ok
    assert world.state.gate.open
    await world.stop()


async def test_a_check_gives_up_on_those_inside_and_gives_way_to_a_swap(tmp_path):
    world = await started(tmp_path)
    target = world.publish("1.1", checkpoint(q=b"QQQQ"))
    async with world.coordinator.admission():
        looking = asyncio.ensure_future(world.coordinator.check(CheckRequest(still=True, timeout_seconds=5)))
        await world.clock.advance(6)
        with pytest.raises(DrainTimeout, match="1 requests"):
            await looking
        assert world.state.gate.open
        looking = asyncio.ensure_future(world.coordinator.check(CheckRequest(still=True)))
        await world.clock.settle()
        await world.coordinator.swap(request(target))
        await world.clock.settle()
        assert isinstance(looking.exception(), Busy)
    assert (await world.ended("op-1")).state is SwapState.SERVING
    world.assert_serves(target)
    assert world.state.gate.open
    await world.stop()
