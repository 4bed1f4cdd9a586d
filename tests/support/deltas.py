"""Packs of small checkpoints, and bytes that are read by range from memory."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from modelswap_engine.checkpoint.build import hash_contents
from modelswap_engine.checkpoint.layout import read_contents
from modelswap_engine.delta.build import build_pack
from modelswap_engine.delta.layout import Header, encode_header
from modelswap_engine.delta.local import Folder
from modelswap_engine.delta.pack import Pack, ReadBase, Step, apply, open_pack
from tests.support.checkpoints import Tensor, write_checkpoint


@dataclass
class MemoryRanges:
    """Bytes in memory; remembers which ranges were read."""

    data: bytes
    name: str = "pack"
    read: list[tuple[int, int]] = field(default_factory=list)

    @property
    def size(self) -> int:
        return len(self.data)

    def read_into(self, offset: int, view: memoryview) -> None:
        assert offset >= 0
        assert offset + len(view) <= len(self.data)
        self.read.append((offset, len(view)))
        view[:] = self.data[offset : offset + len(view)]


def folder_of(directory: Path) -> Folder:
    """Read and hash a checkpoint folder."""
    roots = (directory.resolve(),)
    contents = read_contents(roots[0], roots=roots)
    return Folder(contents=contents, manifest=hash_contents(contents, roots=roots), roots=roots)


def written(
    place: Path, tensors: Mapping[str, Tensor], *, side_files: Mapping[str, bytes] | None = None, shards: int = 1
) -> Folder:
    """Write a checkpoint and read it."""
    return folder_of(write_checkpoint(place, tensors, side_files=side_files, shards=shards))


def pack_of(place: Path, old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> bytes:
    """Return the pack that turns the one into the other."""
    place.mkdir()
    output = place / "pack"
    build_pack(written(place / "old", old), written(place / "new", new), output)
    return output.read_bytes()


def opened(data: bytes) -> Pack:
    """Open a pack in memory."""
    return open_pack(MemoryRanges(data))


def reader(data: bytes) -> ReadBase:
    """Return what reads a base from memory."""

    def read(begin: int, view: memoryview) -> None:
        view[:] = data[begin : begin + len(view)]

    return read


def made(pack: Pack, name: str, base: bytes | None = None) -> bytes:
    """Make a tensor."""
    result = bytearray()
    digest = apply([Step(pack, pack.entries[name])], base=None if base is None else reader(base), write=result.extend)
    assert digest == hashlib.sha256(result).hexdigest()
    return bytes(result)


def resealed(data: bytes, change: Callable[[Header], Header]) -> bytes:
    """Return a pack whose header says something else, with a hash that is right."""
    pack = opened(data)
    return encode_header(change(pack.header)) + data[pack.data :]


def first(header: Header, **lies: object) -> Header:
    """Return a header whose first tensor is another."""
    entry = msgspec.structs.replace(header.tensors[0], **lies)
    return msgspec.structs.replace(header, tensors=(entry, *header.tensors[1:]))
