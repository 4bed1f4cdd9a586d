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
from modelswap_operator.api.modelversion import ModelVersionStatus, OnFailure
from modelswap_operator.api.reasons import ConditionType
from modelswap_operator.planning.actions import Wait
from modelswap_operator.status.conditions import Verdict, conditions
from modelswap_operator.status.summarize import summarize
from tests.support.slot_steps import long_after, until
from tests.support.slot_world import START, World

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


def _adapter(*verdicts: Verdict, observed: int, generation: int = 2) -> Object:
    """Conditions of both kinds are made by the same hand."""
    found = conditions(verdicts, observed=(), generation=generation, now=START)
    spec = {"adapterName": "a", "modelRef": {"name": "m"}, "sources": [{"uri": "file:///models/a"}]}
    status = ModelVersionStatus(observed_generation=observed, conditions=found)
    return _object("LoRAAdapter", generation, spec, status)


def _said(kind: ConditionType, status: bool | None = True) -> Verdict:
    return Verdict(kind, status, "Because", "what the operator says")


MODEL_VERSIONS: dict[str, Callable[[], Object]] = {
    "new": _new,
    "without a status": _without_status,
    "no pod has been ready": _no_pods_yet,
    "done": lambda: seen(_settled()),
    "scaled to zero": _scaled_to_zero,
    "bumped, not seen yet": _bumped_unseen,
    "swapping": _swapping,
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
    "adapter, new": lambda: _adapter(observed=-1),
    "adapter, loading": lambda: _adapter(
        _said(ConditionType.READY, None), _said(ConditionType.RECONCILING), observed=1
    ),
    "adapter, loaded": lambda: _adapter(_said(ConditionType.READY), observed=2),
    "adapter, impossible": lambda: _adapter(
        _said(ConditionType.READY, False), _said(ConditionType.STALLED), observed=2
    ),
    "adapter, suspended": lambda: _adapter(
        _said(ConditionType.READY, None), _said(ConditionType.SUSPENDED), observed=2
    ),
}
STATES = MODEL_VERSIONS | LORA_ADAPTERS
