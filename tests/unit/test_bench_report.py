"""The bench: what is said must follow from the rows, and nothing is said of what was not measured."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.decode import DecodeRow
from bench.delta import CHANGES, DeltaRow, measure_delta
from bench.diff import DiffRow
from bench.gate import GateRow
from bench.measure import AlternativesRow, ModelResult, OnceResult, SpeedRow, SwapRow
from bench.models import SMALL, changeable, ensure, ensure_model, layers_for
from bench.modes import GapsRow, ModeRow, ModesResult
from bench.raw import RawSpeed
from bench.report import fit, lines, ratios, tables
from bench.seen import Record
from bench.turns import Budget
from bench.verdicts import verdicts
from modelswap_engine.checkpoint.build import build_manifest
from modelswap_engine.protocol.policy import TrafficMode

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


def delta_row(change: str, *, pack_bytes: int, make: float = 4e9) -> DeltaRow:
    return DeltaRow(
        change=change, share=0.5, nbytes=10**9, pack_bytes=pack_bytes, turns=2, cores=4, build=1e9, make=make,
        prove=2e9, copy=8e9, sha256=4e9,
    )  # fmt: skip


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


def alternatives(*, diff: float, reload: float, restart: float, pause: float = 1.0) -> AlternativesRow:
    return AlternativesRow(
        diff_swap_seconds=diff,
        whole_swap_seconds=1.0,
        reload_seconds=reload,
        process_restart_seconds=restart,
        diff_bytes=1,
        diff_pause_seconds=pause,
        diff_commit_microseconds=500.0,
    )


def test_alternatives_are_told_for_the_largest_model() -> None:
    small = alternatives(diff=1, reload=2, restart=9)
    large = alternatives(diff=2, reload=8, restart=20, pause=0.1)
    found = ratios([result(1, alternatives=small), result(5, alternatives=large)])
    assert (found.reload_to_diff, found.restart_to_diff) == (4, 10)
    assert found.outage_restart_to_pause == pytest.approx(200)
    assert found.reload_to_window == pytest.approx(16000)
    assert ratios([result(5, row(12, 4000.0), alternatives=large)]).reload_to_window == pytest.approx(2000)
    assert [table.row_count for table in tables(OnceResult(), [result(1, alternatives=small)])] == [1]


def test_nothing_measured_nothing_said() -> None:
    assert list(lines(ratios([]))) == []
    assert list(tables(OnceResult(), [result(1)])) == []
    assert list(verdicts(OnceResult(), [result(1)], ratios([result(1)]))) == []


def mode(kind: TrafficMode, *, excess: float, prefill: float = 0.0, waited: int = 0) -> ModeRow:
    return ModeRow(
        mode=kind.value,
        swaps=4,
        step=0.025,
        stop_latency=0.01,
        commit_microseconds=300.0,
        pause=0.011,
        gap=0.035 + excess,
        gap_longest=0.05 + excess,
        excess=excess,
        excess_longest=excess,
        prefill=prefill,
        waited=waited,
    )


def test_verdicts_say_what_was_asked_what_was_measured_and_whether_it_was_met() -> None:
    rows = [
        mode(TrafficMode.FREEZE, excess=0.0008),
        mode(TrafficMode.RECOMPUTE, excess=0.012, prefill=0.010),
        mode(TrafficMode.OVERLAP, excess=0.0, waited=1),
    ]
    gaps = GapsRow(tokens=10, median=0.03, late=0.05, longest=0.06)
    once = OnceResult(
        gate=GateRow(admission_microseconds=7.0, registry_microseconds=2.0, total_microseconds=9.0, turns=3, others=16),
        diff=DiffRow(seconds=0.3, nbytes=4 * 10**9, tensors=240, turns=3),
        delta=[
            delta_row("1 % replaced", pack_bytes=16 * 10**6),
            delta_row("3 % replaced", pack_bytes=10**8, make=1.9e9),
            delta_row("fully fine-tuned", pack_bytes=5 * 10**8),
        ],
        modes=ModesResult(nbytes=1, clients=2, modes=rows, overlapping=gaps, split=gaps),
        decode=DecodeRow(nbytes=1, turns=2, alone=40.0, while_staging=30.0, kept=0.75, staged_bytes_per_second=4e8),
    )
    large = result(2, row(12, 1000.0), row(64, 1000.0), alternatives=alternatives(diff=1, reload=1.5, restart=9))
    results = [result(1, row(12, 1000.0), row(64, 1000.0)), large]
    said = {verdict.what: verdict for verdict in verdicts(once, results, ratios(results))}
    assert [verdict.met for verdict in said.values()] == [
        True, False, False, None, False, True, True, True, True, False, False, None, True, True, None,
    ]  # fmt: skip
    window = said["full reload in place, by the commit window"]
    assert (window.asked, window.measured) == (">= 1000 × at 2 GB", "1500 × at 2.00 GB")
    assert "slope about 0; measured 1000 µs +0.0 µs for each GB" in said["commit window against model size"].line()
    recompute = said["Recompute: the same, beyond computing the prompts again"]
    assert recompute.line().startswith("NOT MET")
    assert "10.0 ms of prompts; measured 12.0 ms" in recompute.line()
    small = verdicts(
        OnceResult(), results[:1], ratios([result(1, alternatives=alternatives(diff=1, reload=9, restart=9))])
    )
    assert [verdict.met for verdict in small] == [None]  # what was asked was asked of 2 GB


class _Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("lasting", "turns"),
    [([1.0] * 9, 5), ([3.0] * 9, 3), ([1.0, 6.0, 1.0, 1.0], 2), ([20.0] * 9, 1), ([0.0] * 9, 5)],
)
def test_turns_end_before_the_next_would_take_too_long(lasting: list[float], turns: int) -> None:
    clock = _Clock()
    made = 0
    for number in Budget(1000.0, clock=clock).turns(most=5, seconds=10.0):
        assert number == made
        clock.now += lasting[made]
        made += 1
    assert made == turns


def test_when_the_time_of_the_run_is_over_everything_is_measured_once() -> None:
    clock = _Clock()
    budget = Budget(30.0, clock=clock)
    clock.now += 29.0
    assert budget.left == 1.0
    for _ in budget.turns(most=5, seconds=20.0, least=2):
        clock.now += 5.0
    assert clock.now == 139.0
    assert budget.left == 0.0
    assert list(budget.turns(most=5, seconds=20.0)) == [0]


async def test_gaps_are_between_tokens_of_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock()
    monkeypatch.setattr("bench.seen.time", SimpleNamespace(monotonic=clock))
    record = Record()
    one, two = record.open(16), record.open(16)
    waiting = asyncio.create_task(record.more(4))
    await asyncio.sleep(0)
    for asked, moment in ((one, 1.0), (two, 2.0), (one, 3.0), (two, 7.0)):
        clock.now = moment
        asked.take(1)
    await waiting
    await record.begun(2)
    assert sorted(record.gaps()) == [2.0, 5.0]
    assert record.gaps(3.5) == [5.0]
    assert one.gap_at(2.5) == (2.0, 1)
    assert one.gap_at(3.0) is None
    assert two.gap_at(2.0) == (5.0, 1)
    clock.now = 11.0
    assert record.rate(1.0) == pytest.approx(0.4)


def test_a_table_of_packs_has_a_row_for_each_change() -> None:
    rows = measure_delta(Budget(0.0), turns=1, elements=5000)
    assert [row.change for row in rows] == list(CHANGES)
    assert [row.share for row in rows] == pytest.approx([0.01, 0.03, 0.65, 0.34], rel=0.1)
    assert all(row.nbytes == 16 * 10_000 and row.make > 0 and row.prove > 0 for row in rows)
    assert rows[0].ratio > rows[1].ratio > 1
    assert [table.row_count for table in tables(OnceResult(delta=rows), [])] == [4]


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
    raw = RawSpeed(cores=2, sha256=2e9, read=4e9, copy=8e9, look=16e9, volume=1e9)
    speed = SpeedRow(staging=1.5e9, volume=0.9e9, check=1.8e9, raw=raw)
    found = ratios([ModelResult(nbytes=10**9, layers=2, start_seconds=0.0, speed=speed)])
    assert found.staging_to_bound == pytest.approx(0.75)
    assert found.staging_to_turns is not None
    assert found.staging_to_bound < found.staging_to_turns
    assert found.volume_to_bound == pytest.approx(0.9)
    assert found.check_to_sha256 == pytest.approx(0.9)
    said = "\n".join(lines(found))
    assert "staging: 75 %" in said
    assert "hashing live tensors: 90 %" in said
    asked = verdicts(OnceResult(), [], found)
    assert [(verdict.asked, verdict.met) for verdict in asked] == [
        (">= 70 %", True),
        (">= 70 %", True),
        (">= 80 %", True),
    ]
    only = SpeedRow(check=1.8e9, raw=raw)
    assert ratios([ModelResult(nbytes=10**9, layers=2, start_seconds=0.0, speed=only)]).staging_to_bound is None
    assert len(list(tables(OnceResult(), [ModelResult(nbytes=10**9, layers=2, start_seconds=0.0, speed=speed)]))) == 1


def test_a_pair_of_checkpoints_differs_in_what_it_says_and_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODELSWAP_CACHE", str(tmp_path))
    narrow = dataclasses.replace(SMALL, hidden=36, inner=48, vocabulary=64)
    model = ensure(narrow, 4, whole=True)
    base, other = (build_manifest(model.folder / name) for name in ("base", "other"))
    same = {entry.name for entry in base.tensors if entry.sha256 == other.by_name[entry.name].sha256}
    assert {entry.name for entry in base.tensors} - same == set(model.other) == set(changeable(4)[:12])
    assert "lm_head.weight" not in base.by_name
