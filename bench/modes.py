"""What clients notice of a swap in each traffic mode: the gap in their tokens, and the wait at the gate.

One run, one engine: the usual time between tokens is taken just before each swap under the same load. Overlap is held
against the same load split over two engines of which none is swapped.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from bench.front import Front, serving
from bench.models import BenchModel
from bench.seen import Record, median
from bench.turns import Budget
from modelswap_engine.backends.embedded.settings import EmbeddedSettings
from modelswap_engine.protocol.messages import SwapStatus
from modelswap_engine.protocol.policy import TrafficMode

MODES: Final = (
    TrafficMode.FREEZE,
    TrafficMode.RECOMPUTE,
    TrafficMode.ABORT,
    TrafficMode.DRAIN,
    TrafficMode.OVERLAP,
)
_CLIENTS: Final = 2
Report = Callable[[str], None]


class ModeRow(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Swaps in one mode; seconds, medians over swaps, the longest of all where it says so.

    Attributes:
        gap: between the two tokens around the moment at which the new version began to serve; 0 where no stream went
            on across it.
        step: the usual time between tokens before the swap.
        excess: of the gap over step and stop latency.
        prefill: the same clients' prompts of the length that they had reached, computed at once without a swap.
        waited: new requests that found the gate closed, over all swaps.
    """

    mode: str
    swaps: int
    step: float
    stop_latency: float
    commit_microseconds: float
    pause: float
    gap: float
    gap_longest: float
    excess: float
    excess_longest: float
    prefill: float
    waited: int


class GapsRow(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Times between tokens in seconds, over all clients."""

    tokens: int
    median: float
    late: float
    longest: float


class ModesResult(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """All modes with one model. ``overlapping`` and ``split``: gaps while a swap overlapped, and of two engines."""

    nbytes: int
    clients: int
    modes: list[ModeRow]
    overlapping: GapsRow | None = None
    split: GapsRow | None = None


async def measure_modes(
    model: BenchModel, *, budget: Budget, turns: int, report: Report, settings: EmbeddedSettings
) -> ModesResult:
    """Swap in every mode under load."""
    report("starting the front with an engine")
    rows = list[ModeRow]()
    overlapping = list[float]()
    async with serving(model, settings=settings) as front:
        await _warm(front)
        for mode in MODES:
            report(f"mode {mode.value}: up to {turns} swaps under {_CLIENTS} clients")
            row, gaps = await _mode(front, mode, budget=budget, turns=turns)
            rows.append(row)
            overlapping += gaps if mode is TrafficMode.OVERLAP else []
    report("the same load split over two engines, without a swap")
    split = await _split(model, settings, tokens=max(64, len(overlapping)))
    return ModesResult(
        nbytes=model.nbytes,
        clients=_CLIENTS,
        modes=rows,
        overlapping=gaps_row(overlapping),
        split=gaps_row(split),
    )


async def _warm(front: Front) -> None:
    """Let the first batches of every size and the first swap pay for what they pay once."""
    async with front.clients(_CLIENTS) as record:
        await record.more(32)
        await front.swap(TrafficMode.FREEZE)
        await front.swap(TrafficMode.FREEZE)


async def _mode(front: Front, mode: TrafficMode, *, budget: Budget, turns: int) -> tuple[ModeRow, list[float]]:
    swaps, overlapping, lengths = list[_Swap](), list[float](), list[int]()
    async with front.clients(_CLIENTS) as record:
        for _ in budget.turns(most=turns, seconds=30.0, least=2):
            await record.more(12 * _CLIENTS)
            before = time.monotonic()
            steps = record.gaps(before - 1.0, before)
            status = await front.swap(mode)
            after = time.monotonic()
            await record.more(4 * _CLIENTS)
            met = [found for asked in record.asked if (found := asked.gap_at(front.moments.activated)) is not None]
            lengths += [16 + tokens for _, tokens in met]
            overlapping += record.gaps(before, after)
            swaps.append(_Swap(status=status, step=median(steps), gaps=[gap for gap, _ in met]))
    prefill = await _prefill(front, round(median(lengths))) if mode is TrafficMode.RECOMPUTE and lengths else 0.0
    return _row(mode, swaps, prefill=prefill), overlapping


class _Swap(msgspec.Struct, frozen=True, kw_only=True):
    status: SwapStatus
    step: float
    gaps: list[float]


def _row(mode: TrafficMode, swaps: Sequence[_Swap], *, prefill: float) -> ModeRow:
    excess = [gap - swap.step - (swap.status.stop_latency_seconds or 0.0) for swap in swaps for gap in swap.gaps] or [
        0.0
    ]
    gaps = [gap for swap in swaps for gap in swap.gaps] or [0.0]
    return ModeRow(
        mode=mode.value,
        swaps=len(swaps),
        step=median([swap.step for swap in swaps]),
        stop_latency=median([swap.status.stop_latency_seconds or 0.0 for swap in swaps]),
        commit_microseconds=median([swap.status.commit_window_microseconds or 0.0 for swap in swaps]),
        pause=median([swap.status.pause_seconds or 0.0 for swap in swaps]),
        gap=median(gaps),
        gap_longest=max(gaps),
        excess=median(excess),
        excess_longest=max(excess),
        prefill=prefill,
        waited=sum(swap.status.waited_requests for swap in swaps),
    )


async def _prefill(front: Front, length: int) -> float:
    """Return how long prompts of a length take to their first tokens when they come at the same time."""
    times = list[float]()
    for _ in range(3):
        record = Record()
        started = time.monotonic()
        await asyncio.gather(*(front.ask(record, prompt_tokens=length, tokens=1) for _ in range(_CLIENTS)))
        times.append(max(asked.tokens[0] for asked in record.asked) - started)
    return median(times)


async def _split(model: BenchModel, settings: EmbeddedSettings, *, tokens: int) -> list[float]:
    """Return gaps of one client on each of two engines, by the same way in as while a swap overlaps."""
    async with serving(model, settings=settings) as one, serving(model, settings=settings) as two:
        first, second = await asyncio.gather(*(_alone(front, tokens // 2) for front in (one, two)))
    return first + second


async def _alone(front: Front, tokens: int) -> list[float]:
    async with front.clients(1) as record:
        await record.more(16)
        begin = time.monotonic()
        await record.more(tokens)
        return record.gaps(begin)


def gaps_row(gaps: Sequence[float]) -> GapsRow | None:
    """Return what there is to say about gaps; None without any."""
    if not gaps:
        return None
    ordered = sorted(gaps)
    return GapsRow(
        tokens=len(ordered),
        median=median(ordered),
        late=ordered[min(len(ordered) - 1, round(0.95 * len(ordered)))],
        longest=ordered[-1],
    )
