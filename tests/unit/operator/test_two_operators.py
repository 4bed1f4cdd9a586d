"""Which operator an object is for, and who wrote its status. In no time."""

from dataclasses import replace

import msgspec

from modelswap_operator.api.modelversion import ModelVersionStatus
from modelswap_operator.planning.actions import Wait
from modelswap_operator.planning.snapshot import Snapshot
from modelswap_operator.status.events import of_status
from modelswap_operator.status.summarize import summarize
from tests.support.slot_world import World

FIRST, SECOND = "team-a/modelswap", "modelswap-system/modelswap"


def written(world: World, by: str) -> ModelVersionStatus:
    return summarize(replace(world.snapshot(), operator=by), Wait(), world.now)


def test_an_object_that_names_another_operator_is_left_alone() -> None:
    seen = Snapshot(namespace="default", slot="slot", epoch=1, operator=FIRST)
    assert not seen.elsewhere
    assert not replace(seen, reserved_for=FIRST).elsewhere
    assert replace(seen, reserved_for=SECOND).elsewhere


def test_the_status_says_who_wrote_it_and_is_not_written_only_for_that() -> None:
    world = World()
    world.settle()
    world.status = written(world, FIRST)
    assert world.status.operator == ""  # nothing else was new
    world.bump("1.1")
    world.status = written(world, FIRST)
    assert world.status.operator == FIRST
    assert written(world, SECOND) == world.status, "two at rest would take turns for ever"
    world.settle()
    after = written(world, SECOND)
    notes = of_status(msgspec.structs.replace(after, operator=FIRST), msgspec.structs.replace(after, operator=SECOND))
    assert [note.reason for note in notes] == ["OperatorChanged"]
