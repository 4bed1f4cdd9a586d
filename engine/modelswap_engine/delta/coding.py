"""How one block of a tensor is written down, given the same block of the tensor before.

Elements are taken as unsigned integers of their size, so NaN payloads and negative zero are values like any other.
What changed is written as the difference of these integers, small numbers of either sign folded into small ones
(zigzag): a weight that moves by one step in its last place is one of two symbols, where an exclusive or has a symbol
for each length of the carry. What is no number (weights of four bits packed in words, flipped signs) has no carry, and
takes less as exclusive or. Integers are split into planes of bytes: the high ones say little, the low ones are noise.

 SAME        nothing: the block before
 RAW         the bytes
 PLANES      a stream for each byte plane of the elements, the lowest first
 DIFFERENCE  the same of the differences
 XOR         the same of the exclusive ors
 SPARSE      how many elements changed (u32), the length of the gaps (u32), a stream of the gaps, and one for each byte
             plane of the differences there. A gap is the number of elements since the last that changed: in bytes, of
             which 255 means 255 more elements and no change

A stream is its length (u32) and so many bytes: plain where that is the length it must have, else one zstd frame that
states this length. All integers are little-endian. Pure; knows neither tensors nor files, and trusts no byte.
"""

import threading
from collections.abc import Mapping
from enum import IntEnum
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import zstandard

BLOCK_BYTES: Final = 2 << 20
"""Bytes of a tensor that are one block; the last one is what is left. A part of the format; small, so that what is
worked on stays in a core's cache."""

Elements = npt.NDArray[np.unsignedinteger[Any]]
Plane = npt.NDArray[np.uint8]

_UNSIGNED: Final[Mapping[int, np.dtype[np.unsignedinteger[Any]]]] = {
    width: np.dtype(f"<u{width}") for width in (1, 2, 4, 8)
}
_SIGNED: Final[Mapping[int, np.dtype[np.signedinteger[Any]]]] = {
    width: np.dtype(f"<i{width}") for width in (1, 2, 4, 8)
}
_WORD: Final = 4
_SKIP: Final = 255
_LEVEL: Final = 1  # noise has nothing to be found by searching for longer, and higher levels made it larger
_BITS: Final = 8
_TRIED: Final = 8  # the part of a block that two ways are tried with
_WINDOW_BYTES: Final = 1 << 27
"""The largest window of a zstd frame that is read; what a frame may hold is known before and checked by itself."""


class Coding(IntEnum):
    """How a block is written."""

    SAME = 0
    RAW = 1
    PLANES = 2
    DIFFERENCE = 3
    SPARSE = 4
    XOR = 5

    @property
    def needs_base(self) -> bool:
        """Whether the block before is needed to read it."""
        return self not in (Coding.RAW, Coding.PLANES)


class Damaged(ValueError):
    """The bytes are not those of a block; for whoever knows where they lie to say it to a person."""


class Encoded(NamedTuple):
    """A block as it is written, and how many of its elements are others than before."""

    coding: Coding
    body: bytes
    changed: int


class _Contexts(threading.local):
    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=_LEVEL, write_content_size=True, write_checksum=False)
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES)


_contexts: Final = _Contexts()


def deflated(data: memoryview) -> bytes:
    """Return a zstd frame of the data, or the data where that is shorter."""
    packed: bytes = _contexts.compressor.compress(data)
    return packed if len(packed) < len(data) else bytes(data)


