"""Measures one operator: many pods that follow one change, many slots at rest, and one change among many slots."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from bench.scale.seen import Seen, look
from bench.scale.world import World
from tests.support.apiserver import ApiServer
from tests.support.custom import install_definitions
from tests.support.operated import OperatorProcess, granted
from tests.support.rest import Rest

PATIENCE_SECONDS: Final = 900.0
SETTLE_SECONDS: Final = 5.0
"""For what was under way to end before something is measured."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much of everything: ``pods`` in each of ``slots``, ``changes`` among ``idle_slots`` of one pod each."""

    slots: int = 20
    pods: int = 50
    idle_slots: int = 1000
    changes: int = 100
    rest_seconds: float = 60.0


class ScaleResult(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Figures of one run; times in seconds, memory in bytes. ``converged`` is False when some pod did not follow.

    Attributes:
        seconds: from the change of all slots to all of them Ready.
        staged_ahead: pods that had staged the version before the first of their slot changed, which is the default.
        requests_per_pod: of the operator to the API server meanwhile, tokens included.
        tokens: that the operator asked the API server for, since it began.
        rest_writes: of the operator to the API server while nothing was to be done, but for its Lease.
        first_call_p50: from the change of one slot's spec to the first call to one of its pods, and ``first_call_p99``.
    """

    converged: bool
    slots: int
    pods: int
    seconds: float = 0.0
    staged_ahead: int = 0
    requests_per_pod: float = 0.0
    tokens: int = 0
    cpu_seconds: float = 0.0
    rss_bytes: int = 0
    rest_seconds: float = 0.0
    rest_writes: int = 0
    rest_cpu_share: float = 0.0
    idle_slots: int = 0
    changes: int = 0
    first_call_p50: float = 0.0
    first_call_p99: float = 0.0

    def line(self) -> str:
        """Return all figures in one line."""
        if not self.converged:
            return f"scale: NOT converged within {PATIENCE_SECONDS:.0f} s ({self.pods} pods in {self.slots} slots)"
        return (
            f"scale: {self.pods} pods in {self.slots} slots converged in {self.seconds:.1f} s "
            f"({self.staged_ahead} staged ahead), {self.requests_per_pod:.1f} API calls per pod, {self.tokens} tokens, "
            f"{self.cpu_seconds:.1f} s of processor time, "
            f"{self.rss_bytes / 1e6:.0f} MB; at rest {self.rest_writes} writes in {self.rest_seconds:.0f} s, "
            f"{100 * self.rest_cpu_share:.1f} % of a core; among {self.idle_slots} slots, spec change to first call of "
            f"an engine: p50 {1e3 * self.first_call_p50:.0f} ms, p99 {1e3 * self.first_call_p99:.0f} ms "
            f"({self.changes} changes)"
        )


async def measure_scale(size: Size, *, report: Callable[[str], None]) -> ScaleResult:
    """Run all of it."""
    with tempfile.TemporaryDirectory(prefix="modelswap-bench-") as folder:
        home = Path(folder)
        report("a real API server")
        with await asyncio.to_thread(lambda: ApiServer(home / "api").__enter__()) as server:
            await asyncio.to_thread(install_definitions, server)
            async with _operated(server, home, "many", block=1) as (world, operator):
                found = await _rollout(world, operator, size, report)
            if not found.converged:
                return found
            async with _operated(server, home, "idle", block=2) as (world, operator):
                return await _changes(world, found, size, report)


@asynccontextmanager
async def _operated(
    server: ApiServer, home: Path, namespace: str, *, block: int
) -> AsyncIterator[tuple[World, OperatorProcess]]:
    folder = home / namespace
    folder.mkdir()
    account = await asyncio.to_thread(granted, server, Rest(server), folder, namespace=namespace)
    operator = OperatorProcess(server, folder, account=account)
    world = World(server, namespace=namespace, block=block)
    # As the chart starts it; the tests look more often.
    operator.start("--resync-seconds=60")
    try:
        await asyncio.to_thread(operator.wait_ready)
        yield world, operator
    finally:
        await asyncio.to_thread(operator.stop)
        await world.close()


async def _rollout(world: World, operator: OperatorProcess, size: Size, report: Callable[[str], None]) -> ScaleResult:
    await world.add_slots(size.slots, pods=size.pods, version="1.0", report=report)
    report("the slots adopt what their pods serve")
    result = ScaleResult(converged=False, slots=size.slots, pods=size.slots * size.pods)
    if not await world.settled("1.0", seconds=PATIENCE_SECONDS, report=report):
        return result
    report(f"nothing to do for {size.rest_seconds:.0f} s")
    await asyncio.sleep(SETTLE_SECONDS)
    before, began = await _look(operator), time.monotonic()
    await asyncio.sleep(size.rest_seconds)
    rest, rested = (await _look(operator)).since(before), time.monotonic() - began
    report("all slots change from 1.0 to 1.1")
    before, began = await _look(operator), time.monotonic()
    await asyncio.gather(*(world.bump(slot, "1.1") for slot in world.slots))
    if not await world.settled("1.1", seconds=PATIENCE_SECONDS, report=report):
        return result
    took, done = time.monotonic() - began, (await _look(operator)).since(before)
    return msgspec.structs.replace(
        result,
        converged=True,
        seconds=took,
        tokens=sum(len(pod.sidecar.tokens) for pod in world.pods),
        staged_ahead=sum(pod.staged_ahead for pod in world.pods),
        requests_per_pod=done.requests / (size.slots * size.pods),
        cpu_seconds=done.cpu,
        rss_bytes=done.rss,
        rest_seconds=rested,
        rest_writes=rest.writes,
        rest_cpu_share=rest.cpu / rested,
    )


async def _changes(world: World, found: ScaleResult, size: Size, report: Callable[[str], None]) -> ScaleResult:
    await world.add_slots(size.idle_slots, pods=1, version="1.0", report=report)
    report(f"{size.idle_slots} slots adopt what their pods serve")
    if not await world.settled("1.0", seconds=PATIENCE_SECONDS, report=report):
        return msgspec.structs.replace(found, converged=False)
    await asyncio.sleep(SETTLE_SECONDS)
    report(f"{size.changes} of them change, one after another")
    times = []
    for slot in world.slots[:: size.idle_slots // size.changes]:
        began = time.monotonic()
        await world.bump(slot, "1.1")
        while not slot.first_call:
            if time.monotonic() - began > PATIENCE_SECONDS:
                return msgspec.structs.replace(found, converged=False)
            await asyncio.sleep(0.002)
        times.append(slot.first_call - began)
    ranked = statistics.quantiles(times, n=100, method="inclusive")
    return msgspec.structs.replace(
        found, idle_slots=size.idle_slots, changes=len(times), first_call_p50=ranked[49], first_call_p99=ranked[98]
    )


async def _look(operator: OperatorProcess) -> Seen:
    status, page = await asyncio.to_thread(operator.get, "/metrics")
    assert operator.child is not None
    if status != 200:
        raise RuntimeError(f"the operator answers {status} for its metrics; its log ends with\n{operator.child.tail()}")
    return look(page, operator.child.pid)
