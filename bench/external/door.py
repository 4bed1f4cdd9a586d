"""What the proxy costs: time to a first token before a paced upstream; speed of a stream and memory with an engine."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from bench.external.clients import Clients, clients
from bench.external.engines import BenchedEngine
from bench.external.rows import DoorRow, FirstTokenRow
from bench.external.versions import Versions
from bench.seen import Record, median
from bench.turns import Budget
from tests.support.proxy_ports import SERVED
from tests.support.serve import Served

STREAMS: Final = (1, 8, 32)
_TOKENS: Final = 10
_ASKED: Final = 40
_LEAST_ROUNDS: Final = 3
_STREAM_TOKENS: Final = 200
_SPREAD: Final = 0.2
_AS_USERS_DO: Final = "modelswap_engine"


async def measure_first_tokens(*, budget: Budget, turns: int, report: Callable[[str], None]) -> list[FirstTokenRow]:
    """Ask a canned upstream, straight and through the proxy, in turns."""
    rows = []
    with _process("upstream") as upstream, _process("proxy", upstream) as proxy:
        async with clients(upstream, model=SERVED) as straight, clients(proxy, model=SERVED) as through:
            for streams in STREAMS:
                report(f"time to the first token, {streams} streams, straight and through the proxy")
                rows.append(await _first_tokens(straight, through, streams, budget=budget, turns=turns))
    return rows


async def _first_tokens(
    straight: Clients, through: Clients, streams: int, *, budget: Budget, turns: int
) -> FirstTokenRow:
    times: dict[Clients, list[float]] = {straight: [], through: []}
    rounds = max(_LEAST_ROUNDS, _ASKED // streams)
    for _ in budget.turns(most=turns, seconds=40.0, least=2):
        for asked, found in times.items():
            await _round(asked, streams, rounds=1)
            found += await _round(asked, streams, rounds=rounds)
    return FirstTokenRow(
        streams=streams,
        requests=len(times[through]),
        direct=median(times[straight]),
        through=median(times[through]),
    )


async def _round(asking: Clients, streams: int, *, rounds: int) -> list[float]:
    """Have streams that begin at different moments, each asking a few times."""

    async def one(number: int) -> list[float]:
        record = Record()
        await asyncio.sleep(number * _SPREAD / streams)
        return [await asking.ask(record, tokens=_TOKENS) for _ in range(rounds)]

    return [seconds for found in await asyncio.gather(*map(one, range(streams))) for seconds in found]


@contextmanager
def _process(*arguments: str) -> Iterator[str]:
    """Run one side in a process of its own; yields where it listens."""
    command = [sys.executable, "-m", "bench.external.canned", *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            url = process.stdout.readline().strip()
            if not url:
                raise RuntimeError(f"{' '.join(command)} ended with {process.wait()}")
            yield url
        finally:
            process.terminate()


async def measure_door(
    engine: BenchedEngine, versions: Versions, *, budget: Budget, turns: int, report: Callable[[str], None]
) -> DoorRow:
    """Compare one stream out of a running engine with the same through a sidecar, in turns."""
    report(f"{engine.name}: one stream, straight and through the sidecar")
    with tempfile.TemporaryDirectory(prefix="modelswap-bench-") as folder:
        command = ("proxy", "--backend", engine.name, "--upstream", engine.url)
        sidecar = Served(
            Path(folder), versions.base, command=command, roots=[versions.base.parent], module=_AS_USERS_DO
        )
        await asyncio.to_thread(lambda: sidecar.start().wait_ready())
        try:
            return await _door(engine, versions, sidecar, budget=budget, turns=turns)
        finally:
            await asyncio.to_thread(sidecar.stop)


async def _door(engine: BenchedEngine, versions: Versions, sidecar: Served, *, budget: Budget, turns: int) -> DoorRow:
    rates: dict[Clients, list[float]]
    async with clients(engine.url) as straight, clients(sidecar.data_url) as through:
        rates = {straight: [], through: []}
        for _ in budget.turns(most=max(turns, 4), seconds=40.0, least=2):
            for asking, found in rates.items():
                found.append(await _speed(asking))
    return DoorRow(
        engine=engine.name,
        model=versions.name,
        turns=len(rates[through]),
        direct=median(rates[straight]),
        through=median(rates[through]),
        kept=median([one / other for one, other in zip(rates[through], rates[straight], strict=True)]),
        rss=_rss(sidecar.pid),
    )


async def _speed(asking: Clients) -> float:
    """Return the tokens per second of one answer, from the question to its end."""
    started = time.monotonic()
    record = Record()
    await asking.ask(record, tokens=_STREAM_TOKENS)
    return len(record.asked[0].tokens) / (time.monotonic() - started)


def _rss(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))
