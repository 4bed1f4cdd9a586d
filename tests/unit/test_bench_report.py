"""Ratios of the bench: what is said must follow from the rows, and nothing is said of what was not measured."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.measure import AlternativesRow, ModelResult, SpeedRow, SwapRow
from bench.models import changeable, ensure_model, layers_for
from bench.raw import RawSpeed
from bench.report import fit, lines, ratios, tables
from modelswap_engine.checkpoint.build import build_manifest

numbers = st.floats(-1e6, 1e6)


def row(tensors: int, window: float, *, seconds: float = 1.0) -> SwapRow:
    return SwapRow(
        tensors=tensors,
        changed_bytes=tensors * 10**9,
        repeats=2,
        token_gap_seconds=0.02,
        stop_latency_seconds=0.01,
        commit_window_microseconds=window,
        commit_window_longest_microseconds=2 * window,
        swap_seconds=seconds,
    )


def result(gigabytes: int, *rows: SwapRow, alternatives: AlternativesRow | None = None) -> ModelResult:
    return ModelResult(
        nbytes=gigabytes * 10**9, layers=2, start_seconds=1.0, swaps=list(rows), alternatives=alternatives
    )


@given(numbers, numbers, st.lists(st.floats(-1e3, 1e3), min_size=2, unique_by=lambda x: round(x, 1)))
def test_a_line_through_points_of_a_line_is_that_line(slope: float, intercept: float, places: list[float]) -> None:
    found = fit([(x, intercept + slope * x) for x in places])
    assert found.slope == pytest.approx(slope, rel=1e-3, abs=1e-3 * (1 + abs(slope) + abs(intercept)))


def test_no_line_through_one_place() -> None:
    with pytest.raises(ValueError, match="two points"):
        fit([(1.0, 2.0), (1.0, 3.0)])


def test_windows_are_compared_for_the_same_number_of_tensors() -> None:
    small = result(1, row(1, 50.0), row(4, 150.0))
    large = result(5, row(1, 100.0), row(4, 200.0), row(64, 900.0))
    found = ratios([large, small])
    assert found.commit_window_largest_to_smallest == pytest.approx(1.5)
    assert found.model_size_ratio == pytest.approx(5)
    assert found.commit_window_per_gigabyte == pytest.approx(12.5)


def test_the_whole_swap_is_fitted_to_changed_bytes() -> None:
    found = ratios([result(5, row(1, 1.0, seconds=1.5), row(4, 1.0, seconds=3.0))])
    assert found.swap_seconds_per_changed_gigabyte == pytest.approx(0.5)
    assert found.commit_window_per_gigabyte is None
    assert found.stop_latency_to_token_gap == pytest.approx(0.5)


def test_alternatives_are_told_for_the_largest_model() -> None:
    small = AlternativesRow(
        diff_swap_seconds=1, full_reload_seconds=2, process_restart_seconds=9, diff_bytes=1, diff_pause_seconds=1
    )
    large = AlternativesRow(
        diff_swap_seconds=2, full_reload_seconds=8, process_restart_seconds=20, diff_bytes=1, diff_pause_seconds=0.1
    )
    found = ratios([result(1, alternatives=small), result(5, alternatives=large)])
    assert (found.reload_to_diff, found.restart_to_diff) == (4, 10)
    assert found.outage_restart_to_pause == pytest.approx(200)
    assert [table.row_count for table in tables([result(1, alternatives=small)])] == [1]


def test_nothing_measured_nothing_said() -> None:
    assert list(lines(ratios([]))) == []
    assert list(tables([result(1)])) == []


def test_a_random_model_is_a_valid_checkpoint_with_the_hashes_it_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODELSWAP_CACHE", str(tmp_path))
    model = ensure_model(1)
    assert model.layers == layers_for(1) == 2
    manifest = build_manifest(model.folder / "base")
    assert {entry.name: entry.sha256 for entry in manifest.tensors} == {n: r.sha256 for n, r in model.base.items()}
    assert set(changeable(2)) == set(model.other)
    for name, changed in model.other.items():
        same = model.base[name]
        assert (changed.nbytes, changed.shape) == (same.nbytes, same.shape)
        assert changed.sha256 != same.sha256


def test_speeds_are_held_against_what_the_machine_can_do() -> None:
    raw = RawSpeed(cores=2, sha256=2e9, read=4e9, copy=8e9)
    speed = SpeedRow(staging=1.5e9, check=1.8e9, decode_alone=40.0, decode_beside=36.0, raw=raw)
    found = ratios([ModelResult(nbytes=10**9, layers=2, start_seconds=0.0, speed=speed)])
    assert found.staging_to_bound == pytest.approx(0.75)
    assert found.check_to_sha256 == pytest.approx(0.9)
    assert found.decode_beside_staging == pytest.approx(0.9)
    said = "\n".join(lines(found))
    assert "staging: 75 %" in said
    assert "hashing live tensors: 90 %" in said
    assert "decoding beside staging: 90 %" in said
    only = SpeedRow(check=1.8e9, raw=raw)
    assert ratios([ModelResult(nbytes=10**9, layers=2, start_seconds=0.0, speed=only)]).staging_to_bound is None
    assert len(list(tables([ModelResult(nbytes=10**9, layers=2, start_seconds=0.0, speed=speed)]))) == 1
