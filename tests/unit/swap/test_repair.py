"""Live tensors that changed by themselves: nobody is answered from them, and only they are loaded again."""

import asyncio

from modelswap_engine.backends.port import RequestPolicy
from modelswap_engine.protocol.errors import SourceUnreadable
from modelswap_engine.protocol.messages import CheckRequest
from modelswap_engine.protocol.states import SwapState
from tests.support.fake_backend import Fault
from tests.support.swapping import World, checkpoint


async def check(world, pattern="*"):
    return await world.clock.run(world.coordinator.check(CheckRequest(pattern=pattern)))


def damage(world, *names):
    for name in names:
        world.backend.live[name] = b"?" * len(world.backend.live[name])


async def test_the_groups_of_damaged_tensors_are_loaded_again_and_nothing_else(world):
    damage(world, "q")
    world.backend.steps.clear()
    found = await check(world)
    assert [item.name for item in found.mismatched] == ["q"]
    await world.clock.settle()
    world.assert_serves(world.template)
    state = world.state
    assert (state.repairs, state.drifted, state.restarts) == (1, [], 0)
    assert state.repair.state is SwapState.SERVING
    assert state.repair.bytes_fetched == 8  # q and k are one parameter
    assert state.repair.plan.changed_names == ["q"]
    assert "load" not in world.backend.steps
    assert world.backend.policies == [RequestPolicy.ABORT]


async def test_until_it_is_repaired_requests_wait_and_answers_end(world):
    damage(world, "norm")
    world.backend.faults["stage"] = Fault.HANG
    await check(world)
    await world.clock.settle()
    assert not world.coordinator.trusted
    assert not world.coordinator.ready()
    assert not world.state.gate.open
    assert (world.state.reason, world.state.drifted) == ("Drifted", ["norm"])
    assert "norm" in world.state.message

    async def ask():
        async with world.coordinator.admission() as admission:
            return admission.live

    waiting = asyncio.ensure_future(ask())
    await world.clock.settle()
    assert not waiting.done()
    # The first attempt ends by its bound, the second one succeeds.
    await world.clock.advance(world.coordinator._core.settings.stage_seconds + 5)
    assert world.coordinator.trusted
    await world.clock.settle()
    world.assert_serves(world.template)
    assert isinstance(waiting.exception() if waiting.done() else None, Exception)  # it waited longer than anybody may


async def test_a_partial_check_is_enough_to_find_all_damage(world):
    damage(world, "norm", "embed")
    found = await check(world, "norm")
    assert [item.name for item in found.mismatched] == ["norm"]
    await world.clock.settle()
    world.assert_serves(world.template)
    assert world.state.repair.plan.changed_names == ["embed", "norm"]


async def test_an_audit_repairs_what_it_finds(world):
    target = world.publish("1.1", checkpoint(q=b"QQQQ"))
    world.backend.faults["release"] = Fault.FLIP
    await world.swap(target)
    await world.clock.settle()
    world.assert_serves(target)
    assert world.state.repairs == 1
    assert world.state.previous is None  # memory that changes by itself is not trusted twice
    assert world.backend.previous is None


async def test_a_swap_takes_the_damaged_tensors_along(world):
    world.backend.faults["stage"] = Fault.ERROR
    damage(world, "norm")
    await check(world)
    await world.clock.settle()
    assert world.state.drifted == ["norm"]
    target = world.publish("1.1", checkpoint(embed=b"E" * 8))
    status = await world.swap(target)
    assert status.state is SwapState.SERVING
    world.assert_serves(target)
    assert status.bytes_fetched == 10
    assert world.state.previous is None
    assert world.state.operation == status


async def test_a_repair_that_hangs_gives_way_to_a_swap(world):
    world.backend.faults["stage"] = Fault.HANG
    damage(world, "norm")
    await check(world)
    await world.clock.settle()
    assert world.state.operation.operation_id.startswith("repair-")
    before = world.clock.now
    target = world.publish("1.1", checkpoint(embed=b"E" * 8))
    status = await world.swap(target)
    assert (status.state, world.clock.now) == (SwapState.SERVING, before)
    world.assert_serves(target)
    assert world.state.repair.state is SwapState.ABORTED


