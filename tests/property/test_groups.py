"""Closing a set of names over fusion groups: whole groups, the smallest set, once is enough."""

from hypothesis import given
from hypothesis import strategies as st

from modelswap_engine.checkpoint.groups import close_over_groups, touched_groups

NAMES = st.sets(st.sampled_from("abcdefghij"))


@st.composite
def groups(draw: st.DrawFn) -> tuple[tuple[str, ...], ...]:
    grouped: dict[int, list[str]] = {}
    for name in sorted(draw(NAMES)):
        grouped.setdefault(draw(st.integers(0, 4)), []).append(name)
    return tuple(tuple(members) for members in grouped.values())


@given(names=NAMES, layout=groups())
def test_it_holds_the_names_that_the_engine_reads_in_whole_groups(names, layout) -> None:  # type: ignore[no-untyped-def]
    closed = set(close_over_groups(names, layout))
    assert names & {name for group in layout for name in group} <= closed
    assert all(closed.isdisjoint(group) or closed.issuperset(group) for group in layout)


@given(names=NAMES, layout=groups())
def test_it_is_idempotent(names, layout) -> None:  # type: ignore[no-untyped-def]
    closed = close_over_groups(names, layout)
    assert close_over_groups(closed, layout) == closed


@given(names=NAMES, layout=groups())
def test_it_is_minimal(names, layout) -> None:  # type: ignore[no-untyped-def]
    closed = set(close_over_groups(names, layout))
    for group in layout:  # every group in it is needed by one of the names
        assert closed.isdisjoint(group) or not names.isdisjoint(group)
    assert closed <= {name for group in layout for name in group}


@given(names=NAMES, more=NAMES, layout=groups())
def test_it_is_monotone_and_sorted(names, more, layout) -> None:  # type: ignore[no-untyped-def]
    closed = close_over_groups(names, layout)
    assert set(closed) <= set(close_over_groups(names | more, layout))
    assert list(closed) == sorted(set(closed))
    assert sum(map(len, touched_groups(names, layout))) == len(closed)
