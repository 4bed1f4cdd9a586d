"""Building a pack from two versions: on all cores, in memory that does not grow, whole or not there.

Threads take whole tensors, the largest first, and put finished blocks one after the other into a nameless file, in
whatever order they come; when all are there the pack is given in the order of its header. What is read is hashed, so a
pack is never built from other bytes than the manifests say. Where the versions lie is not known here (:class:`Side`).
"""

import hashlib
import itertools
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, Protocol

import msgspec

from modelswap_engine.checkpoint import saving
from modelswap_engine.checkpoint.crew import Crew, Progress
from modelswap_engine.checkpoint.manifest import Manifest, SideFile, TensorEntry
from modelswap_engine.checkpoint.rules import DTYPE_BITS
from modelswap_engine.delta.coding import BLOCK_BYTES, deflated, encode
from modelswap_engine.delta.layout import FRAME, Header, PackedFile, PackedTensor, Version, encode_header
from modelswap_engine.delta.local import prove, require_free
from modelswap_engine.delta.pack import ReadBase

PROBE_BYTES: Final = 256 << 20
"""So many bytes of tensors are packed before it is given up for being too large."""
_VOLUME: Final = "the volume of the pack"


class Side(Protocol):
    """One of the two versions."""

    @property
    def name(self) -> str:
        """What it is called in messages; never holds credentials."""

    @property
    def manifest(self) -> Manifest:
        """Complete."""

    @property
    def side_files(self) -> Mapping[str, bytes]:
        """By name."""

    def reading(self, entry: TensorEntry) -> AbstractContextManager[ReadBase]:
        """Give what reads a tensor of the manifest, from front to back; called by several threads at once."""


class TooLarge(Exception):
    """The pack would be larger than it may be."""


def build_pack(
    base: Side,
    target: Side,
    output: Path,
    *,
    progress: Progress | None = None,
    stop: threading.Event | None = None,
) -> Header:
    """Write what turns one version into another to a new file, and return its header.

    Args:
        base: the old version.
        target: the new one.
        output: the pack; must not exist. About twice its size is needed beside it for the time of the work.
        progress: told (bytes done, bytes in all) of the tensors that differ.
        stop: set from elsewhere, it ends the work with ``Cancelled``.

    Raises:
        Busy: the pack is there already.
        ManifestMismatch: a tensor is not what its manifest says.
        SourceChanged, SourceUnreadable: a checkpoint cannot be read, or not any more.
        InsufficientDisk, Unavailable: the pack cannot be written.
        Cancelled: ``stop`` was set.
    """
    require_free(output)
    try:
        with tempfile.TemporaryFile(dir=output.parent) as spool:
            built = build(base, target, spool, progress=progress, stop=stop)
            _write(output, built)
    except OSError as error:
        raise saving.unwritable(output, error, volume=_VOLUME) from None
    return built.header


def build(
    base: Side,
    target: Side,
    spool: IO[bytes],
    *,
    share: float = 0.0,
    progress: Progress | None = None,
    stop: threading.Event | None = None,
) -> "Built":
    """Make what turns one version into another; it can be read as long as the spool is open.

    Args:
        base: the old version.
        target: the new one.
        spool: an empty file that is only used here; it gets about as large as the pack.
        share: of the bytes of the tensors that differ, which the pack may take; 0 is no limit.
        progress: told (bytes done, bytes in all) of the tensors that differ.
        stop: set from elsewhere, it ends the work with ``Cancelled``.

    Raises:
        TooLarge: the pack takes a larger share.
        OSError: of the spool; other errors as in :func:`build_pack`.
    """
    tensors = _packed(base, target, _Spool(spool.fileno(), share=share), progress=progress, stop=stop)
    sides = [_packed_file(base, target, side) for side in target.manifest.side_files]
    return Built(header=_header(base, target, tensors, sides), spool=spool, tensors=tensors, sides=sides)


@dataclass(frozen=True, kw_only=True)
class Built:
    """A pack as its bytes can be read, once or several times."""

    header: Header
    spool: IO[bytes]
    tensors: Sequence["_Packed"]
    sides: Sequence[tuple[PackedFile, bytes]]

    @property
    def size(self) -> int:
        """Its bytes."""
        data = sum(each.entry.size for each in self.tensors) + sum(side.packed for side, _ in self.sides)
        return len(encode_header(self.header)) + data

    def pieces(self) -> Iterator[bytes]:
        """Yield its bytes from front to back; no piece is empty."""
        yield encode_header(self.header)
        for begin, length in itertools.chain.from_iterable(each.frames for each in self.tensors):
            self.spool.seek(begin)
            yield self.spool.read(length)
        yield from filter(None, (data for _, data in self.sides))  # nothing is there of what the base has


@dataclass(frozen=True, kw_only=True)
class _Packed:
    """A tensor that is packed, and where its frames lie in the spool: (offset, bytes), in order."""

    entry: PackedTensor
    frames: Sequence[tuple[int, int]]


class _Spool:
    """A file that threads append to.

    Args:
        file: open, for nobody else.
        share: of the bytes that are packed, which may be written; 0 is no limit.
    """

    def __init__(self, file: int, *, share: float) -> None:
        self._file, self._share = file, share
        self._lock = threading.Lock()
        self._packed = self._end = 0

    def add(self, frame: bytes, *, of: int) -> tuple[int, int]:
        """Append what so many bytes were packed as, and say where it lies.

        Raises:
            TooLarge: it is more than the share.
        """
        with self._lock:
            begin = self._end
            self._end += len(frame)
            self._packed += of
        if self._packed >= PROBE_BYTES:
            self.judge()
        saving.write_at(self._file, begin, memoryview(frame))
        return begin, len(frame)

    def judge(self) -> None:
        """Compare what was written with the share.

        Raises:
            TooLarge: it is more.
        """
        if self._share and self._end > self._share * self._packed:
            raise TooLarge


