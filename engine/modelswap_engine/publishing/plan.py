"""What a publish uploads: files made of literal bytes and tensors, and the manifest that shows them. Pure.

A tensor that the base has under the same name is not uploaded; the manifest names the folder that really has its bytes,
never one that only refers to it. What is uploaded beside a base is called so that nobody takes the folder for a whole
checkpoint. It knows neither where bytes come from nor where they go.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from modelswap_engine.checkpoint.canonical import MAX_SIDE_FILE_BYTES, SIDE_FILES
from modelswap_engine.checkpoint.index import INDEX_FILE
from modelswap_engine.checkpoint.layout import SINGLE_FILE
from modelswap_engine.checkpoint.manifest import Manifest, TensorEntry, make_manifest
from modelswap_engine.checkpoint.saving import Shard, compose_header, compose_index, numbered, shards
from modelswap_engine.protocol.errors import BadRequest

SHARD_BYTES: Final = 4 << 30
"""Files that are composed here are at most so large, but for larger tensors."""
ENTRANCES: Final = (SINGLE_FILE, INDEX_FILE)
"""Files by which a folder without a manifest is a checkpoint."""
_CHANGED: Final = "changed"


class Upload(msgspec.Struct, frozen=True, kw_only=True):
    """One file: ``head``, followed by the bytes of ``tensors``, whose hashes are known."""

    name: str
    head: bytes
    tensors: tuple[TensorEntry, ...] = ()

    @property
    def size(self) -> int:
        """Its bytes."""
        return len(self.head) + sum(entry.nbytes for entry in self.tensors)

    @property
    def content(self) -> str:
        """What tells its bytes from all others (64 hex), known before they are read again."""
        hashes = [hashlib.sha256(self.head).hexdigest(), *(entry.sha256 for entry in self.tensors)]
        return hashlib.sha256(" ".join(hashes).encode()).hexdigest()


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """``uploads`` in any order but for :data:`ENTRANCES`, which come after all others; then the manifest."""

    manifest: Manifest
    uploads: tuple[Upload, ...]


def compose(manifest: Manifest, *, shard_bytes: int = SHARD_BYTES) -> tuple[Manifest, tuple[Upload, ...]]:
    """Lay tensors out as a checkpoint of their own; return the manifest that says where they are, and the files."""
    parts = shards(manifest, shard_bytes=shard_bytes)
    files = [_file(part) for part in parts]
    if len(parts) > 1:
        files.append(Upload(name=INDEX_FILE, head=compose_index(parts)))
    return _manifest(manifest, _placed(files)), tuple(files)


def plan_whole(manifest: Manifest, files: Sequence[Upload], side_files: Mapping[str, bytes]) -> Plan:
    """Plan a version that is a checkpoint of its own."""
    return Plan(manifest=manifest, uploads=(*_side_uploads(side_files), *files))


def plan_based(
    manifest: Manifest,
    side_files: Mapping[str, bytes],
    *,
    base: Manifest,
    place: str,
    shard_bytes: int = SHARD_BYTES,
) -> Plan:
    """Plan a version of which only that travels which its base does not have.

    Args:
        manifest: of the version; where it says that tensors lie does not matter.
        side_files: all of them, by name.
        base: another version.
        place: URI of the base's folder.
        shard_bytes: see :data:`SHARD_BYTES`.
    """
    # Under the same name: who reads a version holds each tensor against the header of the file that has it.
    shared = {
        entry.name: there for entry in manifest.tensors if same(entry, there := base.by_name.get(entry.name)) and there
    }
    new = [entry for entry in manifest.tensors if entry.name not in shared]
    files = [_file(part) for part in numbered(new, shard_bytes=shard_bytes, stem=_CHANGED)]
    tensors = {
        name: there if there.place else msgspec.structs.replace(there, place=place) for name, there in shared.items()
    }
    return Plan(
        manifest=_manifest(manifest, tensors | _placed(files)),
        uploads=(*_side_uploads(side_files), *files),
    )


def same(one: TensorEntry, other: TensorEntry | None) -> bool:
    """Say whether two tensors are the same content."""
    return other is not None and (one.dtype, one.shape, one.sha256) == (other.dtype, other.shape, other.sha256)


def check_side_files(side_files: Mapping[str, bytes]) -> Mapping[str, bytes]:
    """Return side files that belong to a version.

    Raises:
        BadRequest: one of them does not, or is too large.
    """
    for name, data in side_files.items():
        if name not in SIDE_FILES or len(data) > MAX_SIDE_FILE_BYTES:
            raise BadRequest(
                f"{name[:80]!r} ({len(data)} bytes) is no side file of a version",
                advice=f"leave it out; side files, of at most {MAX_SIDE_FILE_BYTES} bytes, are: "
                + ", ".join(sorted(SIDE_FILES)),
            )
    return side_files


def _manifest(of: Manifest, tensors: Mapping[str, TensorEntry]) -> Manifest:
    made = make_manifest(tensors, {side.name: side for side in of.side_files}, architecture=of.architecture)
    return msgspec.structs.replace(made, provenance=of.provenance)


def _file(part: Shard) -> Upload:
    return Upload(name=part.file, head=compose_header(part.tensors), tensors=part.tensors)


def _side_uploads(side_files: Mapping[str, bytes]) -> Iterable[Upload]:
    return (Upload(name=name, head=data) for name, data in sorted(side_files.items()))


def _placed(files: Iterable[Upload]) -> dict[str, TensorEntry]:
    tensors = {}
    for file in files:
        offset = len(file.head)
        for entry in file.tensors:
            tensors[entry.name] = msgspec.structs.replace(entry, file=file.name, offset=offset, place="")
            offset += entry.nbytes
    return tensors
