"""Whether a pod that can prove neither version may be restarted: the object's word, as its assignment has it."""

from pathlib import Path

from modelswap_engine.protocol.assignment import Assignment, EngineRestart
from modelswap_engine.protocol.errors import BadRequest
from tests.support.swapping import World


async def test_the_object_decides_over_the_option_whether_a_restart_is_allowed(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.start()
    try:
        for option in (True, False):
            assert await world.coordinator.restart_allowed(otherwise=option) is option
            world.assignment = Assignment(owner_uid="owner")  # an older operator wrote it
            assert await world.coordinator.restart_allowed(otherwise=option) is option
            world.assignment = Assignment(owner_uid="owner", engine_restart=EngineRestart.NEVER)
            assert await world.coordinator.restart_allowed(otherwise=option) is False
            world.assignment = Assignment(owner_uid="owner", engine_restart=EngineRestart.ALLOWED)
            assert await world.coordinator.restart_allowed(otherwise=option) is True
            world.assignment = None
    finally:
        await world.stop()


async def test_a_probe_has_an_answer_also_where_the_assignment_cannot_be_read(tmp_path: Path) -> None:
    def unreadable() -> Assignment | None:
        raise BadRequest("assignment: Permission denied", advice="check the volume mount")

    world = World(tmp_path)
    await world.clock.run(world.coordinator.start(world.template, None, reread=unreadable))
    try:
        assert await world.coordinator.restart_allowed(otherwise=False) is False
        assert await world.coordinator.restart_allowed() is True
    finally:
        await world.stop()
