"""Ratios and tables from what was measured. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
from rich.table import Table

from bench.delta import DeltaRow
from bench.measure import ModelResult, OnceResult
from bench.modes import ModesResult


class Fit(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A straight line through points: ``y = intercept + slope * x``."""

    slope: float
    intercept: float


class Ratios(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What the run says, as ratios; None where it was not measured.

    Attributes:
        commit_window_per_gigabyte: growth of the window with model size for the same changed tensors, µs per GB.
        commit_window_intercept: of the same line, µs.
        commit_window_largest_to_smallest: the window in the largest model by that in the smallest.
        model_size_ratio: how many times larger the largest model is.
        swap_seconds_per_changed_gigabyte: growth of the whole swap with changed bytes, in the largest model.
        stop_latency_to_token_gap: by how much of the usual wait for a token a pause delays it, in the largest model.
        reload_to_window: time of a full reload in place by the commit window, in the largest model.
        reload_to_diff, restart_to_diff: time of the alternatives by that of the diff, in the largest model.
        staging_to_bound: speed of staging by the lower of SHA-256 on all cores and reading, in the largest model.
        volume_to_bound: the same for files that the system does not have in memory.
        staging_to_turns: the same by reading, hashing and looking for NaN in turn on all cores.
        check_to_sha256: speed of hashing live tensors by that of SHA-256 on all cores, in the largest model.
        outage_restart_to_pause: seconds without service by a restart, by the seconds that the diff paused.
    """

    commit_window_per_gigabyte: float | None = None
    commit_window_intercept: float | None = None
    commit_window_largest_to_smallest: float | None = None
    model_size_ratio: float | None = None
    swap_seconds_per_changed_gigabyte: float | None = None
    stop_latency_to_token_gap: float | None = None
    reload_to_window: float | None = None
    reload_to_diff: float | None = None
    restart_to_diff: float | None = None
    outage_restart_to_pause: float | None = None
    staging_to_bound: float | None = None
    volume_to_bound: float | None = None
    staging_to_turns: float | None = None
    check_to_sha256: float | None = None


def fit(points: Sequence[tuple[float, float]]) -> Fit:
    """Return the least-squares line.

    Raises:
        ValueError: fewer than two different x.
    """
    if len({x for x, _ in points}) < 2:
        raise ValueError("a line needs two points with different x")
    count = len(points)
    mean_x, mean_y = sum(x for x, _ in points) / count, sum(y for _, y in points) / count
    above = sum((x - mean_x) * (y - mean_y) for x, y in points)
    slope = above / sum((x - mean_x) ** 2 for x, _ in points)
    return Fit(slope=slope, intercept=mean_y - slope * mean_x)


def ratios(results: Sequence[ModelResult]) -> Ratios:
    """Return the ratios of a run."""
    ordered = sorted(results, key=lambda result: result.nbytes)
    found = Ratios()
    if ordered and (last := ordered[-1].alternatives) is not None:
        found = msgspec.structs.replace(
            found,
            reload_to_window=last.reload_seconds / (_window(ordered[-1]) / 1e6),
            reload_to_diff=last.reload_seconds / last.diff_swap_seconds,
            restart_to_diff=last.process_restart_seconds / last.diff_swap_seconds,
            outage_restart_to_pause=last.process_restart_seconds / last.diff_pause_seconds,
        )
    if ordered and len(ordered[-1].swaps) > 1:
        times = fit([(row.changed_bytes / 1e9, row.swap_seconds) for row in ordered[-1].swaps])
        found = msgspec.structs.replace(found, swap_seconds_per_changed_gigabyte=times.slope)
        waits = [row.stop_latency_seconds / row.token_gap_seconds for row in ordered[-1].swaps if row.token_gap_seconds]
        if waits:
            found = msgspec.structs.replace(found, stop_latency_to_token_gap=sum(waits) / len(waits))
    if ordered and (speed := ordered[-1].speed) is not None:
        found = msgspec.structs.replace(
            found,
            staging_to_bound=speed.staging / speed.raw.bound if speed.staging else None,
            volume_to_bound=speed.volume / min(speed.raw.sha256, speed.raw.volume) if speed.volume else None,
            staging_to_turns=speed.staging / speed.raw.in_turn if speed.staging else None,
            check_to_sha256=speed.check / speed.raw.sha256 if speed.check else None,
        )
    windows = _windows(ordered)
    if len(windows) > 1:
        found = msgspec.structs.replace(
            found,
            commit_window_per_gigabyte=fit(windows).slope,
            commit_window_intercept=fit(windows).intercept,
            commit_window_largest_to_smallest=windows[-1][1] / windows[0][1],
            model_size_ratio=windows[-1][0] / windows[0][0],
        )
    return found


def _window(result: ModelResult) -> float:
    """Return the commit window of a dozen tensors in µs: the median of the swaps, else that of the one diff."""
    dozen = [row.commit_window_microseconds for row in result.swaps if row.tensors == 12]
    return dozen[0] if dozen or result.alternatives is None else result.alternatives.diff_commit_microseconds


def _windows(ordered: Sequence[ModelResult]) -> list[tuple[float, float]]:
    """Return (model GB, commit window in µs), the mean over the numbers of tensors that all models could change."""
    measured = [result for result in ordered if result.swaps]
    if not measured:
        return []
    common = set.intersection(*({row.tensors for row in result.swaps} for result in measured))
    points = []
    for result in measured:
        windows = [row.commit_window_microseconds for row in result.swaps if row.tensors in common]
        points.append((result.nbytes / 1e9, sum(windows) / len(windows)))
    return points


def tables(once: OnceResult, results: Sequence[ModelResult]) -> Iterator[Table]:
    """Yield one table for each kind of measurement that was made."""
    if once.modes is not None:
        yield _modes_table(once.modes)
    if once.delta:
        yield _delta_table(once.delta)
    if any(result.swaps for result in results):
        yield _swap_table(results)
    if any(result.alternatives for result in results):
        yield _alternatives_table(results)
    if any(result.memory for result in results):
        yield _memory_table(results)
    if any(result.speed for result in results):
        yield _speed_table(results)


def _modes_table(found: ModesResult) -> Table:
    table = _table(
        f"Traffic modes under {found.clients} clients, model {_gigabytes(found.nbytes)} (medians; ms)",
        "mode", "swaps", "step", "stop latency", "commit µs", "gate closed", "token gap", "longest", "excess", "waited",
    )  # fmt: skip
    for row in found.modes:
        seconds = (row.step, row.stop_latency)
        after = (row.pause, row.gap, row.gap_longest, row.excess)
        table.add_row(
            row.mode,
            str(row.swaps),
            *(_milliseconds(value) for value in seconds),
            f"{row.commit_microseconds:.0f}",
            *(_milliseconds(value) for value in after),
            str(row.waited),
        )
    return table


def _delta_table(rows: Sequence[DeltaRow]) -> Table:
    table = _table(
        f"Packs of changed 2-byte elements in {_gigabytes(rows[0].nbytes)}, {rows[0].cores} cores (GB/s of tensors)",
        "change", "elements", "pack", "smaller", "build", "make", "make + hash", "copy", "SHA-256",
    )  # fmt: skip
    for row in rows:
        speeds = (row.build, row.make, row.prove, row.copy, row.sha256)
        table.add_row(
            row.change,
            f"{100 * row.share:.0f} %",
            _megabytes(row.pack_bytes),
            f"{row.ratio:.1f} ×",
            *(f"{speed / 1e9:.2f}" for speed in speeds),
        )
    return table


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.1f}" if seconds else "-"


def _speed_table(results: Sequence[ModelResult]) -> Table:
    columns = ("model", "cores", "SHA-256", "read", "copy", "volume", "look", "staging", "staging, volume", "check")
    table = _table("Speeds with nothing else running (GB/s)", *columns)
    for result in results:
        if (row := result.speed) is None:
            continue
        best = (row.raw.sha256, row.raw.read, row.raw.copy, row.raw.volume, row.raw.look)
        figures = (*best, row.staging, row.volume, row.check)
        table.add_row(_gigabytes(result.nbytes), str(row.raw.cores), *(f"{figure / 1e9:.2f}" for figure in figures))
    return table


def _swap_table(results: Sequence[ModelResult]) -> Table:
    table = _table(
        "Swaps of k tensors while a request runs (medians)",
        "model", "k", "changed", "token gap", "stop latency", "commit window", "longest", "whole swap",
    )  # fmt: skip
    for result in results:
        for row in result.swaps:
            table.add_row(
                _gigabytes(result.nbytes),
                str(row.tensors),
                _megabytes(row.changed_bytes),
                f"{1000 * row.token_gap_seconds:.1f} ms",
                f"{1000 * row.stop_latency_seconds:.1f} ms",
                f"{row.commit_window_microseconds:.0f} µs",
                f"{row.commit_window_longest_microseconds:.0f} µs",
                f"{row.swap_seconds:.2f} s",
            )
    return table


def _alternatives_table(results: Sequence[ModelResult]) -> Table:
    table = _table(
        "The same change by other means",
        "model", "diff swap", "service pauses", "swap of all", "full reload in place", "process restart (no service)",
    )  # fmt: skip
    for result in results:
        if (row := result.alternatives) is None:
            continue
        table.add_row(
            _gigabytes(result.nbytes),
            f"{row.diff_swap_seconds:.2f} s",
            f"{1000 * row.diff_pause_seconds:.1f} ms",
            f"{row.whole_swap_seconds:.2f} s",
            f"{row.reload_seconds:.2f} s ({row.reload_seconds / row.diff_swap_seconds:.0f} ×)",
            f"{row.process_restart_seconds:.2f} s ({row.process_restart_seconds / row.diff_swap_seconds:.0f} ×)",
        )
    return table


def _memory_table(results: Sequence[ModelResult]) -> Table:
    table = _table(
        "Memory of the worker",
        "model", "KV cache", "overhead", "RSS", "changed", "staged", "RSS then", "previous", "RSS then",
    )  # fmt: skip
    for result in results:
        if (row := result.memory) is None:
            continue
        numbers = (
            row.model, row.kv_cache, row.overhead, row.rss, row.changed, row.staged, row.rss_while_staged, row.previous,
            row.rss_with_previous,
        )  # fmt: skip
        table.add_row(*(_megabytes(number) for number in numbers))
    return table


def lines(found: Ratios) -> Iterator[str]:
    """Say the ratios."""
    if found.commit_window_largest_to_smallest is not None and found.model_size_ratio is not None:
        yield (
            f"commit window: {found.commit_window_per_gigabyte or 0:+.0f} µs for each GB of model; "
            f"{found.commit_window_largest_to_smallest:.2f} × in a model {found.model_size_ratio:.0f} × larger"
        )
    if found.stop_latency_to_token_gap is not None:
        yield f"stop latency: {found.stop_latency_to_token_gap:.2f} × the time between two tokens (largest model)"
    if found.swap_seconds_per_changed_gigabyte is not None:
        yield f"whole swap: {found.swap_seconds_per_changed_gigabyte:.1f} s for each GB that changed (largest model)"
    if found.staging_to_bound is not None:
        yield f"staging: {100 * found.staging_to_bound:.0f} % of the lower of SHA-256 on all cores and reading"
    if found.volume_to_bound is not None:
        yield f"staging: {100 * found.volume_to_bound:.0f} % of it where files are on the volume only"
    if found.staging_to_turns is not None:
        yield f"staging: {100 * found.staging_to_turns:.0f} % of reading, hashing and looking for NaN in turn"
    if found.check_to_sha256 is not None:
        yield f"hashing live tensors: {100 * found.check_to_sha256:.0f} % of SHA-256 on all cores"
    if found.reload_to_diff is not None:
        yield f"full reload in place: {found.reload_to_diff:.1f} × the time of the diff (largest model)"
        yield (
            f"process restart: {found.restart_to_diff or 0:.1f} × the time of the diff, and "
            f"{found.outage_restart_to_pause or 0:.0f} × as long without service (largest model)"
        )


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    return table


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB"


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"
