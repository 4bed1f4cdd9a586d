"""Requests for ranges: whatever is wanted comes exactly once, and next to nothing else does."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from modelswap_engine.sources.remote.spans import OVERHEAD, Span, Wanted, plan_spans


@st.composite
def wanted_pieces(draw: st.DrawFn) -> list[Wanted]:
    """Pieces of a few files, in any order, with gaps of all sizes between them."""
    found = []
    for file in draw(st.lists(st.sampled_from(["a", "b", "c"]), unique=True)):
        at = 0
        for gap, nbytes in draw(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 400)), max_size=12)):
            at += gap
            found.append(Wanted(key=f"{file}{at}", place="", file=file, offset=at, nbytes=nbytes))
            at += nbytes
    return draw(st.permutations(found))


def brought(spans: list[Span]) -> dict[str, list[tuple[int, int]]]:
    """Return key → (first byte, behind the last) of the pieces in their order."""
    found: dict[str, list[tuple[int, int]]] = {}
    for span in spans:
        for piece in span.pieces:
            found.setdefault(piece.key, []).append((piece.at, piece.at + piece.nbytes))
    return {key: sorted(pieces) for key, pieces in found.items()}


@given(wanted_pieces(), st.integers(1, 300))
def test_every_byte_comes_once_and_where_it_belongs(wanted: list[Wanted], longest: int) -> None:
    spans = plan_spans(wanted, longest=longest)
    by_key = {item.key: item for item in wanted if item.nbytes}
    pieces = brought(spans)
    assert pieces.keys() == by_key.keys()
    for key, ranges in pieces.items():
        assert ranges[0][0] == 0
        assert ranges[-1][1] == by_key[key].nbytes
        assert all(before[1] == after[0] for before, after in itertools.pairwise(ranges))
    for span in spans:
        for piece in span.pieces:
            item = by_key[piece.key]
            assert (span.file, span.start + piece.skip) == (item.file, item.offset + piece.at)
            assert piece.skip + piece.nbytes <= span.stop - span.start


@given(wanted_pieces(), st.integers(1, 300))
def test_requests_are_bounded_and_bring_little_else(wanted: list[Wanted], longest: int) -> None:
    for span in plan_spans(wanted, longest=longest):
        useful = sum(piece.nbytes for piece in span.pieces)
        assert 0 < span.stop - span.start <= longest
        assert span.stop - span.start - useful <= useful * OVERHEAD


def test_neighbours_share_a_request() -> None:
    wanted = [Wanted(key=str(at), place="", file="f", offset=at * 100, nbytes=100) for at in range(10)]
    assert len(plan_spans(wanted, longest=1000)) == 1
    assert len(plan_spans(wanted, longest=250)) == 5
