"""How a manifest is spread over files, and the files beside the tensors of a folder that is being written.

The order is the safety argument: tensors, index and side files first, the manifest last, and the folder gets its name
when all of it is on the disk. Who reads it sees a whole checkpoint or none.
"""

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec

from modelswap_engine.checkpoint.index import INDEX_FILE
from modelswap_engine.checkpoint.layout import SINGLE_FILE, Reader
from modelswap_engine.checkpoint.manifest import MANIFEST_FILE, Manifest, TensorEntry, encode, make_manifest
from modelswap_engine.protocol.errors import Internal


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """One file to write, and its tensors in order."""

    file: str
    tensors: tuple[TensorEntry, ...]


def shards(manifest: Manifest, *, shard_bytes: int) -> tuple[Shard, ...]:
    """Spread the tensors over files of at most so many bytes; one tensor that is larger has a file of its own."""
    parts: list[list[TensorEntry]] = []
    room = 0
    for entry in manifest.tensors:
        if not parts or entry.nbytes > room:
            parts.append([])
            room = shard_bytes
        parts[-1].append(entry)
        room -= entry.nbytes
    if len(parts) == 1:
        return (Shard(file=SINGLE_FILE, tensors=tuple(parts[0])),)
    name = "model-{:05d}-of-{:05d}.safetensors"
    return tuple(
        Shard(file=name.format(number, len(parts)), tensors=tuple(part)) for number, part in enumerate(parts, start=1)
    )


def complete(draft: Path, destination: Path, *, manifest: Manifest, parts: Sequence[Shard], side_files: Path) -> None:
    """Add everything but the tensors to a folder that has them, and give it its name.

    Raises:
        Internal: the files are not what was planned.
        OSError: the disk does not take it.
    """
    if len(parts) > 1:
        weight_map = {entry.name: part.file for part in parts for entry in part.tensors}
        index = {"metadata": {"total_size": manifest.total_bytes}, "weight_map": weight_map}
        _write(draft / INDEX_FILE, json.dumps(index, indent=2, sort_keys=True).encode())
    for side in manifest.side_files:
        shutil.copyfile(side_files / side.name, draft / side.name)
        (draft / side.name).chmod(0o644)
    _write(draft / MANIFEST_FILE, encode(_placed(draft, manifest, parts)))
    draft.chmod(0o755)
    _sync(draft)
    draft.rename(destination)
    _sync(destination.parent)


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


def _write(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