def inflated(data: memoryview, nbytes: int) -> bytes | memoryview:
    """Return so many bytes; no more memory is taken, whatever the frame claims.

    Raises:
        Damaged: it is no frame of so many bytes.
    """
    if len(data) == nbytes:
        return data
    try:
        stated = zstandard.frame_content_size(data)
        if stated != nbytes:
            raise Damaged(f"a zstd frame of {stated} bytes where {nbytes} are due")
        whole: bytes = _contexts.decompressor.decompress(data, max_output_size=nbytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise Damaged(f"not a zstd frame: {error}") from None
    if len(whole) != nbytes:
        raise Damaged(f"a zstd frame gave {len(whole)} bytes where {nbytes} are due")
    return whole


def encode(target: memoryview, base: memoryview | None, *, width: int) -> Encoded:
    """Write a block in the way that takes the fewest bytes.

    Args:
        target: the block.
        base: the block before, as long; None where there is none.
        width: bytes of an element.
    """
    new = np.frombuffer(target, _UNSIGNED[width])
    found: list[tuple[Coding, bytes]] = []
    changed = len(new)
    if base is not None:
        old = np.frombuffer(base, _UNSIGNED[width])
        places = np.flatnonzero(new != old)
        changed = len(places)
        if changed == 0:
            return Encoded(Coding.SAME, b"", 0)
        if 2 * changed <= len(new):
            found.append((Coding.SPARSE, _sparse(places, _folded(new[places], old[places]))))
        else:
            found.append(_all(new, old))
    # Planes of trained weights take about two thirds of them, so they are not tried where the change is short.
    if not any(2 * len(body) <= len(target) for _, body in found):
        found += [(Coding.PLANES, _planes(new)), (Coding.RAW, bytes(target))]
    coding, body = min(found, key=lambda each: len(each[1]))
    return Encoded(coding, body, changed)


def decode(coding: Coding, body: memoryview, block: memoryview, *, width: int) -> None:
    """Turn the block before into this one, where it lies.

    Args:
        coding: how it is written.
        body: as it is written.
        block: the block before; where the coding needs none, its bytes do not matter.
        width: bytes of an element.

    Raises:
        Damaged: the body is not one of a block of this length.
    """
    if coding is Coding.SAME:
        _refuse_more(body)
    elif coding is Coding.RAW:
        if len(body) != len(block):
            raise Damaged(f"{len(body)} bytes for a block of {len(block)}")
        block[:] = body
    else:
        elements = np.frombuffer(block, _UNSIGNED[width])
        if coding is Coding.PLANES:
            _join(_Streams(body), elements)
        elif coding is Coding.DIFFERENCE:
            elements += _differences(_Streams(body), len(elements), elements.dtype)
        elif coding is Coding.XOR:
            elements ^= _joined(_Streams(body), len(elements), elements.dtype)
        else:
            _scatter(_Streams(body), elements)


def _all(new: Elements, old: Elements) -> tuple[Coding, bytes]:
    """Write all elements in the way that takes less for the first of them: both whole would take twice as long."""
    part = slice(len(new) // _TRIED or None)
    if len(_planes(new[part] ^ old[part])) < len(_planes(_folded(new[part], old[part]))):
        return Coding.XOR, _planes(new ^ old)
    return Coding.DIFFERENCE, _planes(_folded(new, old))


def _folded(new: Elements, old: Elements) -> Elements:
    signed = (new - old).view(_SIGNED[new.itemsize])
    folded: Elements = ((signed << 1) ^ (signed >> (_BITS * new.itemsize - 1))).view(new.dtype)
    return folded


def _differences(streams: "_Streams", count: int, dtype: np.dtype[Any]) -> Elements:
    folded = _joined(streams, count, dtype)
    sign = np.negative(folded & 1)
    folded >>= 1
    folded ^= sign
    return folded


def _planes(elements: Elements) -> bytes:
    shifts = range(0, _BITS * elements.itemsize, _BITS)
    return b"".join(_stream((elements >> shift).astype(np.uint8)) for shift in shifts)


def _joined(streams: "_Streams", count: int, dtype: np.dtype[Any]) -> Elements:
    elements: Elements = np.empty(count, dtype)
    _join(streams, elements)
    return elements


def _join(streams: "_Streams", into: Elements) -> None:
    """Put planes together, in place of what is there; nothing must follow them."""
    planes = [np.frombuffer(streams.take(len(into)), np.uint8) for _ in range(into.itemsize)]
    streams.end()
    into[:] = planes.pop()
    while planes:
        into <<= _BITS
        into |= planes.pop()


def _sparse(places: npt.NDArray[np.intp], differences: Elements) -> bytes:
    gaps = np.diff(places, prepend=-1) - 1
    skips, rest = np.divmod(gaps, _SKIP)
    ends = np.cumsum(skips + 1)
    written = np.full(int(ends[-1]), _SKIP, np.uint8)
    written[ends - 1] = rest
    return _word(len(places)) + _word(len(written)) + _stream(written) + _planes(differences)


def _scatter(streams: "_Streams", elements: Elements) -> None:
    count, length = streams.word(), streams.word()
    if not 0 < count <= length <= len(elements):
        raise Damaged(f"{count} changes in {length} gaps of {len(elements)} elements")
    gaps = np.frombuffer(streams.take(length), np.uint8)
    ends = gaps != _SKIP
    if not ends[-1] or np.count_nonzero(ends) != count:
        raise Damaged(f"the gaps are not those of {count} changes")
    places = np.cumsum(np.add(gaps, ends, dtype=np.intp))
    places -= 1
    if count != length:
        places = places[ends]
    if places[-1] >= len(elements):
        raise Damaged(f"element {places[-1]} of a block of {len(elements)} changes")
    elements[places] += _differences(streams, count, elements.dtype)


def _word(number: int) -> bytes:
    return number.to_bytes(_WORD, "little")


def _stream(data: Plane) -> bytes:
    packed = deflated(data.data)
    return _word(len(packed)) + packed


def _refuse_more(body: memoryview) -> None:
    if len(body):
        raise Damaged(f"{len(body)} bytes after its end")


class _Streams:
    """Takes a body apart from front to back."""

    def __init__(self, body: memoryview) -> None:
        self._rest = body

    def word(self) -> int:
        return int.from_bytes(self._bytes(_WORD), "little")

    def take(self, nbytes: int) -> bytes | memoryview:
        length = self.word()
        if length > nbytes:
            raise Damaged(f"a stream of {length} bytes for {nbytes}")
        return inflated(self._bytes(length), nbytes)

    def end(self) -> None:
        _refuse_more(self._rest)

    def _bytes(self, count: int) -> memoryview:
        if count > len(self._rest):
            raise Damaged(f"it ends {count - len(self._rest)} bytes early")
        taken, self._rest = self._rest[:count], self._rest[count:]
        return taken
