"""Which ranges of which files to ask for, so that wanted pieces come with few requests and next to nothing else. Pure.

A span is one request. Pieces that lie next to each other share one; a gap is fetched along only while it is small
against what is wanted, so that what travels is at most :data:`OVERHEAD` more than what changed. Large pieces are cut,
so that several requests bring one large tensor and a request that breaks off costs little.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import msgspec

SPAN_BYTES: Final = 16 << 20
"""Length of a span at most."""
OVERHEAD: Final = 0.01
"""Share of a span that may be gaps."""


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that are wanted: ``nbytes`` at ``offset`` of a file; ``key`` is theirs alone."""

    key: str
    place: str
    file: str
    offset: int
    nbytes: int


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a span: ``nbytes`` from byte ``skip`` of the span on are byte ``at`` and following of ``key``."""

    key: str
    skip: int
    at: int
    nbytes: int


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """One request: bytes ``start`` to ``stop`` (excluded) of a file, and the pieces in it in their order."""

    place: str
    file: str
    start: int
    stop: int
    pieces: tuple[Piece, ...]


class _Part(msgspec.Struct, frozen=True, kw_only=True):
    of: Wanted
    at: int
    nbytes: int

    @property
    def start(self) -> int:
        return self.of.offset + self.at

    @property
    def stop(self) -> int:
        return self.start + self.nbytes


def plan_spans(wanted: Iterable[Wanted], *, longest: int = SPAN_BYTES) -> list[Span]:
    """Return the spans that bring all that is wanted, each byte once; what has no bytes is in none.

    Two that are wanted may not overlap.
    """
    found: list[Span] = []
    parts: list[_Part] = []
    useful = 0
    for part in _parts(wanted, longest):
        if parts and not _joins(parts[0], part, useful=useful + part.nbytes, longest=longest):
            found.append(_span(parts))
            parts, useful = [], 0
        parts.append(part)
        useful += part.nbytes
    if parts:
        found.append(_span(parts))
    return found


def _parts(wanted: Iterable[Wanted], longest: int) -> Iterator[_Part]:
    for item in sorted(wanted, key=lambda item: (item.place, item.file, item.offset)):
        for at in range(0, item.nbytes, longest):
            yield _Part(of=item, at=at, nbytes=min(longest, item.nbytes - at))


def _joins(first: _Part, part: _Part, *, useful: int, longest: int) -> bool:
    if (first.of.place, first.of.file) != (part.of.place, part.of.file):
        return False
    length = part.stop - first.start
    return length <= longest and length - useful <= useful * OVERHEAD


def _span(parts: Sequence[_Part]) -> Span:
    first, last = parts[0], parts[-1]
    pieces = (Piece(key=part.of.key, skip=part.start - first.start, at=part.at, nbytes=part.nbytes) for part in parts)
    return Span(place=first.of.place, file=first.of.file, start=first.start, stop=last.stop, pieces=tuple(pieces))
