"""What may be done to a pod that can prove neither version reaches it, whatever is the matter with the versions."""

from msgspec.structs import replace

from modelswap_engine.protocol.assignment import EngineRestart
from modelswap_operator.api.modelversion import RecoverySpec
from tests.support.slot_world import World

NEVER = RecoverySpec(engine_restart=EngineRestart.NEVER)


def told(world: World) -> EngineRestart | None:
    assert world.assignment is not None
    return world.assignment.engine_restart


def test_the_objects_word_is_in_the_assignment_and_follows_it() -> None:
    world = World(pods=2)
    world.settle()
    assert told(world) is EngineRestart.ALLOWED
    world.edit(recovery=NEVER)
    world.settle()
    assert told(world) is EngineRestart.NEVER
    assert world.serving() == ["1.0", "1.0"]
    assert world.condition("Ready") == ("True", "Succeeded")


def test_pods_that_nobody_can_ask_for_a_version_are_told_all_the_same() -> None:
    world = World(pods=2)
    world.settle()
    for pod in world.pods:
        pod.quarantined, pod.ready = True, False
    world.bump("1.1", recovery=NEVER)
    world.settle()
    assert told(world) is EngineRestart.NEVER
    assert world.assignment is not None
    assert world.assignment.stable is not None
    assert world.assignment.stable.version == "1.0"  # nobody has proved the other one
    world.bump("1.1", recovery=RecoverySpec())
    world.settle()
    assert told(world) is EngineRestart.ALLOWED


def test_an_assignment_of_an_older_operator_is_not_rewritten_for_the_default() -> None:
    world = World(pods=1)
    world.settle()
    assert world.assignment is not None
    world.assignment = replace(world.assignment, engine_restart=None)
    world.settle()
    assert told(world) is None
    world.edit(recovery=NEVER)
    world.settle()
    assert told(world) is EngineRestart.NEVER
