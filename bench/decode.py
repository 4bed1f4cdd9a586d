"""How much of its speed decoding keeps while a version is staged beside it, as the product throttles staging."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec

from bench.engine import BenchEngine, running
from bench.models import BenchModel
from bench.seen import median
from bench.turns import Budget
from modelswap_engine.backends.embedded.settings import EmbeddedSettings

_SECONDS = 3.0


class DecodeRow(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One request's tokens per second, alone and while the whole model is staged again and again.

    ``kept`` is the median over ``turns`` of the second by the first; each turn measures both.
    """

    nbytes: int
    turns: int
    alone: float
    while_staging: float
    kept: float
    staged_bytes_per_second: float


async def measure_decode(
    model: BenchModel,
    *,
    budget: Budget,
    turns: int,
    report: Callable[[str], None],
    settings: EmbeddedSettings,
    seconds: float = _SECONDS,
) -> DecodeRow:
    """Decode with and without staging, in turns."""
    report(f"decode speed, alone and while staging, up to {turns} turns")
    async with running(model, settings=settings) as (engine, _):
        return await decode_speeds(engine, budget=budget, turns=turns, seconds=seconds)


async def decode_speeds(engine: BenchEngine, *, budget: Budget, turns: int, seconds: float) -> DecodeRow:
    """Measure with an engine that runs already."""
    alone, beside, staged = list[float](), list[float](), list[float]()
    async with engine.busy() as record:
        await asyncio.sleep(min(1.0, seconds))
        for _ in budget.turns(most=turns, seconds=40.0, least=2):
            begin = time.monotonic()
            await asyncio.sleep(seconds)
            alone.append(record.rate(begin))
            begin, nbytes = time.monotonic(), 0
            while time.monotonic() < begin + seconds:
                nbytes += await engine.stage_bytes(engine.model.base.values())
            beside.append(record.rate(begin))
            staged.append(nbytes / (time.monotonic() - begin))
    return DecodeRow(
        nbytes=engine.model.nbytes,
        turns=len(alone),
        alone=median(alone),
        while_staging=median(beside),
        kept=median([during / before for before, during in zip(alone, beside, strict=True) if before]),
        staged_bytes_per_second=median(staged),
    )
