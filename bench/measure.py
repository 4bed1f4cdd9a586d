"""What is measured, as rows of plain numbers; the order of things within one run.

Everything of one model is measured in the same worker process, minutes apart at most, so that ratios mean something.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Final, Literal

import msgspec

from bench.decode import DecodeRow, measure_decode
from bench.delta import DeltaRow, measure_delta
from bench.diff import DiffRow, measure_diff
from bench.engine import BenchEngine, SwapTime, running, unthrottled
from bench.gate import GateRow, measure_gate
from bench.models import SMALL, SMALL_LAYERS, BenchModel, changeable, ensure
from bench.modes import ModesResult, measure_modes
from bench.raw import RawSpeed, had_back, put_out, raw_speed, volume_speed
from bench.seen import median
from bench.turns import Budget
from modelswap_engine.backends.embedded.settings import EmbeddedSettings

Measurement = Literal["gate", "diff", "delta", "modes", "decode", "swap", "alternatives", "memory", "staging", "check"]
ONCE: Final[tuple[Measurement, ...]] = ("gate", "diff", "delta", "modes", "decode")
"""Measured once, with a model of the size and the shape of the demo's."""
EACH: Final[tuple[Measurement, ...]] = ("swap", "alternatives", "memory")
"""Measured with each size."""
LARGEST: Final[tuple[Measurement, ...]] = ("staging", "check")
"""Measured with the largest size."""
MEASUREMENTS: Final = (*ONCE, *EACH, *LARGEST)
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
    """The same change by other means, in seconds: of work in the background, or without any service.

    A swap of everything is staged beside the live version, throttled; a reload in place drops it first.
    """

    diff_swap_seconds: float
    whole_swap_seconds: float
    reload_seconds: float
    process_restart_seconds: float
    diff_bytes: int
    diff_pause_seconds: float
    diff_commit_microseconds: float


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

    0 where it was not asked for. ``volume`` is staging what the system does not have in memory.
    """

    staging: float = 0.0
    volume: float = 0.0
    check: float = 0.0
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


class OnceResult(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What was measured once."""

    gate: GateRow | None = None
    diff: DiffRow | None = None
    delta: list[DeltaRow] = []
    modes: ModesResult | None = None
    decode: DecodeRow | None = None


async def measure_once(
    wanted: Collection[Measurement], *, budget: Budget, turns: int, report: Report, settings: EmbeddedSettings
) -> OnceResult:
    """Measure what does not depend on the size of a model."""
    gate = diff = modes = decode = None
    delta = list[DeltaRow]()
    if "gate" in wanted:
        report("the way in, without an engine")
        gate = await measure_gate(budget)
    if "diff" in wanted:
        report("modelswap diff, with manifests")
        diff = await asyncio.to_thread(measure_diff, budget)
    if "delta" in wanted:
        report(f"packs of changed elements, up to {turns} turns")
        delta = await asyncio.to_thread(partial(measure_delta, budget, turns=turns))
    if {"modes", "decode"} & set(wanted):
        report("making the model, or finding it in the cache")
        model = await asyncio.to_thread(ensure, SMALL, SMALL_LAYERS, whole=True)
        if "modes" in wanted:
            roomy = msgspec.structs.replace(settings, page_size=16, num_blocks=128, max_batch_tokens=512)
            modes = await measure_modes(model, budget=budget, turns=turns, report=report, settings=roomy)
        if "decode" in wanted:
            decode = await measure_decode(model, budget=budget, turns=turns, report=report, settings=settings)
    return OnceResult(gate=gate, diff=diff, delta=delta, modes=modes, decode=decode)


async def measure(
    model: BenchModel,
    *,
    wanted: Collection[Measurement],
    budget: Budget,
    turns: int,
    report: Report,
    settings: EmbeddedSettings,
) -> ModelResult:
    """Start an engine with the model and measure what is wanted; another one, that does not give way, for speeds."""
    start, memory, swaps, alternatives = 0.0, None, list[SwapRow](), None
    if set(EACH) & set(wanted):
        report("starting the engine")
        async with running(model, settings=settings) as (engine, start):
            memory = await _memory(engine, report) if "memory" in wanted else None
            swaps = await measure_swaps(engine, budget=budget, turns=turns, report=report) if "swap" in wanted else []
            alternatives = await _alternatives(engine, report) if "alternatives" in wanted else None
    speed = None
    if set(LARGEST) & set(wanted):
        speed = await _speed(model, wanted, budget=budget, turns=turns, report=report, settings=settings)
    return ModelResult(
        nbytes=model.nbytes,
        layers=model.layers,
        start_seconds=start,
        swaps=swaps,
        alternatives=alternatives,
        memory=memory,
        speed=speed,
    )


