"""SIGKILL at each point: a new process on the same journal ends in a state that no client and no operator can fault."""

import pytest

from modelswap_engine.protocol.assignment import Assignment, AssignmentCandidate, AssignmentTarget
from modelswap_engine.protocol.messages import VersionRef
from modelswap_engine.protocol.policy import Traffic, TrafficMode
from modelswap_engine.protocol.states import SwapState
from tests.support.swapping import OWNER, POD, World, checkpoint, request

STATES = [
    SwapState.PLANNED,
    SwapState.FETCHING,
    SwapState.STAGED,
    SwapState.PREPARED,
    SwapState.PAUSING,
    SwapState.COMMITTING,
    SwapState.COMMITTED,
    SwapState.VERIFIED,
]


@pytest.fixture
async def world(tmp_path):
    world = World(tmp_path)
    await world.start()
    yield world
    await world.stop()


async def killed_at(
    world: World,
    target: VersionRef,
    state: SwapState,
    *,
    engine_survives: bool,
    mode: TrafficMode = TrafficMode.DRAIN,
) -> None:
    await world.coordinator.swap(request(target, revision=3, traffic=Traffic(mode=mode)))

    async def until():
        async for status in world.coordinator.watch("op-1"):
            if status.state is state:
                return

    import asyncio

    # Step by step, so that nothing of the transaction runs on once the state is reached.
    task = asyncio.ensure_future(until())
    while not task.done():
        await asyncio.sleep(0)
    await world.crash(engine_survives=engine_survives)


@pytest.mark.parametrize("mode", [TrafficMode.DRAIN, TrafficMode.OVERLAP])
@pytest.mark.parametrize("engine_survives", [False, True])
@pytest.mark.parametrize("state", STATES)
async def test_killed_in_a_swap_without_an_assignment(world, state, engine_survives, mode):
    target = world.publish("1.1", checkpoint(q=b"QQQQ"))
    await killed_at(world, target, state, engine_survives=engine_survives, mode=mode)
    intended = world.journal.state.intent is not None or world.journal.state.outcome("op-1") is not None
    await world.start()
    expected = target if intended else world.template
    world.assert_serves(expected)
    status = world.coordinator.operation("op-1")
    assert status.state is (SwapState.SERVING if intended else SwapState.ABORTED)
    assert world.state.revision == 3
    assert await world.coordinator.swap(request(target, revision=3)) == status  # same id, same answer
    again = await world.swap(target, "op-2", revision=3)
    assert again.state is SwapState.SERVING
    world.assert_serves(target)


@pytest.mark.parametrize("state", STATES)
async def test_killed_in_a_swap_with_the_assignment_published(world, state):
    target = world.publish("1.1", checkpoint(q=b"QQQQ"))
    world.assignment = Assignment(
        owner_uid=OWNER,
        epoch=1,
        revision=3,
        stable=AssignmentTarget(version="1.0", uri=world.template.uri, digest=world.template.digest),
        candidate=AssignmentCandidate(version="1.1", uri=target.uri, digest=target.digest, pod_uids=[POD]),
    )
    await killed_at(world, target, state, engine_survives=False)
    await world.start()
    world.assert_serves(target)
    assert world.coordinator.operation("op-1").state is SwapState.SERVING


async def test_killed_after_a_swap_serves_what_was_served(world):
    target = world.publish("1.1", checkpoint(q=b"QQQQ"))
    before = await world.swap(target)
    await world.crash()
    await world.start()
    world.assert_serves(target)
    assert world.coordinator.operation("op-1") == before
    assert world.state.operation == before


async def test_killed_after_a_refused_swap_serves_the_old_version(world):
    bad = world.publish("bad", checkpoint(extra=b"x"))
    before = await world.swap(bad)
    await world.crash()
    await world.start()
    world.assert_serves(world.template)
    assert world.coordinator.operation("op-1") == before


async def test_fences_outlive_the_process(world):
    from modelswap_engine.protocol.errors import ForeignOwner, StaleRevision

    target = world.publish("1.1", checkpoint(q=b"QQQQ"))
    await world.swap(target, revision=5)
    await world.crash()
    await world.start()
    with pytest.raises(StaleRevision):
        await world.coordinator.swap(request(world.template, "op-2", revision=4))
    with pytest.raises(ForeignOwner):
        await world.coordinator.swap(request(world.template, "op-3", revision=6, owner="you"))


async def test_a_lost_journal_leaves_the_assignment_in_charge(world):
    target = world.publish("1.1", checkpoint(q=b"QQQQ"))
    await world.swap(target, revision=5)
    world.assignment = Assignment(
        owner_uid=OWNER,
        epoch=1,
        revision=5,
        stable=AssignmentTarget(version="1.1", uri=target.uri, digest=target.digest),
    )
    (world.folder / "journal").unlink()
    await world.crash()
    await world.start()
    world.assert_serves(target)
    assert world.state.revision == 5


async def test_a_crash_in_the_middle_of_writing_the_outcome_is_as_if_it_was_not_written(world):
    target = world.publish("1.1", checkpoint(q=b"QQQQ"))
    await world.swap(target)
    path = world.folder / "journal"
    lines = path.read_bytes().splitlines(keepends=True)
    await world.crash()
    world.journal.close()
    path.write_bytes(b"".join(lines[:-2]) + lines[-2][:20])
    world.build()
    assert world.journal.state.intent is not None
    await world.start()
    world.assert_serves(target)
    assert world.coordinator.operation("op-1").state is SwapState.SERVING


@pytest.mark.parametrize("pinned", [True, False])
async def test_a_crash_between_the_last_two_records_keeps_the_new_version(world, pinned):
    target = world.publish("1.1", checkpoint(q=b"QQQQ"))
    await world.swap(target if pinned else VersionRef(version="1.1", uri=target.uri))
    path = world.folder / "journal"
    lines = path.read_bytes().splitlines(keepends=True)
    await world.crash()
    world.journal.close()
    path.write_bytes(b"".join(lines[:-1]))
    world.build()
    await world.start()
    world.assert_serves(target)
    assert world.coordinator.operation("op-1").state is SwapState.SERVING


async def test_each_record_of_a_start_is_true_without_those_after_it(world):
    target = world.publish("1.1", checkpoint(q=b"QQQQ"))
    await world.swap(target, owner="cli")
    world.template = world.publish("2.0", checkpoint(k=b"KKKK"))
    await world.crash()
    path = world.folder / "journal"
    before = len(path.read_bytes().splitlines())
    await world.start()
    lines = path.read_bytes().splitlines(keepends=True)
    for kept in range(before, len(lines)):
        await world.crash()
        world.journal.close()
        path.write_bytes(b"".join(lines[:kept]))
        world.build()
        await world.start()
        world.assert_serves(world.template)
