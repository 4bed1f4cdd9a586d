"""Tables of what was measured before real engines, and what was asked of it. Pure; a miss is said and fails nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec
from rich.table import Table

from bench.external.rows import (
    ALL,
    FULL,
    IN_PROCESS,
    PLAIN,
    RESTART,
    TENTH,
    BesideRow,
    DoorRow,
    FirstTokenRow,
    RouteRow,
)
from bench.verdicts import Verdict

KEPT: Final = 0.8
STREAM: Final = 0.95
ADDED_SECONDS: Final = 0.0005
SIDECAR_BYTES: Final = 150_000_000
FULL_TO_CLOSED: Final = 10.0
RESTART_TO_CLOSED: Final = 300.0
FULL_TO_PLAIN: Final = 3.0


class ExternalResult(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """All that this part measured."""

    first_tokens: list[FirstTokenRow] = msgspec.field(default_factory=list)
    routes: list[RouteRow] = msgspec.field(default_factory=list)
    beside: list[BesideRow] = msgspec.field(default_factory=list)
    doors: list[DoorRow] = msgspec.field(default_factory=list)


def tables(found: ExternalResult) -> Iterator[Table]:
    """Yield one table for each kind of measurement that was made."""
    if found.first_tokens:
        yield _first_tokens_table(found.first_tokens)
    if found.routes:
        yield _routes_table(found.routes)
    if found.beside:
        yield _beside_table(found.beside)
    if found.doors:
        yield _doors_table(found.doors)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _first_tokens_table(rows: Sequence[FirstTokenRow]) -> Table:
    table = _table(
        "Time to the first token of a paced upstream (p50, ms)", "streams", "requests", "straight", "proxy", "added"
    )
    for row in rows:
        times = (row.direct, row.through, row.added)
        table.add_row(str(row.streams), str(row.requests), *(f"{1000 * value:.2f}" for value in times))
    return table


def _routes_table(rows: Sequence[RouteRow]) -> Table:
    table = _table(
        "The same change by each route (medians)",
        "engine", "model", "GB", "route", "change", "MB changed", "swaps", "closed ms", "commit µs", "total s",
    )  # fmt: skip
    for row in rows:
        table.add_row(
            row.engine,
            row.model,
            f"{row.nbytes / 1e9:.2f}",
            row.route,
            row.change,
            f"{row.changed_bytes / 1e6:.0f}",
            str(row.swaps),
            f"{1000 * row.closed:.1f}",
            f"{row.commit_microseconds:.0f}" if row.commit_microseconds else "-",
            f"{row.total:.2f}",
        )
    return table


def _beside_table(rows: Sequence[BesideRow]) -> Table:
    table = _table("Decoding beside staging (tokens/s)", "engine", "model", "turns", "alone", "beside", "kept")
    for row in rows:
        figures = (f"{row.alone:.1f}", f"{row.beside:.1f}", f"{100 * row.kept:.0f} %")
        table.add_row(row.engine, row.model, str(row.turns), *figures)
    return table


def _doors_table(rows: Sequence[DoorRow]) -> Table:
    table = _table(
        "One stream through the sidecar (tokens/s)",
        *("engine", "model", "turns", "straight", "through", "kept", "sidecar MB"),
    )
    for row in rows:
        figures = (f"{row.direct:.1f}", f"{row.through:.1f}", f"{100 * row.kept:.1f} %", f"{row.rss / 1e6:.0f}")
        table.add_row(row.engine, row.model, str(row.turns), *figures)
    return table


def verdicts(found: ExternalResult) -> Iterator[Verdict]:
    """Say everything that this run can tell."""
    for row in found.first_tokens:
        yield Verdict(
            what=f"proxy: added time to the first token, {row.streams} streams",
            asked=f"< {1000 * ADDED_SECONDS:g} ms p50",
            measured=f"{1000 * row.added:.2f} ms",
            met=row.added < ADDED_SECONDS,
        )
    for door in found.doors:
        yield Verdict(
            what=f"{door.engine}: one stream through the sidecar",
            asked="< 5 % slower",
            measured=f"{100 * door.kept:.1f} % of its speed",
            met=door.kept > STREAM,
        )
        yield Verdict(
            what=f"{door.engine}: memory of the sidecar",
            asked=f"< {SIDECAR_BYTES / 1e6:.0f} MB",
            measured=f"{door.rss / 1e6:.0f} MB",
            met=door.rss < SIDECAR_BYTES,
        )
    for beside in found.beside:
        yield Verdict(
            what=f"{beside.engine}, {beside.model}: decode speed beside staging",
            asked=f">= {100 * KEPT:.0f} %",
            measured=f"{100 * beside.kept:.0f} %",
            met=beside.kept >= KEPT,
        )
    yield from _routes(found.routes)


def _routes(rows: Sequence[RouteRow]) -> Iterator[Verdict]:
    by = {(row.engine, row.model, row.route, row.change): row for row in rows}
    for (engine, model, route, change), row in by.items():
        full = by.get((engine, model, FULL, ALL))
        restart = by.get((engine, model, RESTART, ALL))
        where = f"{engine}, {model}, {route}, {change}"
        if route == IN_PROCESS and full is not None:
            yield _ratio(f"{where}: full load by closed gate", full.closed / row.closed, FULL_TO_CLOSED)
        if route == IN_PROCESS and restart is not None:
            yield _ratio(f"{where}: restart by closed gate", restart.closed / row.closed, RESTART_TO_CLOSED)
        if route == PLAIN and change == TENTH and full is not None:
            yield _ratio(f"{where}: full load by closed gate", full.closed / row.closed, FULL_TO_PLAIN)
        if route == IN_PROCESS and change == ALL and (tenth := by.get((engine, model, route, TENTH))) is not None:
            more = row.changed_bytes / tenth.changed_bytes
            yield Verdict(
                what=f"{engine}, {model}: closed gate with all tensors changed, by that with a tenth",
                asked="about 1",
                measured=f"{row.closed / tenth.closed:.2f} × for {more:.0f} × the bytes",
            )


def _ratio(what: str, measured: float, asked: float) -> Verdict:
    return Verdict(what=what, asked=f">= {asked:g} ×", measured=f"{measured:.1f} ×", met=measured >= asked)
