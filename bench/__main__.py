"""`make bench`: stop latency, commit window, alternatives and memory of real swaps in random models of three sizes.

Writes `build/bench.json` and prints tables; figures mean something as ratios within one run.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import time
from collections.abc import Sequence

import msgspec
from rich.console import Console

from bench.measure import MEASUREMENTS, Measurement, ModelResult, measure
from bench.models import ensure_model, layers_for, model_folder
from bench.report import lines, ratios, tables
from demo.console import complain, heading, say, step
from modelswap_engine.protocol.errors import ModelswapError
from tests.support.cache import REPOSITORY

_SIZES = (0.1, 0.5, 2.0)
_RESERVE_BYTES = 5 * 10**9


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure swaps; no time is ever a failure.")
    parser.add_argument("names", nargs="*", help=f"what to measure, of {', '.join(MEASUREMENTS)}; default: all")
    parser.add_argument("--sizes", type=float, nargs="+", default=_SIZES, help="model sizes in GB")
    parser.add_argument("--repeats", type=int, default=5, help="swaps there and back for each number of tensors")
    parser.add_argument("--remove", action="store_true", help="remove the random models from the cache, and end")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(MEASUREMENTS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(MEASUREMENTS)}")
    if options.remove:
        _remove()
        return 0
    try:
        asyncio.run(_run(options.names or MEASUREMENTS, sizes=options.sizes, repeats=options.repeats))
    except KeyboardInterrupt:
        return 130
    except (ModelswapError, OSError, RuntimeError) as error:
        complain(str(error), advice="fewer or smaller models: python -m bench --sizes 0.1 0.5")
        return 1
    return 0


async def _run(names: Sequence[Measurement], *, sizes: Sequence[float], repeats: int) -> None:
    results: list[ModelResult] = []
    for size in sizes:
        nbytes = int(size * 1e9)
        heading(f"A random Llama of {layers_for(nbytes)} layers, about {size:g} GB")
        _check_disk(nbytes)
        with step("making it, or finding it in the cache"):
            model = ensure_model(nbytes)
        results.append(await measure(model, wanted=names, repeats=repeats, report=say))
    console = Console(width=120)
    for table in tables(results):
        console.print()
        console.print(table)
    heading("Ratios")
    found = ratios(results)
    say("\n".join(lines(found)) or "none: they need two sizes, or `alternatives`")
    file = REPOSITORY / "build" / "bench.json"
    file.parent.mkdir(exist_ok=True)
    document = {"when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "ratios": found, "models": results}
    file.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")
    say(f"figures: {file.relative_to(REPOSITORY)}")


def _check_disk(nbytes: int) -> None:
    folder = model_folder()
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < 2 * nbytes + _RESERVE_BYTES:
        raise RuntimeError(
            f"{folder} has {free / 1e9:.1f} GB free, {(2 * nbytes + _RESERVE_BYTES) / 1e9:.1f} GB are needed"
        )


def _remove() -> None:
    for folder in sorted(model_folder().glob("bench-*-layers")):
        shutil.rmtree(folder)
        say(f"removed {folder}")


if __name__ == "__main__":
    sys.exit(main())
