"""`bench/gpu.sh`: what only a GPU can tell, as one table with units and `build/bench-gpu.json`.

Copies through pinned buffers, values copied in place under a captured CUDA graph, checksums, and real swaps of random
models with their commit windows, decoding beside staging and proof. Without a GPU it says so in one line.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec
import torch
from rich.console import Console
from rich.table import Table

from bench.decode import DecodeRow, decode_speeds
from bench.device import CopyRow, EqualRow, GraphRow, copy_speeds, equality_speeds, graph_in_place
from bench.engine import SETTINGS, running
from bench.measure import SwapRow, measure_swaps
from bench.models import BenchModel, ensure_model
from bench.report import fit
from bench.turns import Budget
from demo.console import complain, heading, say
from modelswap_engine.backends.embedded.settings import Device, EmbeddedSettings
from modelswap_engine.protocol.errors import ModelswapError
from modelswap_engine.weights.cuda import CudaCopies
from modelswap_engine.weights.place import OnDevice
from tests.support.cache import REPOSITORY

_SIZES = (1.0, 2.0, 4.0, 8.0)
_SECONDS = 540.0
_COUNTS = (12,)
_ROOM = 1.6
"""A model of a size needs so many times its bytes on the device: KV cache, staged and old tensors."""


class EngineRow(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The real engine with one model; ``check`` in bytes per second, ``proved``: live bytes were hashed after swaps."""

    nbytes: int
    device: str
    start_seconds: float
    swaps: list[SwapRow]
    decode: DecodeRow
    check: float
    proved: bool


class Findings(msgspec.Struct, kw_only=True, rename="camel"):
    """All that a run found; written again after each step, so that what was found is not lost."""

    when: str
    device: str
    torch: str
    copies: CopyRow | None = None
    equality: EqualRow | None = None
    graph: GraphRow | None = None
    engines: list[EngineRow] = []
    left_out: list[str] = []
    window_microseconds_per_gigabyte: float | None = None
    window_microseconds: float | None = None


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what there is a device for."""
    parser = argparse.ArgumentParser(prog="bench/gpu.sh", description="Measure what only a GPU can tell.")
    parser.add_argument("--sizes", type=float, nargs="+", default=_SIZES, help="model sizes in GB")
    parser.add_argument("--seconds", type=float, default=_SECONDS, help="no size is begun that may end after this")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print(f"no GPU here (torch {torch.__version__} sees none): nothing to measure, nothing is claimed")
        return 0
    try:
        asyncio.run(_run(sorted(options.sizes), Budget(options.seconds)))
    except KeyboardInterrupt:
        return 130
    except (ModelswapError, OSError, RuntimeError) as error:
        complain(str(error), advice="fewer or smaller models: bench/gpu.sh --sizes 1 2")
        return 1
    return 0


async def _run(sizes: Sequence[float], budget: Budget) -> None:
    device = torch.device("cuda", 0)
    name, total = torch.cuda.get_device_name(device), torch.cuda.mem_get_info(device)[1]
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    found = Findings(when=now, device=f"{name}, {total / 1e9:.0f} GB", torch=torch.__version__)
    heading(f"{found.device}, torch {found.torch}")
    place = OnDevice(CudaCopies(device))
    for step in (_copies, _equality, _graph):
        step(found, place)
        _write(found)
    torch.cuda.empty_cache()
    longest = 60.0
    for size in sizes:
        if size * 1e9 * _ROOM > total or longest * 1.5 > budget.left:
            found.left_out.append(f"{size:g} GB: {'no time' if size * 1e9 * _ROOM <= total else 'too little memory'}")
            continue
        begun = budget.left
        found.engines.append(await _engine(size, budget))
        longest = max(longest, begun - budget.left)
        _write(found)
    if len(found.engines) > 1:
        points = [(row.nbytes / 1e9, row.swaps[0].commit_window_microseconds) for row in found.engines if row.swaps]
        line = fit(points)
        found.window_microseconds_per_gigabyte, found.window_microseconds = line.slope, line.intercept
    _write(found)
    _show(found)


def _copies(found: Findings, place: OnDevice) -> None:
    say("copies through pinned buffers")
    found.copies = copy_speeds(place, nbytes=1 << 30, turns=3)


def _equality(found: Findings, place: OnDevice) -> None:
    say("checksums by the host, equality by the device")
    found.equality = equality_speeds(place, nbytes=1 << 30, turns=3)


def _graph(found: Findings, place: OnDevice) -> None:
    say("values copied in place under a captured graph")
    found.graph = graph_in_place(place, capture=_captured)


def _captured(module: torch.nn.Module, given: torch.Tensor) -> tuple[torch.Tensor, Callable[[], object]]:
    """Capture a module as a CUDA graph."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.inference_mode():
        for _ in range(3):
            module(given)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        written: torch.Tensor = module(given)
    return written, graph.replay


