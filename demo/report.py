"""The demo's figures: as lines for a person, and as `build/demo.json`. Pure but for writing that file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from demo.answers import Summary
from demo.console import megabytes, milliseconds
from modelswap_engine.protocol.engine_state import EngineState
from modelswap_engine.protocol.messages import Plan, SwapStatus
from tests.support.cluster.provider import Cluster
from tests.support.pod import Pod


@dataclass(slots=True)
class Facts:
    """What the run has shown so far; ``engine`` is the kind of the pods, ``source`` where versions came from."""

    engine: str = "embedded"
    source: str = "mounted"
    before: str = ""
    after: str = ""
    pods: list[tuple[Pod, EngineState]] = field(default_factory=list)
    publish_seconds: float = 0.0
    swap_seconds: float = 0.0
    swapping: Summary | None = None
    restart_seconds: float = 0.0
    restarting: Summary | None = None
    refused: list[dict[str, str]] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)


def swap_lines(facts: Facts) -> Iterator[str]:
    """Say what the swap did."""
    plan = _plan(facts)
    if plan is not None:
        yield (
            f"changed: {plan.changed_tensors} of {plan.total_tensors} tensors, "
            f"{megabytes(plan.changed_bytes)} of {megabytes(plan.total_bytes)}"
        )
    yield f"from apply to Ready: {facts.swap_seconds:.1f} s"
    if facts.publish_seconds:
        publishing = facts.publish_seconds
        whole = publishing + facts.swap_seconds
        yield f"from a trained checkpoint to Ready: {whole:.1f} s, of which publishing took {publishing:.1f} s"
    for pod, state in facts.pods:
        swap = state.operation
        yield f"pod {pod.name} (UID {pod.uid}, since {pod.started}, {pod.restarts} restarts)"
        if swap is not None:
            yield (
                f"    fetched {megabytes(swap.bytes_fetched)}{_shared(swap)}, "
                f"stop latency {milliseconds(swap.stop_latency_seconds)}, "
                f"commit window {swap.commit_window_microseconds or 0:.0f} µs, "
                f"gate closed {milliseconds(swap.pause_seconds)}"
            )
    if facts.swapping is not None:
        yield from facts.swapping.lines()
    yield f"before: {facts.before}"
    yield f"after:  {facts.after}"


def restart_lines(facts: Facts) -> Iterator[str]:
    """Compare with the restart: the same change, counted from the changed object to all pods serving it."""
    if facts.restarting is None:
        return
    yield from facts.restarting.lines()
    yield f"1.0 → 1.1 by restart: {facts.restart_seconds:.1f} s and new pods; by swap: {facts.swap_seconds:.1f} s"


def write(file: Path, facts: Facts, *, cluster: Cluster) -> None:
    """Write the figures of the run."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(as_dict(facts, kind=cluster.provider, version=cluster.version), indent=1) + "\n")


def as_dict(facts: Facts, *, kind: str, version: str) -> dict[str, Any]:
    """Return the figures with stable names; times in the unit that the name says."""
    plan, swapping, restarting = _plan(facts), facts.swapping, facts.restarting
    return {
        "engine": facts.engine,
        "source": facts.source,
        "requests": {
            "served": swapping.served if swapping else 0,
            "failed": swapping.failed if swapping else 0,
            "mixed": swapping.mixed if swapping else 0,
            "reconnects": swapping.reconnects if swapping else 0,
        },
        "pods": [
            {
                "name": pod.name,
                "uid": pod.uid,
                "restarts": pod.restarts,
                "pauseSeconds": state.operation.pause_seconds if state.operation else None,
                "stopLatencySeconds": state.operation.stop_latency_seconds if state.operation else None,
                "commitWindowMicroseconds": state.operation.commit_window_microseconds if state.operation else None,
                "bytesFetched": state.operation.bytes_fetched if state.operation else None,
                "bytesFromPeers": state.operation.bytes_from_peers if state.operation else None,
            }
            for pod, state in facts.pods
        ],
        "changed": {"tensors": plan.changed_tensors, "bytes": plan.changed_bytes} if plan else {},
        "total": {"tensors": plan.total_tensors, "bytes": plan.total_bytes} if plan else {},
        "publishSeconds": round(facts.publish_seconds, 3),
        "swapSeconds": round(facts.swap_seconds, 3),
        "rolloutRestart": {
            "seconds": round(facts.restart_seconds, 3),
            "served": restarting.served if restarting else 0,
            "failed": restarting.failed if restarting else 0,
        },
        "refused": facts.refused,
        "cluster": {"kind": kind, "version": version},
    }


def _shared(swap: SwapStatus) -> str:
    """Say what came from other pods, where something did."""
    return f" and {megabytes(swap.bytes_from_peers)} from another pod" if swap.bytes_from_peers else ""


def _plan(facts: Facts) -> Plan | None:
    """Return the plan of the swap; all pods have the same."""
    return next((state.operation.plan for _, state in facts.pods if state.operation), None)
