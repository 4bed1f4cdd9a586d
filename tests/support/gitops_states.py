"""Every state that the operator writes into an object, by name, as GitOps controllers read it.

The real planner and the real summary make them, so none can be out of date. Refuses to know what a controller makes
of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec

from modelswap_engine.protocol.errors import ErrorBody
from modelswap_engine.protocol.states import SwapState
from modelswap_operator.api.modelversion import Canary, OnFailure
from modelswap_operator.api.reasons import Reason
from modelswap_operator.planning.actions import Wait
from modelswap_operator.status.summarize import summarize
from tests.support.adapter_world import AdapterWorld, source
from tests.support.slot_steps import long_after, until
from tests.support.slot_world import World

Object = dict[str, Any]


def seen(world: World) -> Object:
    """Return the ModelVersion of a slot as the API server holds it."""
    return _object("ModelVersion", world.generation, world.spec, world.status)


def _object(kind: str, generation: int, spec: object, status: object) -> Object:
    return {
        "apiVersion": "modelswap.dev/v1alpha1",
        "kind": kind,
        "metadata": {"name": "m", "namespace": "default", "generation": generation},
        "spec": msgspec.to_builtins(spec),
        "status": {"observedGeneration": -1} | msgspec.to_builtins(status),  # the schema's default
    }


def _settled(**arguments: Any) -> World:
    world = World(**arguments)
    world.settle()
    return world


def _new() -> Object:
    return seen(World())


def _without_status() -> Object:
    found = seen(World())
    del found["status"]
    return found


def _no_pods_yet() -> Object:
    world = World(pods=0)
    world.add_pod(None, ready=False)
    world.run_pass()
    return seen(world)


def _scaled_to_zero() -> Object:
    world = _settled()
    world.pods.clear()
    world.settle()
    return seen(world)


def _changed_at_zero() -> Object:
    world = _settled()
    world.pods.clear()
    world.settle()
    world.bump("1.1")
    world.settle()
    return seen(world)


def _bumped_unseen() -> Object:
    world = _settled()
    world.bump("1.1")
    return seen(world)


def _swapping() -> Object:
    world = _settled()
    world.bump("1.1")
    until(world, SwapState.STAGED)
    world.run_pass()
    return seen(world)


def _soaking() -> Object:
    world = _settled(pods=3, canary=Canary(pods=1, soak_seconds=600))
    world.bump("1.1")
    for _ in range(100):
        if "1.1" in world.serving():
            break
        if isinstance(world.run_pass(), Wait):
            world.tick()
    for _ in range(3):
        world.run_pass()
    return seen(world)


def _refused(**spec: Any) -> World:
    world = _settled()
    world.bump("2.0", **spec)
    world.settle()
    return world


def _one_pod_refuses(*, end: bool, on_failure: OnFailure = OnFailure.ROLLBACK) -> Object:
    """The first pod takes the version, the second refuses it."""
    world = _settled(on_failure=on_failure)
    world.pods[1].refuses.add("1.1")
    world.bump("1.1")
    for _ in range(200):
        if isinstance(world.run_pass(), Wait):
            world.tick()
        if world.condition("Ready") == ("False", "IncompatibleModel"):
            break
    if end:
        world.settle()
    return seen(world)


def _retrying() -> Object:
    world = _settled()
    world.pods[0].transient_faults = world.pods[1].transient_faults = 1
    world.bump("1.1")
    until(world, SwapState.ABORTED)
    world.run_pass()
    world.run_pass()
    return seen(world)


def _not_now() -> Object:
    world = _settled()
    world.not_now = ErrorBody(code="NoSpace", message="no room", retryable=True)
    world.bump("1.1")
    world.run_pass()
    world.run_pass()
    return seen(world)


def _silent() -> Object:
    world = _settled()
    world.pods[0].reachable = False
    world.run_pass()
    return seen(world)


def _restarting() -> Object:
    world = _settled()
    world.pods[0].restart()
    world.run_pass()
    return seen(world)


def _overdue() -> Object:
    world = _settled()
    for pod in world.pods:
        pod.transient_faults = 1000
    world.bump("1.1")
    long_after(world)
    return seen(world)


def _suspended(world: World) -> Object:
    world.edit(suspend=True)
    world.settle()
    return seen(world)


def _suspended_before_it_began() -> Object:
    world = _settled()
    world.bump("1.1", suspend=True)
    world.settle()
    return seen(world)


def _suspended_in_the_middle() -> Object:
    world = _settled()
    world.bump("1.1")
    until(world, SwapState.STAGED)
    world.edit(suspend=True)
    world.run_pass()
    return seen(world)


def _resumed() -> Object:
    world = _settled()
    world.bump("1.1", suspend=True)
    world.settle()
    world.edit(suspend=False)
    return seen(world)


def _reverted() -> Object:
    world = _refused()
    world.bump("1.0")
    world.settle()
    return seen(world)


def _unreadable() -> Object:
    world = _settled()
    world.generation += 1
    snapshot = replace(world.snapshot(), spec=None, spec_error="Expected `str`, got `int` - at `$.version`")
    world.status = summarize(snapshot, Wait(), world.now)
    return seen(world)


def _adapter(change: Callable[[AdapterWorld], None] | None = None, *, settled: bool = True) -> Object:
    """An adapter on its way or, by default, at its end; changed after that."""
    world = AdapterWorld()
    world.settle()
    world.create("a")
    if settled:
        world.settle()
    if change is not None:
        change(world)
    (found,) = world.adapters
    return _object("LoRAAdapter", found.generation, found.spec, found.status)


def _loading(world: AdapterWorld) -> None:
    for _ in range(50):
        if world.says("a").get("Reconciling") == ("True", Reason.LOADING_ADAPTER):
            return
        world.run_pass()
    raise AssertionError(f"it never loads: {world.says('a')}")


def _impossible(world: AdapterWorld) -> None:
    world.break_content("2")
    world.change("a", sources=(source("2"),))
    world.rest()


def _unreadable_now(world: AdapterWorld) -> None:
    world.break_content("2", "SourceNotFound", retryable=True)
    world.change("a", sources=(source("2"),))
    for _ in range(4):
        world.run_pass()


def _adapter_suspended(world: AdapterWorld) -> None:
    world.change("a", suspend=True)
    world.run_pass()


def _slot_suspended(world: AdapterWorld) -> None:
    world.edit(suspend=True)
    world.change("a", sources=(source("2"),))
    world.run_pass()


def _slot_gone(world: AdapterWorld) -> None:
    world.deleted = True
    world.run_pass()


MODEL_VERSIONS: dict[str, Callable[[], Object]] = {
    "new": _new,
    "without a status": _without_status,
    "no pod has been ready": _no_pods_yet,
    "done": lambda: seen(_settled()),
    "scaled to zero": _scaled_to_zero,
    "changed at zero": _changed_at_zero,
    "bumped, not seen yet": _bumped_unseen,
    "swapping": _swapping,
    "soaking": _soaking,
    "a swap failed and is tried again": _retrying,
    "the plan cannot be had now": _not_now,
    "a pod does not answer": _silent,
    "a pod restarts": _restarting,
    "overdue": _overdue,
    "refused": lambda: seen(_refused()),
    "rolling back": lambda: _one_pod_refuses(end=False),
    "rolled back": lambda: _one_pod_refuses(end=True),
    "halted": lambda: _one_pod_refuses(end=True, on_failure=OnFailure.HALT),
    "reverted": _reverted,
    "suspended when done": lambda: _suspended(_settled()),
    "suspended when refused": lambda: _suspended(_refused()),
    "suspended before it began": _suspended_before_it_began,
    "suspended in the middle": _suspended_in_the_middle,
    "resumed, not seen yet": _resumed,
    "unreadable": _unreadable,
}
LORA_ADAPTERS: dict[str, Callable[[], Object]] = {
    "adapter, new": lambda: _adapter(settled=False),
    "adapter, loading": lambda: _adapter(_loading, settled=False),
    "adapter, loaded": _adapter,
    "adapter, edited, not seen yet": lambda: _adapter(lambda world: world.change("a", pinned=True)),
    "adapter, its source cannot be read now": lambda: _adapter(_unreadable_now),
    "adapter, impossible": lambda: _adapter(_impossible),
    "adapter, suspended": lambda: _adapter(_adapter_suspended),
    "adapter, its slot is suspended": lambda: _adapter(_slot_suspended),
    "adapter, its slot is gone": lambda: _adapter(_slot_gone),
}
STATES = MODEL_VERSIONS | LORA_ADAPTERS