async def measure_engine(
    model: BenchModel, *, settings: EmbeddedSettings, budget: Budget, turns: int, seconds: float
) -> EngineRow:
    """Swap, decode beside staging that nothing slows down, and prove what is live."""
    eager = msgspec.structs.replace(settings, stage_share=1.0)
    async with running(model, settings=eager) as (engine, start):
        swaps = await measure_swaps(engine, budget=budget, turns=turns, report=say, counts=_COUNTS)
        say("decode speed, alone and while staging")
        decode = await decode_speeds(engine, budget=budget, turns=turns, seconds=seconds)
        some = {name: model.other[name] for name in list(model.other)[: _COUNTS[0]]}
        await engine.swap(some.values(), name="other")
        there = await engine.holds(some)
        check = await engine.check_speed()
        await engine.swap([model.base[name] for name in some], name="base")
        return EngineRow(
            nbytes=model.nbytes,
            device=(await engine.memory()).device,
            start_seconds=start,
            swaps=swaps,
            decode=decode,
            check=check,
            proved=there and await engine.holds({}),
        )


async def _engine(size: float, budget: Budget) -> EngineRow:
    heading(f"The engine with a random Llama of {size:g} GB")
    model = await asyncio.to_thread(ensure_model, int(size * 1e9))
    settings = msgspec.structs.replace(SETTINGS, device=Device.CUDA)
    return await measure_engine(model, settings=settings, budget=budget, turns=3, seconds=3.0)


def _write(found: Findings) -> None:
    file = REPOSITORY / "build" / "bench-gpu.json"
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")


def lines(found: Findings) -> Iterator[tuple[str, str]]:
    """Say what was found."""
    if (copies := found.copies) is not None:
        yield (
            "copies in pieces through pinned buffers, one thread",
            _there_and_back(copies.pieces_to_device, copies.pieces_to_host),
        )
        yield "the same as one plain copy", _there_and_back(copies.plain_to_device, copies.plain_to_host)
    if (equality := found.equality) is not None:
        yield f"SHA-256 of live bytes on {equality.cores} cores", _rate(equality.sha256)
        yield "equality of two versions on the device", _rate(equality.equal)
    if (graph := found.graph) is not None:
        yield "a captured graph computes with weights copied in place", _yes(graph.replays_new)
        yield "their addresses are what they were", _yes(graph.addresses_kept)
        yield "moved pointers would have gone unnoticed by it", _yes(graph.pointers_unnoticed)
        yield (
            f"window for {graph.nbytes / 1e6:.0f} MB, copied in place / by pointers",
            f"{graph.copy_microseconds:.0f} / {graph.pointer_microseconds:.0f} µs",
        )
    for row in found.engines:
        yield from _engine_lines(row)
    if found.window_microseconds is not None and found.window_microseconds_per_gigabyte is not None:
        yield (
            "commit window against model size (asked: slope about 0)",
            f"{found.window_microseconds:.0f} µs {found.window_microseconds_per_gigabyte:+.1f} µs for each GB",
        )
    for left in found.left_out:
        yield "left out", left


def _engine_lines(row: EngineRow) -> Iterator[tuple[str, str]]:
    size = f"{row.nbytes / 1e9:.2f} GB"
    for swap in row.swaps:
        window, latency = f"{swap.commit_window_microseconds:.0f} µs", f"{1000 * swap.stop_latency_seconds:.1f} ms"
        yield (
            f"{size}: commit window / stop latency / time between tokens, {swap.tensors} tensors",
            f"{window} / {latency} / {1000 * swap.token_gap_seconds:.1f} ms",
        )
    yield (
        f"{size}: decode speed kept while staging at {_rate(row.decode.staged_bytes_per_second)}",
        f"{100 * row.decode.kept:.0f} % of {row.decode.alone:.1f} tokens/s",
    )
    yield f"{size}: hashing live tensors beside nothing", _rate(row.check)
    yield f"{size}: live bytes proved by hash after swaps, on {row.device}", _yes(row.proved)


def _show(found: Findings) -> None:
    table = Table("what", "measured", title=f"{found.device}, torch {found.torch}", title_justify="left", box=None)
    for what, measured in lines(found):
        table.add_row(what, measured)
    print()
    Console(width=130).print(table)
    say("\nfigures: build/bench-gpu.json")


def _rate(value: float) -> str:
    return f"{value / 1e9:.2f} GB/s"


def _there_and_back(there: float, back: float) -> str:
    return f"{_rate(there)} to the device, {_rate(back)} back"


def _yes(value: bool) -> str:
    return "yes" if value else "NO"


if __name__ == "__main__":
    sys.exit(main())