async def _speed(
    model: BenchModel,
    wanted: Collection[Measurement],
    *,
    budget: Budget,
    turns: int,
    report: Report,
    settings: EmbeddedSettings,
) -> SpeedRow:
    """Measure in turns, so that whoever else uses the machine slows all of them; the best of each counts."""
    staging, volume, check, raw, disk = 0.0, 0.0, 0.0, list[RawSpeed](), 0.0
    tensors = list(model.base.values())
    report(f"raw speeds, staging, hashing live tensors, without giving way, up to {turns} turns")
    async with running(model, settings=unthrottled(settings)) as (engine, _):
        for _ in budget.turns(most=turns, seconds=60.0):
            raw.append(await asyncio.to_thread(raw_speed, tensors))
            if "staging" in wanted:
                await asyncio.to_thread(had_back, sum(item.nbytes for item in tensors))
                staging = max(staging, await engine.stage_speed(tensors))
                disk = max(disk, await asyncio.to_thread(volume_speed, tensors))
                await asyncio.to_thread(had_back, sum(item.nbytes for item in tensors))
                await asyncio.to_thread(put_out, tensors)
                volume = max(volume, await engine.stage_speed(tensors))
            check = max(check, await engine.check_speed()) if "check" in wanted else 0.0
    best = RawSpeed(
        cores=raw[0].cores,
        sha256=max(one.sha256 for one in raw),
        read=max(one.read for one in raw),
        copy=max(one.copy for one in raw),
        look=max(one.look for one in raw),
        volume=disk,
    )
    return SpeedRow(staging=staging, volume=volume, check=check, raw=best)


async def measure_swaps(
    engine: BenchEngine, *, budget: Budget, turns: int, report: Report, counts: Sequence[int] = CHANGED
) -> list[SwapRow]:
    """Swap different numbers of tensors while one request runs, there and back."""
    model, rows = engine.model, []
    names = changeable(model.layers)
    async with engine.busy() as record:
        for count in (count for count in counts if count <= len(names)):
            report(f"swaps of {count} tensors, there and back up to {turns} times")
            times: list[SwapTime] = []
            begun = time.monotonic()
            for _ in budget.turns(most=turns, seconds=20.0):
                times.append(await engine.swap([model.other[name] for name in names[:count]], name="other"))
                times.append(await engine.swap([model.base[name] for name in names[:count]], name="base"))
            rows.append(_row(count, times, record.gaps(begun)))
    return rows


def _row(count: int, times: list[SwapTime], gaps: list[float]) -> SwapRow:
    windows = sorted(time.commit_microseconds for time in times)
    return SwapRow(
        tensors=count,
        changed_bytes=times[0].changed_bytes,
        repeats=len(times),
        token_gap_seconds=median(gaps),
        stop_latency_seconds=median([time.stop_latency for time in times]),
        commit_window_microseconds=median(windows),
        commit_window_longest_microseconds=windows[-1],
        swap_seconds=median([time.total for time in times]),
    )


async def _alternatives(engine: BenchEngine, report: Report) -> AlternativesRow:
    model = engine.model
    names = changeable(model.layers)[:12]
    report("the same change as a diff, as a swap of everything, as a reload in place, and by a process restart")
    async with engine.busy():
        diff = await engine.swap([model.other[name] for name in names], name="other")
        whole = await engine.swap(model.base.values(), name="base")
    reload = await engine.load()
    restart = await engine.restart()
    return AlternativesRow(
        diff_swap_seconds=diff.total,
        whole_swap_seconds=whole.total,
        reload_seconds=reload,
        process_restart_seconds=restart,
        diff_bytes=diff.changed_bytes,
        diff_pause_seconds=diff.stop_latency + diff.commit_microseconds / 1e6,
        diff_commit_microseconds=diff.commit_microseconds,
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
