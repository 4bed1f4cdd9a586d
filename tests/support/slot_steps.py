"""What tests of a slot do again and again with a `World`. Refuses to know what is expected."""

from datetime import timedelta

from modelswap_engine.protocol.states import SwapState
from modelswap_operator.planning.actions import StartSwaps, Wait
from tests.support.slot_world import World


def started(world: World) -> list[tuple[str, ...]]:
    """Return the names of the pods of each order to swap."""
    return [tuple(o.pod.name for o in a.orders) for a in world.actions(StartSwaps)]


def named_first(world: World) -> list[str]:
    """Go on until the first pods are named in the assignment, and return their UIDs."""
    for _ in range(3):
        world.run_pass()
    assert world.assignment is not None
    assert world.assignment.candidate is not None
    return world.assignment.candidate.pod_uids


def until(world: World, state: SwapState, limit: int = 50) -> None:
    """Go on until some pod's operation is in a state."""
    for _ in range(limit):
        if any(p.operation is not None and p.operation.state is state for p in world.pods):
            return
        if isinstance(world.run_pass(), Wait):
            world.tick()
    raise AssertionError(f"no pod came to {state}")


def long_after(world: World) -> None:
    """Let two deadlines go by, with time for what can be done before and after each."""
    for _ in range(3):
        for _ in range(40):
            if isinstance(world.run_pass(), Wait):
                world.tick()
        world.now += timedelta(seconds=601)
    world.run_pass()
