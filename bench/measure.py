"""What is measured of one model, as rows of plain numbers; the order of things within one run.

Everything of one model is measured in the same worker process, minutes apart at most, so that ratios mean something.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection
from typing import Final, Literal

import msgspec

from bench.engine import UNTHROTTLED, BenchEngine, SwapTime, running
from bench.models import BenchModel, changeable
from bench.raw import RawSpeed, raw_speed

Measurement = Literal["swap", "alternatives", "memory", "staging", "check"]
MEASUREMENTS: Final[tuple[Measurement, ...]] = ("swap", "alternatives", "memory", "staging", "check")
_DECODE_SECONDS: Final = 10.0
_SPEEDS: Final = frozenset({"staging", "check"})
CHANGED: Final = (1, 4, 12, 64, 256)
Report = Callable[[str], None]


class SwapRow(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Swaps of k tensors in one model; medians of ``repeats`` swaps while one request ran.

    ``token_gap_seconds`` is the median time between two of its tokens: what stop latency is to be held against.
    """

    tensors: int
    changed_bytes: int
    repeats: int
    token_gap_seconds: float
    stop_latency_seconds: float
    commit_window_microseconds: float
    commit_window_longest_microseconds: float
    swap_seconds: float


class AlternativesRow(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The same change by other means, in seconds: of work in the background, or without any service."""

    diff_swap_seconds: float
    full_reload_seconds: float
    process_restart_seconds: float
    diff_bytes: int
    diff_pause_seconds: float


class MemoryRow(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Bytes; ``overhead`` is what the worker holds beside model and KV cache."""

    model: int
    kv_cache: int
    rss: int
    overhead: int
    staged: int
    rss_while_staged: int
    previous: int
    rss_with_previous: int
    changed: int


class SpeedRow(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Bytes per second with nothing else running: the product's, and what the machine can do at best (``raw``).

    ``decode_alone`` and ``decode_beside`` are tokens per second of one request: without, and beside staging as it is
    throttled in service. 0 where it was not asked for.
    """

    staging: float = 0.0
    check: float = 0.0
    decode_alone: float = 0.0
    decode_beside: float = 0.0
    raw: RawSpeed


class ModelResult(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """All that was measured of one model."""

    nbytes: int
    layers: int
    start_seconds: float
    swaps: list[SwapRow] = []
    alternatives: AlternativesRow | None = None
    memory: MemoryRow | None = None
    speed: SpeedRow | None = None


async def measure(model: BenchModel, *, wanted: Collection[Measurement], repeats: int, report: Report) -> ModelResult:
    """Start one engine with the model and measure what is wanted."""
    speed = await _speed(model, wanted, repeats, report) if _SPEEDS & set(wanted) else None
    if not set(wanted) - _SPEEDS:
        return ModelResult(nbytes=model.nbytes, layers=model.layers, start_seconds=0.0, speed=speed)
    report("starting the engine")
    async with running(model) as (engine, start):
        memory = await _memory(engine, report) if "memory" in wanted else None
        swaps = await _swaps(engine, repeats, report) if "swap" in wanted else []
        alternatives = await _alternatives(engine, report) if "alternatives" in wanted else None
    return ModelResult(
        nbytes=model.nbytes,
        layers=model.layers,
        start_seconds=start,
        swaps=swaps,
        alternatives=alternatives,
        memory=memory,
        speed=speed,
    )


async def _speed(model: BenchModel, wanted: Collection[Measurement], repeats: int, report: Report) -> SpeedRow:
    """Measure in turns, so that whoever else uses the machine slows all of them; the best of each counts."""
    staging, check, raw = 0.0, 0.0, list[RawSpeed]()
    tensors = list(model.base.values())
    report("starting an engine that does not give way")
    async with running(model, settings=UNTHROTTLED) as (engine, _):
        for number in range(repeats):
            report(f"turn {number + 1} of {repeats}: raw speeds, staging, hashing live tensors")
            raw.append(await asyncio.to_thread(raw_speed, tensors))
            staging = max(staging, await engine.stage_speed(tensors)) if "staging" in wanted else 0.0
            check = max(check, await engine.check_speed()) if "check" in wanted else 0.0
    best = RawSpeed(
        cores=raw[0].cores,
        sha256=max(one.sha256 for one in raw),
        read=max(one.read for one in raw),
        copy=max(one.copy for one in raw),
    )
    alone, beside = await _decoding(model, report) if "staging" in wanted else (0.0, 0.0)
    return SpeedRow(staging=staging, check=check, decode_alone=alone, decode_beside=beside, raw=best)


async def _decoding(model: BenchModel, report: Report) -> tuple[float, float]:
    report("starting an engine that gives way, and decoding without and beside staging")
    async with running(model) as (engine, _):
        return await engine.decode_beside(model.base.values(), seconds=_DECODE_SECONDS)


async def _swaps(engine: BenchEngine, repeats: int, report: Report) -> list[SwapRow]:
    model, rows = engine.model, []
    names = changeable(model.layers)
    async with engine.busy() as arrivals:
        for count in (count for count in CHANGED if count <= len(names)):
            report(f"{2 * repeats} swaps of {count} tensors")
            times: list[SwapTime] = []
            begun = len(arrivals)
            for _ in range(repeats):
                times.append(await engine.swap([model.other[name] for name in names[:count]], name="other"))
                times.append(await engine.swap([model.base[name] for name in names[:count]], name="base"))
            rows.append(_row(count, times, arrivals[begun:]))
    return rows


def _row(count: int, times: list[SwapTime], arrivals: list[float]) -> SwapRow:
    gaps = [later - earlier for earlier, later in itertools.pairwise(arrivals)]
    windows = sorted(time.commit_microseconds for time in times)
    return SwapRow(
        tensors=count,
        changed_bytes=times[0].changed_bytes,
        repeats=len(times),
        token_gap_seconds=_median(gaps),
        stop_latency_seconds=_median([time.stop_latency for time in times]),
        commit_window_microseconds=_median(windows),
        commit_window_longest_microseconds=windows[-1],
        swap_seconds=_median([time.total for time in times]),
    )


async def _alternatives(engine: BenchEngine, report: Report) -> AlternativesRow:
    model = engine.model
    names = changeable(model.layers)[:12]
    report("the same change as a diff, as a full reload in place, and by a process restart")
    async with engine.busy():
        diff = await engine.swap([model.other[name] for name in names], name="other")
        whole = await engine.swap(model.base.values(), name="base")
    restart = await engine.restart()
    return AlternativesRow(
        diff_swap_seconds=diff.total,
        full_reload_seconds=whole.total,
        process_restart_seconds=restart,
        diff_bytes=diff.changed_bytes,
        diff_pause_seconds=diff.stop_latency + diff.commit_microseconds / 1e6,
    )


async def _memory(engine: BenchEngine, report: Report) -> MemoryRow:
    model = engine.model
    names = changeable(model.layers)
    changed = [model.other[name] for name in names]
    report(f"memory with {len(names)} tensors staged, then retained")
    alone = await engine.memory()
    staged, _ = await engine.stage_only(changed)
    await engine.swap(changed, name="other", keep_previous=True)
    retained = await engine.memory()
    await engine.swap([model.base[name] for name in names], name="base")
    return MemoryRow(
        model=alone.model_bytes,
        kv_cache=alone.kv_cache_bytes,
        rss=alone.rss_bytes,
        overhead=alone.rss_bytes - alone.model_bytes - alone.kv_cache_bytes,
        staged=staged.staged_bytes,
        rss_while_staged=staged.rss_bytes,
        previous=retained.previous_bytes,
        rss_with_previous=retained.rss_bytes,
        changed=sum(item.nbytes for item in changed),
    )


def _median(values: list[float]) -> float:
    if not values:
        return 0.0
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
