"""The bench before engines of others: what is said must follow from the rows."""

import msgspec
import pytest

from bench.external.report import ExternalResult, tables, verdicts
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


def route(name: str, change: str, closed: float, changed: int = 1000) -> RouteRow:
    return RouteRow(
        engine="vllm", model="m", nbytes=10_000, route=name, change=change, changed_bytes=changed, swaps=2,
        closed=closed, total=2 * closed,
    )  # fmt: skip


def said(found: ExternalResult, part: str) -> Verdict:
    (verdict,) = [verdict for verdict in verdicts(found) if part in verdict.what]
    return verdict


def test_routes_are_held_against_the_full_load_and_the_restart() -> None:
    found = ExternalResult(
        routes=[
            route(IN_PROCESS, TENTH, 0.01),
            route(IN_PROCESS, ALL, 0.02, changed=10_000),
            route(PLAIN, TENTH, 0.1),
            route(FULL, ALL, 0.15),
            route(RESTART, ALL, 4.0),
        ]
    )
    assert said(found, f"{IN_PROCESS}, {TENTH}: full load").met is True
    assert said(found, f"{IN_PROCESS}, {ALL}: full load").met is False
    assert said(found, f"{IN_PROCESS}, {TENTH}: restart").met is True
    assert said(found, f"{IN_PROCESS}, {ALL}: restart").met is False
    assert said(found, f"{PLAIN}, {TENTH}: full load").met is False
    grown = said(found, "closed gate with all tensors changed")
    assert grown.met is None
    assert grown.measured == "2.00 × for 10 × the bytes"


def test_nothing_is_said_of_what_was_not_measured() -> None:
    assert list(verdicts(ExternalResult())) == []
    assert list(tables(ExternalResult())) == []
    assert list(verdicts(ExternalResult(routes=[route(IN_PROCESS, TENTH, 0.01)]))) == []


@pytest.mark.parametrize(("through", "met"), [(0.0104, True), (0.0106, False)])
def test_the_added_time_decides(through: float, met: bool) -> None:
    found = ExternalResult(first_tokens=[FirstTokenRow(streams=8, requests=80, direct=0.01, through=through)])
    assert said(found, "8 streams").met is met


def test_the_sidecar_is_held_to_speed_and_memory() -> None:
    door = DoorRow(engine="vllm", model="m", turns=3, direct=100.0, through=96.0, kept=0.96, rss=100_000_000)
    slow = msgspec.structs.replace(door, kept=0.9, rss=200_000_000)
    assert [verdict.met for verdict in verdicts(ExternalResult(doors=[door]))] == [True, True]
    assert [verdict.met for verdict in verdicts(ExternalResult(doors=[slow]))] == [False, False]


def test_each_kind_has_a_table() -> None:
    found = ExternalResult(
        first_tokens=[FirstTokenRow(streams=1, requests=40, direct=0.001, through=0.002)],
        routes=[route(IN_PROCESS, TENTH, 0.01)],
        beside=[BesideRow(engine="vllm", model="m", turns=2, alone=10.0, beside=9.0, kept=0.9)],
        doors=[DoorRow(engine="vllm", model="m", turns=2, direct=10.0, through=9.9, kept=0.99, rss=1)],
    )
    assert [table.row_count for table in tables(found)] == [1, 1, 1, 1]
    assert said(found, "decode speed").met is True
