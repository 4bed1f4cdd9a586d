"""The same changes to a running engine by each route into it, by the engine's own full load, and by a restart."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import msgspec

from bench.external.clients import clients
from bench.external.door import measure_door
from bench.external.engines import BenchedEngine
from bench.external.rows import ALL, FULL, IN_PROCESS, RESTART, TENTH, BesideRow, DoorRow, RouteRow
from bench.external.versions import Versions
from bench.front import coordinated, swapped
from bench.seen import Record, median
from bench.turns import Budget
from modelswap_engine.backends.port import Backend, Reply
from modelswap_engine.protocol.errors import from_body
from modelswap_engine.protocol.messages import SwapStatus, VersionRef
from modelswap_engine.protocol.policy import TrafficMode
from modelswap_engine.swap.clock import SystemClock
from modelswap_engine.swap.coordinator import Coordinator
from modelswap_engine.swap.gate import Gate

_CALL_SECONDS: Final = 300.0
_STREAMS: Final = 4
_DECODE_SECONDS: Final = 4.0


class EngineResult(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """All of one engine with one model."""

    routes: list[RouteRow]
    beside: BesideRow | None = None
    door: DoorRow | None = None


async def measure_engine(
    engine: BenchedEngine, versions: Versions, *, budget: Budget, turns: int, report: Callable[[str], None]
) -> EngineResult:
    """Start the engine and change its weights in every way."""
    rows, beside = list[RouteRow](), None
    try:
        for route, make in engine.backends().items():
            # Each route begins with an engine that no other one has changed.
            report(f"{engine.name}: started on {versions.name}; swaps {route}, up to {turns} there and back")
            await asyncio.to_thread(_started_anew, engine, versions)
            try:
                backend = make()
                async with _coordinated(backend, versions) as coordinator:
                    named = _Named(engine, versions, route)
                    rows += await _swaps(coordinator, named, versions, budget=budget, turns=turns)
                    if route == IN_PROCESS:
                        report(f"{engine.name}: decoding alone and beside staging")
                        beside = await _beside(engine, backend, versions, budget=budget, turns=turns)
            except RuntimeError as error:
                report(f"{engine.name}: {route} is not measured with {versions.name}: {error}")
        await asyncio.to_thread(_started_anew, engine, versions)
        door = await measure_door(engine, versions, budget=budget, turns=turns, report=report)
        report(f"{engine.name}: its own full load, then a restart")
        rows += await _full(engine, versions, budget=budget, turns=turns)
        rows.append(await _restart(engine, versions))
        return EngineResult(routes=rows, beside=beside, door=door)
    finally:
        await asyncio.to_thread(engine.stop)


def _started_anew(engine: BenchedEngine, versions: Versions) -> None:
    engine.stop()
    engine.start(versions.base)


class _Named:
    """Makes rows of one engine, model and route."""

    def __init__(self, engine: BenchedEngine, versions: Versions, route: str) -> None:
        self._engine, self._versions, self._route = engine, versions, route

    def row(self, change: str, folder: Path, closed: list[float], total: list[float], micro: float = 0.0) -> RouteRow:
        return RouteRow(
            engine=self._engine.name,
            model=self._versions.name,
            nbytes=self._versions.nbytes,
            route=self._route,
            change=change,
            changed_bytes=self._versions.changed_bytes(folder),
            swaps=len(closed),
            closed=median(closed),
            total=median(total),
            commit_microseconds=micro,
        )


def _changes(versions: Versions) -> Iterator[tuple[str, Path]]:
    yield TENTH, versions.tenth
    yield ALL, versions.whole


@asynccontextmanager
async def _coordinated(backend: Backend, versions: Versions) -> AsyncIterator[Coordinator]:
    roots = [folder.parent for folder in (versions.base, versions.tenth, versions.whole)]
    gate = Gate(clock=SystemClock())
    async with coordinated(backend, base=_version(versions.base), roots=roots, gate=gate) as coordinator:
        yield coordinator


def _version(folder: Path) -> VersionRef:
    return VersionRef(version=folder.name, uri=folder.as_uri())


async def _swaps(
    coordinator: Coordinator, named: _Named, versions: Versions, *, budget: Budget, turns: int
) -> list[RouteRow]:
    rows, number = [], 0
    for change, folder in _changes(versions):
        done: list[SwapStatus] = []
        for _ in budget.turns(most=turns, seconds=30.0):
            for target in (folder, versions.base):
                number += 1
                done.append(await swapped(coordinator, _version(target), number=number, mode=TrafficMode.DRAIN))
        rows.append(
            named.row(
                change,
                folder,
                [status.pause_seconds or 0.0 for status in done],
                [status.total_seconds or 0.0 for status in done],
                median([status.commit_window_microseconds or 0.0 for status in done]),
            )
        )
    return rows


async def _full(engine: BenchedEngine, versions: Versions, *, budget: Budget, turns: int) -> list[RouteRow]:
    """The engine's own load of a whole checkpoint, and the flush that must follow it."""
    closed: list[float] = []
    control = engine.control()
    try:
        await control.facts(seconds=_CALL_SECONDS)
        for _ in budget.turns(most=turns, seconds=20.0):
            for target in (versions.whole, versions.base):
                started = time.monotonic()
                await control.load_full(str(target), target.name, seconds=_CALL_SECONDS)
                await control.flush(seconds=_CALL_SECONDS)
                closed.append(time.monotonic() - started)
    finally:
        await control.close()
    return [_Named(engine, versions, FULL).row(ALL, versions.whole, closed, closed)]


async def _restart(engine: BenchedEngine, versions: Versions) -> RouteRow:
    started = time.monotonic()
    await asyncio.to_thread(engine.stop)
    await asyncio.to_thread(engine.start, versions.whole)
    async with clients(engine.url) as asking:
        await asking.ask(Record(), tokens=1)
    seconds = [time.monotonic() - started]
    return _Named(engine, versions, RESTART).row(ALL, versions.whole, seconds, seconds)


async def _beside(
    engine: BenchedEngine, backend: Backend, versions: Versions, *, budget: Budget, turns: int
) -> BesideRow:
    """Decode for a while without and with staging, in turns."""
    alone, beside = list[float](), list[float]()
    order = versions.order(versions.whole, operation_id="beside")
    async with clients(engine.url) as asking, asking.asking(_STREAMS) as record:
        for _ in budget.turns(most=turns, seconds=30.0, least=2):
            begin = time.monotonic()
            await asyncio.sleep(_DECODE_SECONDS)
            alone.append(record.rate(begin))
            begin = time.monotonic()
            while time.monotonic() < begin + _DECODE_SECONDS:
                _accepted(await backend.stage(order))
                _accepted(await backend.release(order.operation_id, previous=False))
            beside.append(record.rate(begin))
    return BesideRow(
        engine=engine.name,
        model=versions.name,
        turns=len(alone),
        alone=median(alone),
        beside=median(beside),
        kept=median([during / before for before, during in zip(alone, beside, strict=True) if before]),
    )


def _accepted(replies: Sequence[Reply]) -> None:
    for reply in replies:
        if reply.error is not None:
            raise from_body(reply.error)
