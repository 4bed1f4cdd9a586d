"""Building a pack from two folders: on all cores, in memory that does not grow, whole or not there.

Threads take whole tensors, the largest first, and put finished blocks one after the other into a nameless file beside
the pack, in whatever order they come; when all are there the pack is written in the order of its header. What is read
is hashed, so a pack is never built from other bytes than the manifests say.
"""

import hashlib
import itertools
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

import msgspec

from modelswap_engine.checkpoint import files, saving
from modelswap_engine.checkpoint.crew import Crew, Progress
from modelswap_engine.checkpoint.files import Opened
from modelswap_engine.checkpoint.manifest import Manifest, SideFile, TensorEntry
from modelswap_engine.checkpoint.rules import DTYPE_BITS
from modelswap_engine.delta.coding import BLOCK_BYTES, deflated, encode
from modelswap_engine.delta.layout import FRAME, Header, PackedFile, PackedTensor, Version, encode_header
from modelswap_engine.delta.local import Folder, prove, require_free

_VOLUME: Final = "the volume of the pack"


def build_pack(
    base: Folder,
    target: Folder,
    output: Path,
    *,
    progress: Progress | None = None,
    stop: threading.Event | None = None,
) -> Header:
    """Write what turns one version into another, and return its header.

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
            tensors = _packed(base, target, _Spool(spool.fileno()), progress=progress, stop=stop)
            sides = [_packed_file(base, target, side) for side in target.manifest.side_files]
            header = _header(base, target, tensors, sides)
            _write(output, header, _data(spool, tensors, sides))
    except OSError as error:
        raise saving.unwritable(output, error, volume=_VOLUME) from None
    return header


@dataclass(frozen=True, kw_only=True)
class _Packed:
    """A tensor that is packed, and where its frames lie in the spool: (offset, bytes), in order."""

    entry: PackedTensor
    frames: Sequence[tuple[int, int]]


class _Spool:
    """A file that threads append to."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._end = 0

    def add(self, frame: bytes) -> tuple[int, int]:
        """Append it and say where it lies."""
        with self._lock:
            begin = self._end
            self._end += len(frame)
        saving.write_at(self._file, begin, memoryview(frame))
        return begin, len(frame)


def _packed(
    base: Folder, target: Folder, spool: _Spool, *, progress: Progress | None, stop: threading.Event | None
) -> list[_Packed]:
    jobs = [entry for entry in target.manifest.tensors if not _same(base.manifest.by_name.get(entry.name), entry)]
    jobs.sort(key=lambda entry: entry.nbytes, reverse=True)
    crew = Crew("packing", total=sum(entry.nbytes for entry in jobs), progress=progress, stop=stop)
    origins = _origins(base.manifest, jobs)
    used = [origin.name for origin in origins.values() if origin is not None]
    with base.opened(used) as old_files, target.opened(origins) as new_files:

        def pack(entry: TensorEntry) -> _Packed:
            origin = origins[entry.name]
            old = None if origin is None else _Read(origin, old_files)
            return _pack(_Read(entry, new_files), old, crew=crew, spool=spool)

        found = crew.run(pack, jobs)
    return sorted(found, key=lambda each: each.entry.name)


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

    def __init__(self, entry: TensorEntry, opened: Mapping[str, Opened]) -> None:
        self.entry = entry
        self._file = opened[entry.file]
        self._digest = hashlib.sha256()
        self._buffer = memoryview(bytearray(min(BLOCK_BYTES, entry.nbytes)))

    def block(self, begin: int) -> memoryview:
        """Return the block that begins there, valid until the next."""
        block = self._buffer[: min(BLOCK_BYTES, self.entry.nbytes - begin)]
        files.read_into(self._file, self.entry.offset + begin, block)
        self._digest.update(block)
        return block

    def prove(self) -> None:
        """Check that what was read is what the manifest says.

        Raises:
            ManifestMismatch: it is not.
        """
        prove(self.entry, self._digest.hexdigest(), self._file)


def _pack(new: _Read, old: _Read | None, *, crew: Crew, spool: _Spool) -> _Packed:
    entry, frames, changed, by_coding = new.entry, [], 0, Counter[str]()
    width = max(1, DTYPE_BITS[entry.dtype] // 8)
    for begin in range(0, entry.nbytes, BLOCK_BYTES):
        crew.go_on()
        block = new.block(begin)
        written = encode(block, None if old is None else old.block(begin), width=width)
        frames.append(spool.add(FRAME.pack(written.coding, len(written.body)) + written.body))
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


def _packed_file(base: Folder, target: Folder, side: SideFile) -> tuple[PackedFile, bytes]:
    content = target.contents.side_files[side.name]
    had = base.contents.side_files.get(side.name) == content
    data = b"" if had or not content else deflated(memoryview(content))
    packed = PackedFile(
        name=side.name,
        size=side.size,
        sha256=side.sha256,
        canonical_sha256=side.canonical_sha256,
        packed=len(data),
    )
    return packed, data


def _header(
    base: Folder, target: Folder, tensors: Sequence[_Packed], sides: Sequence[tuple[PackedFile, bytes]]
) -> Header:
    sizes = [each.entry.size for each in tensors] + [side.packed for side, _ in sides]
    offsets = iter([0, *itertools.accumulate(sizes)])
    return Header(
        base=Version(digest=base.manifest.digest, bytes=base.manifest.total_bytes),
        target=Version(digest=target.manifest.digest, bytes=target.manifest.total_bytes),
        tensors=tuple(msgspec.structs.replace(each.entry, offset=next(offsets)) for each in tensors),
        removed=tuple(sorted(base.manifest.by_name.keys() - target.manifest.by_name.keys())),
        side_files=tuple(msgspec.structs.replace(side, offset=next(offsets)) for side, _ in sides),
    )


def _data(spool: IO[bytes], tensors: Sequence[_Packed], sides: Sequence[tuple[PackedFile, bytes]]) -> Iterator[bytes]:
    for begin, length in itertools.chain.from_iterable(each.frames for each in tensors):
        spool.seek(begin)
        yield spool.read(length)
    for _, data in sides:
        yield data


def _write(output: Path, header: Header, data: Iterator[bytes]) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=output.parent, prefix=f".{output.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), 0o644)
            file.write(encode_header(header))
            file.writelines(data)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(output)
        saving.sync(output.parent)
    finally:
        Path(temporary).unlink(missing_ok=True)
