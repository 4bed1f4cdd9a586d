"""Opening a pack, and making tensors from it: block by block, in one buffer, proven by hash at the end.

Bytes come from whoever has them (a file, an object store, memory) and go to whoever wants them; what is held is a
block and a window of the pack, however large the tensor. Steps of a chain follow each other in the buffer, so that
nothing between A and C is ever kept. The base is only read.
"""

import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Final, NoReturn, Protocol

from modelswap_engine.checkpoint.rules import DTYPE_BITS
from modelswap_engine.delta.coding import BLOCK_BYTES, Coding, Damaged, decode, inflated
from modelswap_engine.delta.layout import (
    FRAME,
    PREAMBLE_BYTES,
    Header,
    PackedFile,
    PackedTensor,
    blocks,
    header_span,
    parse_header,
    refuse,
)
from modelswap_engine.protocol.errors import DigestMismatch

WINDOW_BYTES: Final = 2 * BLOCK_BYTES
"""What is read of a pack at once; room for any frame."""

ReadBase = Callable[[int, memoryview], object]
"""Fills a view with the bytes of a tensor that begin there; asked from front to back."""
Write = Callable[[memoryview], object]
"""Takes the next bytes of a tensor; what it is given is only valid until it returns."""


class Ranges(Protocol):
    """Bytes that can be read by range."""

    @property
    def name(self) -> str:
        """What they are called in messages; never holds credentials."""

    @property
    def size(self) -> int:
        """How many there are."""

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill a view with the bytes that begin there; called by several threads at once."""


@dataclass(frozen=True, kw_only=True)
class Pack:
    """A pack whose header was read and found valid; ``data`` is where its data begin."""

    ranges: Ranges
    header: Header
    data: int

    @cached_property
    def entries(self) -> Mapping[str, PackedTensor]:
        """What it makes, by the names of tensors."""
        return MappingProxyType({entry.name: entry for entry in self.header.tensors})

    def side_file(self, side: PackedFile) -> bytes:
        """Return a side file that is packed.

        Raises:
            InvalidDelta: it is damaged.
        """
        begin = self.data + side.offset
        packed = memoryview(bytearray(side.packed))
        self.ranges.read_into(begin, packed)
        try:
            content = bytes(inflated(packed, side.size))
            if hashlib.sha256(content).hexdigest() != side.sha256:
                raise Damaged("its sha256 is not the stated one")
        except Damaged as error:
            span = (begin, begin + side.packed)
            refuse(f"side file {side.name}: {error}", file=self.ranges.name, span=span)
        return content


@dataclass(frozen=True)
class Step:
    """A tensor of a pack: one step from some bytes to others."""

    pack: Pack
    entry: PackedTensor


def open_pack(ranges: Ranges) -> Pack:
    """Read and check the header of a pack; two ranges are read.

    Raises:
        InvalidDelta, UnsupportedFormat: it is no pack that can be used.
    """
    size, file = ranges.size, ranges.name
    preamble = bytearray(min(PREAMBLE_BYTES, size))
    ranges.read_into(0, memoryview(preamble))
    length, sha256 = header_span(bytes(preamble), file_size=size, file=file)
    text = bytearray(length)
    ranges.read_into(PREAMBLE_BYTES, memoryview(text))
    header = parse_header(bytes(text), sha256=sha256, file_size=size, file=file)
    return Pack(ranges=ranges, header=header, data=PREAMBLE_BYTES + length)


def apply(steps: Sequence[Step], *, base: ReadBase | None, write: Write) -> str:
    """Make a tensor and return its sha256, which is the one that the last step promises.

    What was written before an error is unproven and must not be used.

    Args:
        steps: one, or more where what one makes is the base of the next.
        base: reads the tensor of the old version; None where the first step needs none.
        write: takes the bytes, in order.

    Raises:
        InvalidDelta: a pack is damaged, or does not make what it promises; names file, tensor and byte range.
        DigestMismatch: the base is not the one that the first step is for.
    """
    digest, last = hashlib.sha256(), steps[-1].entry
    for piece in pieces(steps, base=base):
        digest.update(piece)
        write(piece)
    if digest.hexdigest() != last.sha256:
        _blame(steps, base)
    return last.sha256


def pieces(steps: Sequence[Step], *, base: ReadBase | None) -> Iterator[memoryview]:
    """Yield the bytes of a tensor; unproven, and each only valid until the next. See :func:`apply`."""
    _check_chain(steps, base)
    nbytes = steps[0].entry.nbytes
    frames = [_Frames(step) for step in steps]
    block = memoryview(bytearray(min(BLOCK_BYTES, nbytes)))
    for begin in range(0, nbytes, BLOCK_BYTES):
        piece = block[: min(BLOCK_BYTES, nbytes - begin)]
        if base is not None and steps[0].entry.base:
            base(begin, piece)
        for each in frames:
            each.turn(piece)
        yield piece
    for each in frames:
        each.end()


def _check_chain(steps: Sequence[Step], base: ReadBase | None) -> None:
    if steps[0].entry.base and base is None:
        raise ValueError(f"{steps[0].entry.name} is made from a base, and there is none")
    for before, after in itertools.pairwise(steps):
        if (before.entry.sha256, before.entry.nbytes) != (after.entry.base, after.entry.nbytes):
            raise ValueError(f"{after.entry.name} is not made from what the step before makes")


def _blame(steps: Sequence[Step], base: ReadBase | None) -> NoReturn:
    """Find out whether the base was another one or a pack is wrong."""
    first, last = steps[0], steps[-1]
    if base is not None and first.entry.base:
        actual, nbytes = hashlib.sha256(), first.entry.nbytes
        block = memoryview(bytearray(min(BLOCK_BYTES, nbytes)))
        for begin in range(0, nbytes, BLOCK_BYTES):
            piece = block[: min(BLOCK_BYTES, nbytes - begin)]
            base(begin, piece)
            actual.update(piece)
        if actual.hexdigest() != first.entry.base:
            raise DigestMismatch(
                f"{first.pack.ranges.name}: tensor {first.entry.name!r}: the base hashes to "
                f"{actual.hexdigest()[:16]}…, the pack is for {first.entry.base[:16]}…",
                advice="the base was damaged or changed, or is another version",
                details={"tensor": first.entry.name, "expected": first.entry.base, "actual": actual.hexdigest()},
            )
    begin = last.pack.data + last.entry.offset
    span = (begin, begin + last.entry.size)
    refuse("it does not make the bytes that it promises", file=last.pack.ranges.name, tensor=last.entry.name, span=span)


class _Frames:
    """Reads what is packed for a tensor, from front to back, some way ahead."""

    def __init__(self, step: Step) -> None:
        entry = step.entry
        self._ranges, self._entry = step.pack.ranges, entry
        self._width = max(1, DTYPE_BITS[entry.dtype] // 8)
        self._left = blocks(entry.nbytes)
        self._position = step.pack.data + entry.offset
        self._end = self._position + entry.size
        self._window = memoryview(bytearray(min(WINDOW_BYTES, entry.size)))
        self._ahead = self._window[:0]

    def turn(self, block: memoryview) -> None:
        """Turn a block of the base into that of the tensor."""
        begin = self._position
        number, length = FRAME.unpack(self._take(FRAME.size))
        self._left -= 1
        span = (begin, begin + FRAME.size + length)
        if number not in Coding.__members__.values() or (Coding(number).needs_base and not self._entry.base):
            self._refuse(f"a block of coding {number}", span)
        # Each block that is left has a frame's head, so that a hostile length takes nobody else's bytes.
        if length > min(len(block), self._end - self._position - self._left * FRAME.size):
            self._refuse(f"{length} bytes for a block of {len(block)}", span)
        try:
            decode(Coding(number), self._take(length), block, width=self._width)
        except Damaged as error:
            self._refuse(str(error), span)

    def end(self) -> None:
        """Check that nothing is left."""
        if self._position != self._end:
            self._refuse(f"{self._end - self._position} bytes after its end", (self._position, self._end))

    def _take(self, count: int) -> memoryview:
        """Return the next bytes, which are there, valid until the next call."""
        if count > len(self._ahead):
            have = len(self._ahead)
            self._window[:have] = self._ahead
            start = self._position + have
            more = min(len(self._window) - have, self._end - start)
            self._ranges.read_into(start, self._window[have : have + more])
            self._ahead = self._window[: have + more]
        taken, self._ahead = self._ahead[:count], self._ahead[count:]
        self._position += count
        return taken

    def _refuse(self, message: str, span: tuple[int, int]) -> NoReturn:
        refuse(message, file=self._ranges.name, tensor=self._entry.name, span=span)
