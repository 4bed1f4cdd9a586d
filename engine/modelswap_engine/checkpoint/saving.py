"""How a manifest is spread over files, and the files beside the tensors of a folder that is being written.

The order is the safety argument: tensors, index and side files first, the manifest last, and the folder gets its name
when all of it is on the disk. Who reads it sees a whole checkpoint or none.
"""

import errno
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, Protocol

import msgspec

from modelswap_engine.checkpoint.index import INDEX_FILE
from modelswap_engine.checkpoint.layout import SINGLE_FILE, Reader
from modelswap_engine.checkpoint.manifest import MANIFEST_FILE, Manifest, TensorEntry, encode, make_manifest
from modelswap_engine.checkpoint.rules import DTYPE_BITS
from modelswap_engine.protocol.errors import InsufficientDisk, Internal, ModelswapError, Unavailable

_HEADER_ALIGNMENT: Final = 8
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


class Described(Protocol):
    """What a header says of a tensor."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def dtype(self) -> str:
        """The safetensors name of its dtype."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape, in elements."""

    @property
    def nbytes(self) -> int:
        """Its bytes."""


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """One file to write, and its tensors in order."""

    file: str
    tensors: tuple[TensorEntry, ...]


def shards(manifest: Manifest, *, shard_bytes: int) -> tuple[Shard, ...]:
    """Spread the tensors over files of at most so many bytes; one tensor that is larger has a file of its own."""
    parts = numbered(manifest.tensors, shard_bytes=shard_bytes, stem="model")
    return parts if len(parts) > 1 else tuple(Shard(file=SINGLE_FILE, tensors=part.tensors) for part in parts)


def numbered(tensors: Iterable[TensorEntry], *, shard_bytes: int, stem: str) -> tuple[Shard, ...]:
    """Spread tensors over files that are called ``{stem}-00001-of-0000N.safetensors``."""
    parts: list[list[TensorEntry]] = []
    room = 0
    for entry in tensors:
        if not parts or entry.nbytes > room:
            parts.append([])
            room = shard_bytes
        parts[-1].append(entry)
        room -= entry.nbytes
    count = len(parts)
    return tuple(
        Shard(file=f"{stem}-{number:05d}-of-{count:05d}.safetensors", tensors=_aligned(part))
        for number, part in enumerate(parts, start=1)
    )


def _aligned(tensors: Iterable[TensorEntry]) -> tuple[TensorEntry, ...]:
    """Put the widest elements first: so each tensor begins at a multiple of its elements' size, as readers expect."""
    return tuple(sorted(tensors, key=lambda entry: (-DTYPE_BITS[entry.dtype], entry.name)))


def compose_header(tensors: Iterable[Described]) -> bytes:
    """Return the first bytes of a safetensors file whose data are these tensors, one after the other."""
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.nbytes
        fields[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def compose_index(parts: Iterable[Shard]) -> bytes:
    """Return the index of a checkpoint of several files."""
    entries = [(entry, part.file) for part in parts for entry in part.tensors]
    total = sum(entry.nbytes for entry, _ in entries)
    index = {"metadata": {"total_size": total}, "weight_map": {entry.name: file for entry, file in entries}}
    return json.dumps(index, indent=2, sort_keys=True).encode()


def complete(draft: Path, destination: Path, *, manifest: Manifest, parts: Sequence[Shard], side_files: Path) -> None:
    """Add everything but the tensors to a folder that has them, and give it its name.

    Raises:
        Internal: the files are not what was planned.
        OSError: the disk does not take it.
    """
    if len(parts) > 1:
        write(draft / INDEX_FILE, compose_index(parts))
    for side in manifest.side_files:
        write(draft / side.name, (side_files / side.name).read_bytes())
    write(draft / MANIFEST_FILE, encode(_placed(draft, manifest, parts)))
    draft.chmod(0o755)
    sync(draft)
    draft.rename(destination)
    sync(destination.parent)


def _placed(draft: Path, manifest: Manifest, parts: Sequence[Shard]) -> Manifest:
    """Return the manifest with the places that the files say."""
    reader = Reader(draft, roots=[draft])
    tensors: dict[str, TensorEntry] = {}
    for part in parts:
        for entry in reader.header(part.file) or ():
            tensors[entry.name] = msgspec.structs.replace(entry, sha256=manifest.by_name[entry.name].sha256)
    placed = make_manifest(
        tensors, {side.name: side for side in manifest.side_files}, architecture=manifest.architecture
    )
    if placed.digest != manifest.digest:
        raise Internal(f"what was written has the digest {placed.digest}, meant was {manifest.digest}")
    return placed


def write(path: Path, data: bytes) -> None:
    """Write a new file that everybody may read; it is on the disk when this returns."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fchmod(file.fileno(), 0o644)
        os.fsync(file.fileno())


def sync(directory: Path) -> None:
    """Wait until what a folder names is on the disk."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_at(file: int, offset: int, view: memoryview) -> None:
    """Write all of some bytes to a place in a file; several threads can do so at once."""
    done = 0
    while done < len(view):
        done += os.pwrite(file, view[done:], offset + done)


def unwritable(path: Path, error: OSError, *, volume: str) -> ModelswapError:
    """Return what a failed write means; ``volume`` is what a person calls the place."""
    reason = f"{path}: {error.strerror or error}"
    if error.errno in _FULL:
        return InsufficientDisk(reason, advice=f"give {volume} more room")
    return Unavailable(reason, advice=f"check that {volume} is mounted and writable")
