"""The GPU bench's measuring, on the CPU: everything but the graph itself is what runs there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.model


def _place() -> Any:
    from modelswap_engine.weights.place import OnDevice
    from tests.support.late_copies import LateCopies

    return OnDevice(LateCopies(), piece=4096)


def _held(module: Any, given: Any) -> tuple[Any, Callable[[], object]]:
    """Compute like a captured graph: from the addresses of now, into the same memory each time."""
    import torch

    weights = [parameter.detach() for parameter in module.parameters()]
    written = torch.empty_like(given)

    def replay() -> None:
        values = given
        for weight in weights:
            values = torch.nn.functional.linear(values, weight)
        written.copy_(values)

    return written, replay


def test_speeds_are_of_bytes_that_arrived() -> None:
    from bench.device import copy_speeds, equality_speeds

    copies = copy_speeds(_place(), nbytes=50_000, turns=1)
    assert copies.nbytes == 50_000
    assert min(copies.pieces_to_device, copies.pieces_to_host, copies.plain_to_device, copies.plain_to_host) > 0
    equality = equality_speeds(_place(), nbytes=50_000, turns=1)
    assert equality.sha256 > 0
    assert equality.equal > 0


def test_a_graph_sees_values_copied_in_place_and_does_not_see_pointers() -> None:
    from bench.device import graph_in_place

    row = graph_in_place(_place(), capture=_held, width=32)
    assert (row.replays_new, row.addresses_kept, row.pointers_unnoticed) == (True, True, True)
    assert row.nbytes == 16 * 32 * 32 * 2


def test_what_a_graph_does_is_not_assumed() -> None:
    from bench.device import graph_in_place

    def by_parameters(module: Any, given: Any) -> tuple[Any, Callable[[], object]]:
        import torch

        written = torch.empty_like(given)
        return written, lambda: written.copy_(module(given))

    row = graph_in_place(_place(), capture=by_parameters, width=32)
    assert (row.replays_new, row.pointers_unnoticed) == (True, False)


async def test_an_engine_is_measured_and_proved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import msgspec

    from bench.engine import SETTINGS
    from bench.gpu import Findings, lines, measure_engine
    from bench.models import SMALL, ensure
    from bench.turns import Budget

    monkeypatch.setenv("MODELSWAP_CACHE", str(tmp_path))
    model = ensure(dataclasses.replace(SMALL, hidden=36, inner=48, vocabulary=64), 4, whole=True)
    settings = msgspec.structs.replace(SETTINGS, torch_threads=1)
    row = await measure_engine(model, settings=settings, budget=Budget(60.0), turns=1, seconds=0.2)
    assert row.proved
    assert [swap.tensors for swap in row.swaps] == [12]
    assert row.device == "cpu"
    assert row.decode.alone > 0
    found = Findings(when="now", device="a device", torch="2", engines=[row], left_out=["8 GB: no time"])
    said = dict(lines(found))
    assert said["left out"] == "8 GB: no time"
    assert any(what.endswith("proved by hash after swaps, on cpu") and value == "yes" for what, value in said.items())


def test_without_a_gpu_one_line_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    from bench.gpu import main

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("no GPU here")