async def test_going_back_does_not_use_what_was_retained_beside_damaged_tensors(world):
    target = world.publish("1.1", checkpoint(q=b"QQQQ"))
    await world.swap(target)
    await world.clock.settle()
    world.backend.faults["stage"] = Fault.ERROR
    damage(world, "norm")
    await check(world)
    await world.clock.settle()
    status = await world.swap(world.template, "op-2", revision=2)
    assert status.state is SwapState.SERVING
    world.assert_serves(world.template)
    assert status.bytes_fetched == 10  # q, k and norm, all from the source


async def test_a_repair_that_does_not_take_is_undone_and_tried_again(world):
    damage(world, "norm")
    world.backend.faults["commit"] = Fault.FLIP  # another tensor, so that the strict proof fails
    await check(world)
    await world.clock.settle()
    assert world.state.repair.state is SwapState.ROLLED_BACK
    assert not world.coordinator.ready()
    assert not world.state.gate.open
    await world.clock.advance(5)
    world.assert_serves(world.template)
    assert world.state.repairs == 1


async def test_after_too_many_attempts_the_engine_is_quarantined(tmp_path):
    world = World(tmp_path, repair_attempts=3)
    await world.start()
    damage(world, "norm")
    world.sources.touched.add(world.template.uri)  # the bytes of this version are nowhere any more
    await check(world)
    await world.clock.advance(60)
    assert world.state.quarantined
    assert world.state.reason == "Quarantined"
    assert "norm" in world.state.message
    assert world.coordinator.stuck
    assert len([step for step in world.backend.steps if step == "stage"]) == 3
    await world.stop()


async def test_without_repairs_the_engine_is_quarantined_at_once(tmp_path):
    world = World(tmp_path, repair_attempts=0)
    await world.start()
    damage(world, "norm")
    await check(world)
    assert world.state.quarantined
    await world.stop()


async def test_a_worker_that_dies_meanwhile_is_loaded_whole_and_that_is_a_repair_too(world):
    damage(world, "norm")
    world.backend.faults["stage"] = Fault.DIE
    await check(world)
    await world.clock.advance(5)
    world.assert_serves(world.template)
    assert (world.state.restarts, world.state.drifted) == (1, [])


async def test_tensors_that_are_right_again_need_no_repair(world):
    world.backend.faults["hashes"] = Fault.FLIP
    before = dict(world.backend.live)

    async def look():
        found = await world.coordinator.check(CheckRequest())
        world.backend.live = dict(before)
        return found

    assert not (await world.clock.run(look())).ok
    await world.clock.settle()
    world.assert_serves(world.template)
    assert "stage" not in world.backend.steps


async def test_a_source_that_is_away_for_a_while_is_waited_for(world):
    damage(world, "norm")
    world.backend.error = SourceUnreadable("the volume is away")
    world.backend.faults["stage"] = Fault.ERROR
    await check(world)
    await world.clock.settle()
    assert "the volume is away" in world.state.repair.error.message
    await world.clock.advance(3)
    world.assert_serves(world.template)


async def test_the_last_operation_that_was_asked_for_stays_the_last_one(world):
    """Its name tells the operator which attempt comes next."""
    target = world.publish("1.1", checkpoint(q=b"QQQQ"))
    status = await world.swap(target)
    damage(world, "norm")
    await check(world)
    await world.clock.settle()
    assert world.state.operation == status
    assert world.coordinator.operation(world.state.repair.operation_id).state is SwapState.SERVING


async def test_a_parameter_that_was_converted_with_a_loss_is_known_by_its_own_hash(world):
    world.backend.lossy.add("norm")
    found = await check(world)
    assert (found.ok, found.checked, list(found.runtime), found.unread) == (True, 4, ["made of norm"], [])
    assert "norm" not in found.tensors
    damage(world, "norm")
    found = await check(world)
    (item,) = found.mismatched
    assert (item.name, item.coordinates) == ("made of norm", "runtime")
    await world.clock.settle()
    world.assert_serves(world.template)
    assert world.state.repair.plan.changed_names == ["norm"]
