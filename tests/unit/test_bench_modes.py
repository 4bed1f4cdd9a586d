"""The bench of traffic modes with a real engine: what it says of each mode is what that mode does."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import pytest

from bench.engine import SETTINGS
from bench.models import SMALL, ensure
from bench.modes import measure_modes
from bench.turns import Budget

pytestmark = [pytest.mark.model, pytest.mark.full]


async def test_every_mode_is_measured_under_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELSWAP_CACHE", str(tmp_path))
    model = ensure(dataclasses.replace(SMALL, hidden=72, inner=96, vocabulary=512), 4, whole=True)
    settings = msgspec.structs.replace(SETTINGS, page_size=16, num_blocks=128, max_batch_tokens=512, torch_threads=1)
    said = list[str]()
    found = await measure_modes(model, budget=Budget(60.0), turns=2, report=said.append, settings=settings)
    rows = {row.mode: row for row in found.modes}
    assert set(rows) == {"Freeze", "Recompute", "Abort", "Drain", "Overlap"}
    assert all(row.swaps == 2 and row.step > 0 for row in found.modes)
    # Streams that go on have a gap; those that ended have none, and only their successors may wait.
    assert all(rows[mode].gap > 0 for mode in ("Freeze", "Recompute", "Overlap"))
    assert rows["Abort"].gap == rows["Drain"].gap == 0
    assert rows["Recompute"].prefill > 0
    assert rows["Drain"].pause >= rows["Drain"].stop_latency > 0
    assert (rows["Overlap"].waited, rows["Overlap"].pause) == (0, 0)
    assert found.overlapping is not None
    assert found.split is not None
    assert found.split.tokens >= found.overlapping.tokens // 2
