"""`make bench`: what swaps cost, as ratios measured in one run; each is printed beside what was asked for.

First what does not depend on a model's size (the way in, traffic modes, decoding beside staging), then random models of
several sizes, then the proxy and the engines of others. Writes `build/bench.json`. No time is ever a failure.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from bench.engine import SETTINGS
from bench.external import report
from bench.external.report import ExternalResult
from bench.external.run import EXTERNAL, measure_external
from bench.measure import LARGEST, MEASUREMENTS, ONCE, ModelResult, OnceResult, measure, measure_once
from bench.models import ensure_model, layers_for, model_folder
from bench.report import lines, ratios, tables
from bench.scale.run import Size, measure_scale
from bench.sources import measure_sources
from bench.turns import Budget
from bench.verdicts import verdicts
from demo.console import complain, heading, say, step
from modelswap_engine.backends.embedded.settings import Device, EmbeddedSettings
from modelswap_engine.protocol.errors import ModelswapError
from tests.support.cache import REPOSITORY

SCALE, SOURCES = "scale", "sources"
"""A thousand simulated pods; fetching from a real S3 server. Only when they are asked for by name."""
_ALL = (*MEASUREMENTS, *EXTERNAL)
_SIZES = (0.1, 0.5, 2.0)
_MINUTES = 10.0
_LAST_SECONDS = 45.0
"""Kept back for what runs when the time is over: the least that is measured, and the end of an engine."""
_RESERVE_BYTES = 5 * 10**9


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure swaps; no time is ever a failure.")
    parser.add_argument(
        "names",
        nargs="*",
        help=f"what to measure, of {', '.join((*_ALL, SCALE, SOURCES))}; default: all but the last two",
    )
    parser.add_argument("--sizes", type=float, nargs="+", default=_SIZES, help="model sizes in GB")
    parser.add_argument("--turns", type=int, default=5, help="how often each figure is taken at most")
    parser.add_argument("--minutes", type=float, default=_MINUTES, help="when this is over, figures are taken once")
    parser.add_argument("--device", type=Device, choices=list(Device), default=Device.CPU, help="where models run")
    parser.add_argument("--remove", action="store_true", help="remove the random models from the cache, and end")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - {*_ALL, SCALE, SOURCES}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join((*_ALL, SCALE, SOURCES))}")
    if options.remove:
        _remove()
        return 0
    if options.names == [SCALE]:
        return _scale()
    if options.names == [SOURCES]:
        return _sources(turns=options.turns)
    bench = _Bench(
        names=options.names or _ALL,
        budget=Budget(60 * options.minutes - _LAST_SECONDS),
        turns=options.turns,
        settings=msgspec.structs.replace(SETTINGS, device=options.device),
    )
    try:
        asyncio.run(bench.run(sorted(options.sizes)))
    except KeyboardInterrupt:
        return 130
    except (ModelswapError, OSError, RuntimeError) as error:
        complain(str(error), advice="fewer or smaller models: python -m bench --sizes 0.1 0.5")
        return 1
    if SOURCES in options.names:
        _sources(turns=options.turns)
    return _scale() if SCALE in options.names else 0


def _sources(*, turns: int) -> int:
    """Measure fetching."""
    heading("Fetching from a real S3 server on this machine")
    try:
        found = measure_sources(turns=turns, report=say)
    except KeyboardInterrupt:
        return 130
    heading("Asked and measured")
    say("\n".join(verdict.line() for verdict in found.verdicts()))
    file = _build() / "bench-sources.json"
    file.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    say(f"figures: {file.relative_to(REPOSITORY)}")
    return 0


def _scale() -> int:
    """Measure the operator; the last line has all figures, and what does not converge fails."""
    heading("One operator, a thousand simulated pods")
    try:
        found = asyncio.run(measure_scale(Size(), report=say))
    except KeyboardInterrupt:
        return 130
    file = _build() / "bench-scale.json"
    file.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    say(f"figures: {file.relative_to(REPOSITORY)}")
    say(found.line())
    return 0 if found.converged else 1


class _Bench:
    """One run."""

    def __init__(self, *, names: Sequence[str], budget: Budget, turns: int, settings: EmbeddedSettings) -> None:
        self._own = [name for name in MEASUREMENTS if name in names]
        self._external = [name for name in EXTERNAL if name in names]
        self._budget = budget
        self._turns = turns
        self._settings = settings

    async def run(self, sizes: Sequence[float]) -> None:
        started = time.monotonic()
        once = OnceResult()
        if set(ONCE) & set(self._own):
            heading("Whatever the size")
            once = await measure_once(
                self._own, budget=self._budget, turns=self._turns, report=say, settings=self._settings
            )
        results = list[ModelResult]()
        if set(self._own) - set(ONCE):
            for size in sizes:
                results.append(await self._size(size, largest=size == sizes[-1]))
        external = ExternalResult()
        if self._external:
            heading("Before engines of others")
            external = await measure_external(self._external, budget=self._budget, turns=self._turns, report=say)
        _show(once, results, external, seconds=time.monotonic() - started)

    async def _size(self, size: float, *, largest: bool) -> ModelResult:
        nbytes = int(size * 1e9)
        heading(f"A random Llama of {layers_for(nbytes)} layers, about {size:g} GB")
        _check_disk(nbytes)
        with step("making it, or finding it in the cache"):
            model = await asyncio.to_thread(ensure_model, nbytes)
        return await measure(
            model,
            wanted=[name for name in self._own if largest or name not in LARGEST],
            budget=self._budget,
            turns=self._turns,
            report=say,
            settings=self._settings,
        )


def _show(once: OnceResult, results: Sequence[ModelResult], external: ExternalResult, *, seconds: float) -> None:
    console = Console(width=130)
    for table in itertools.chain(tables(once, results), report.tables(external)):
        console.print()
        console.print(table)
    heading("Ratios")
    found = ratios(results)
    say("\n".join(lines(found)) or "none: they need two sizes, or `alternatives`")
    heading("Asked and measured")
    said = [*verdicts(once, results, found), *report.verdicts(external)]
    say("\n".join(verdict.line() for verdict in said) or "nothing that was asked for was measured")
    file = _build() / "bench.json"
    document = {
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seconds": round(seconds, 1),
        "asked": said,
        "ratios": found,
        "once": once,
        "models": results,
        "external": external,
    }
    file.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")
    say(f"\nfigures: {file.relative_to(REPOSITORY)}, after {seconds:.0f} s")


def _build() -> Path:
    folder = REPOSITORY / "build"
    folder.mkdir(exist_ok=True)
    return folder


def _check_disk(nbytes: int) -> None:
    folder = model_folder()
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < 2 * nbytes + _RESERVE_BYTES:
        raise RuntimeError(
            f"{folder} has {free / 1e9:.1f} GB free, {(2 * nbytes + _RESERVE_BYTES) / 1e9:.1f} GB are needed"
        )


def _remove() -> None:
    for folder in sorted(model_folder().glob("bench-*")):
        shutil.rmtree(folder)
        say(f"removed {folder}")


if __name__ == "__main__":
    sys.exit(main())