def _packed(
    base: Side, target: Side, spool: _Spool, *, progress: Progress | None, stop: threading.Event | None
) -> list[_Packed]:
    jobs = differing(base.manifest, target.manifest)
    jobs.sort(key=lambda entry: entry.nbytes, reverse=True)
    crew = Crew("packing", total=sum(entry.nbytes for entry in jobs), progress=progress, stop=stop)
    origins = _origins(base.manifest, jobs)

    def pack(entry: TensorEntry) -> _Packed:
        origin = origins[entry.name]
        with ExitStack() as stack:
            new = _Read(entry, target, stack.enter_context(target.reading(entry)))
            old = None if origin is None else _Read(origin, base, stack.enter_context(base.reading(origin)))
            return _pack(new, old, crew=crew, spool=spool)

    found = crew.run(pack, jobs)
    spool.judge()
    return sorted(found, key=lambda each: each.entry.name)


def differing(base: Manifest, target: Manifest) -> list[TensorEntry]:
    """Return the tensors of one version that another one does not have in this form under this name."""
    return [entry for entry in target.tensors if not _same(base.by_name.get(entry.name), entry)]


def _same(old: TensorEntry | None, new: TensorEntry) -> bool:
    return old is not None and (old.dtype, old.shape, old.sha256) == (new.dtype, new.shape, new.sha256)


def _origins(base: Manifest, jobs: Sequence[TensorEntry]) -> dict[str, TensorEntry | None]:
    """Return what each tensor is made from: the same bytes under any name, else what had its name and form."""
    by_hash = {entry.sha256: entry for entry in base.tensors}
    found: dict[str, TensorEntry | None] = {}
    for new in jobs:
        old = by_hash.get(new.sha256) or base.by_name.get(new.name)
        alike = old is not None and (old.sha256 == new.sha256 or (old.dtype, old.shape) == (new.dtype, new.shape))
        found[new.name] = old if alike else None
    return found


class _Read:
    """Reads a tensor block by block and hashes it."""

    def __init__(self, entry: TensorEntry, side: Side, read: ReadBase) -> None:
        self.entry = entry
        self._side, self._read = side, read
        self._digest = hashlib.sha256()
        self._buffer = memoryview(bytearray(min(BLOCK_BYTES, entry.nbytes)))

    def block(self, begin: int) -> memoryview:
        """Return the block that begins there, valid until the next."""
        block = self._buffer[: min(BLOCK_BYTES, self.entry.nbytes - begin)]
        self._read(begin, block)
        self._digest.update(block)
        return block

    def prove(self) -> None:
        """Check that what was read is what the manifest says.

        Raises:
            ManifestMismatch: it is not.
        """
        prove(self.entry, self._digest.hexdigest(), self._side.name)


def _pack(new: _Read, old: _Read | None, *, crew: Crew, spool: _Spool) -> _Packed:
    entry, frames, changed, by_coding = new.entry, [], 0, Counter[str]()
    width = max(1, DTYPE_BITS[entry.dtype] // 8)
    for begin in range(0, entry.nbytes, BLOCK_BYTES):
        crew.go_on()
        block = new.block(begin)
        written = encode(block, None if old is None else old.block(begin), width=width)
        frames.append(spool.add(FRAME.pack(written.coding, len(written.body)) + written.body, of=len(block)))
        by_coding[written.coding.name.lower()] += len(written.body)
        changed += written.changed
        crew.advance(len(block))
    new.prove()
    if old is not None:
        old.prove()
    packed = PackedTensor(
        name=entry.name,
        dtype=entry.dtype,
        shape=entry.shape,
        nbytes=entry.nbytes,
        sha256=entry.sha256,
        base="" if old is None else old.entry.sha256,
        offset=0,
        size=sum(length for _, length in frames),
        coding=max(by_coding, key=by_coding.__getitem__, default=""),
        changed=changed,
    )
    return _Packed(entry=packed, frames=frames)


def _packed_file(base: Side, target: Side, side: SideFile) -> tuple[PackedFile, bytes]:
    content = target.side_files[side.name]
    had = base.side_files.get(side.name) == content
    data = b"" if had or not content else deflated(memoryview(content))
    packed = PackedFile(
        name=side.name,
        size=side.size,
        sha256=side.sha256,
        canonical_sha256=side.canonical_sha256,
        packed=len(data),
    )
    return packed, data


def _header(base: Side, target: Side, tensors: Sequence[_Packed], sides: Sequence[tuple[PackedFile, bytes]]) -> Header:
    sizes = [each.entry.size for each in tensors] + [side.packed for side, _ in sides]
    offsets = iter([0, *itertools.accumulate(sizes)])
    return Header(
        base=Version(digest=base.manifest.digest, bytes=base.manifest.total_bytes),
        target=Version(digest=target.manifest.digest, bytes=target.manifest.total_bytes),
        tensors=tuple(msgspec.structs.replace(each.entry, offset=next(offsets)) for each in tensors),
        removed=tuple(sorted(base.manifest.by_name.keys() - target.manifest.by_name.keys())),
        side_files=tuple(msgspec.structs.replace(side, offset=next(offsets)) for side, _ in sides),
    )


def _write(output: Path, built: Built) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=output.parent, prefix=f".{output.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), 0o644)
            file.writelines(built.pieces())
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(output)
        saving.sync(output.parent)
    finally:
        Path(temporary).unlink(missing_ok=True)
