"""What the way in costs each request: pause gate, update lock and adapter registry, with nothing in the way.

The product's own objects on an event loop, without an engine: every request enters, takes its adapter, says that the
engine has its prompt, gives the adapter back and leaves.
"""

from __future__ import annotations

import statistics
import time
from typing import Final

import msgspec

from bench.turns import Budget
from modelswap_engine.lora.entries import Content, Limits
from modelswap_engine.lora.registry import Registry
from modelswap_engine.protocol.messages import VersionRef
from modelswap_engine.swap.admission import Admissions
from modelswap_engine.swap.clock import SystemClock
from modelswap_engine.swap.gate import Gate
from modelswap_engine.swap.lock import UpdateLock

_LIVE: Final = VersionRef(version="1.0", digest="sha256:" + "0" * 64)
_INSIDE: Final = 16
_REQUESTS: Final = 5000


class GateRow(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Processor time for one request in µs, medians of ``turns`` turns; ``others`` requests were inside meanwhile."""

    admission_microseconds: float
    registry_microseconds: float
    total_microseconds: float
    turns: int
    others: int


async def measure_gate(budget: Budget, *, requests: int = _REQUESTS, seconds: float = 10.0) -> GateRow:
    """Time many requests one after the other, beside some that stay inside."""
    clock = SystemClock()
    admissions = Admissions(gate=Gate(clock=clock), lock=UpdateLock(clock=clock), live=lambda: _LIVE)
    registry = _registry(clock)
    others = [admissions.admit() for _ in range(_INSIDE)]
    for other in others:
        (await other.__aenter__()).submitted()
    alone, together = list[float](), list[float]()
    try:
        for _ in budget.turns(most=20, seconds=seconds, least=3):
            started = time.thread_time()
            for _ in range(requests):
                async with admissions.admit() as admission:
                    admission.submitted()
            middle = time.thread_time()
            for _ in range(requests):
                async with admissions.admit() as admission:
                    entry = registry.acquire("adapter")
                    admission.submitted()
                    registry.release(entry)
            together.append((time.thread_time() - middle) / requests)
            alone.append((middle - started) / requests)
    finally:
        for other in others:
            await other.__aexit__(None, None, None)
    way_in, all_of_it = statistics.median(alone), statistics.median(together)
    return GateRow(
        admission_microseconds=1e6 * way_in,
        registry_microseconds=1e6 * max(0.0, all_of_it - way_in),
        total_microseconds=1e6 * all_of_it,
        turns=len(together),
        others=_INSIDE,
    )


def _registry(clock: SystemClock) -> Registry:
    """Return a registry with some adapters in slots."""
    registry = Registry(Limits(slots=8, slot_bytes=0, host_bytes=1 << 30, max_pinned=7), now=clock.monotonic)
    for slot, name in enumerate(["adapter", *(f"other-{number}" for number in range(7))]):
        content = Content(
            name=name, digest="sha256:" + f"{slot:064x}", uri="", base_digest="", rank=8, nbytes=1 << 20, pinned=False
        )
        entry = registry.stage(content)
        registry.publish(entry, content)
        registry.place(entry, slot)
    return registry
