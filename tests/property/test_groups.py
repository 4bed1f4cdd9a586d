"""Closing a set of names over fusion groups: whole groups, the smallest set, once is enough."""

from hypothesis import given
from hypothesis import strategies as st

from modelswap_engine.checkpoint.groups import touched_groups

NAMES = st.sets(st.sampled_from("abcdefghij"))
Layout = tuple[tuple[str, ...], ...]


@st.composite
def groups(draw: st.DrawFn) -> Layout:
    grouped: dict[int, list[str]] = {}
    for name in sorted(draw(NAMES)):
        grouped.setdefault(draw(st.integers(0, 4)), []).append(name)
    return tuple(tuple(members) for members in grouped.values())


def closed(names: set[str], layout: Layout) -> set[str]:
    return {name for group in touched_groups(names, layout) for name in group}


@given(names=NAMES, layout=groups())
def test_it_holds_every_name_that_the_engine_reads_in_whole_groups(names: set[str], layout: Layout) -> None:
    found = closed(names, layout)
    assert names & {name for group in layout for name in group} <= found
    assert all(found.isdisjoint(group) or found.issuperset(group) for group in layout)


@given(names=NAMES, layout=groups())
def test_it_is_idempotent(names: set[str], layout: Layout) -> None:
    assert closed(closed(names, layout), layout) == closed(names, layout)


@given(names=NAMES, layout=groups())
def test_it_is_minimal(names: set[str], layout: Layout) -> None:
    for group in touched_groups(names, layout):
        assert not names.isdisjoint(group)  # without it, one of the names would be missing
    assert len(set(touched_groups(names, layout))) == len(touched_groups(names, layout))


@given(names=NAMES, more=NAMES, layout=groups())
def test_more_names_never_touch_less_and_the_order_is_the_engines(
    names: set[str], more: set[str], layout: Layout
) -> None:
    assert closed(names, layout) <= closed(names | more, layout)
    found = touched_groups(names, layout)
    assert list(found) == sorted(found, key=layout.index)
