"""A whole checkpoint folder out of a pack and the folder of the old version, which is only read.

Everything in the new folder was hashed as it was written, what the pack does not name as well; the folder has the
promised digest and appears whole, or not at all.
"""

import contextlib
import hashlib
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from modelswap_engine.checkpoint import files, saving
from modelswap_engine.checkpoint.canonical import architecture_of, side_file
from modelswap_engine.checkpoint.crew import Crew, Progress
from modelswap_engine.checkpoint.files import Opened
from modelswap_engine.checkpoint.layout import SINGLE_FILE
from modelswap_engine.checkpoint.manifest import Manifest, TensorEntry, make_manifest
from modelswap_engine.checkpoint.saving import Shard
from modelswap_engine.delta.layout import PackedFile, PackedTensor, refuse
from modelswap_engine.delta.local import Folder, prove, require_free
from modelswap_engine.delta.pack import Pack, ReadBase, Step, apply
from modelswap_engine.protocol.errors import DigestMismatch, InsufficientDisk

SHARD_BYTES: Final = 5 * 10**9
_VOLUME: Final = "the volume of the new folder"


def apply_pack(
    pack: Pack,
    base: Folder,
    destination: Path,
    *,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
    stop: threading.Event | None = None,
) -> Manifest:
    """Write the folder of the new version; takes as long as reading and hashing it.

    Args:
        pack: what turns the one version into the other.
        base: the old version.
        destination: the new folder; must not exist.
        shard_bytes: the most that one of its files holds, unless a tensor is larger.
        progress: told (bytes done, bytes in all).
        stop: set from elsewhere, it ends the work with ``Cancelled``.

    Raises:
        Busy: something is at the destination.
        DigestMismatch, InvalidDelta: the pack is for another version, or damaged.
        ManifestMismatch: a tensor or a side file of the base is not what its manifest says.
        SourceChanged, SourceUnreadable: the base or the pack cannot be read, or not any more.
        InsufficientDisk, Unavailable: the folder cannot be written.
        Cancelled: ``stop`` was set.
    """
    require_free(destination)
    _check_base(pack, base.manifest)
    side_files = {side.name: _content(pack, base, side) for side in pack.header.side_files}
    manifest = _promised(pack, base.manifest, side_files)
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        _require_room(destination.parent, manifest)
        with _drafts(destination) as (draft, beside):
            for name, content in side_files.items():
                (beside / name).write_bytes(content)
            parts = saving.shards(manifest, shard_bytes=shard_bytes)
            crew = Crew("applying", total=manifest.total_bytes, progress=progress, stop=stop)
            _write(draft, parts, pack, base, crew=crew)
            saving.complete(draft, destination, manifest=manifest, parts=parts, side_files=beside)
    except OSError as error:
        raise saving.unwritable(destination, error, volume=_VOLUME) from None
    return manifest


def _check_base(pack: Pack, base: Manifest) -> None:
    header, file = pack.header, pack.ranges.name
    if header.base.digest != base.digest:
        raise DigestMismatch(
            f"{file}: it is for {header.base.digest}, the base is {base.digest}",
            advice="name the folder that the pack was built from, or take the pack that was built from this one",
            details={"file": file, "expected": header.base.digest, "actual": base.digest},
        )
    for name in header.removed:
        if name not in base.by_name:
            refuse("it is to be removed, and the base has none", file=file, tensor=name)
    sizes = {entry.sha256: entry.nbytes for entry in base.tensors}
    for entry in header.tensors:
        if entry.base and sizes.get(entry.base) != entry.nbytes:
            refuse("the base has not what it is made from", file=file, tensor=entry.name)


def _promised(pack: Pack, base: Manifest, side_files: Mapping[str, bytes]) -> Manifest:
    """Return the manifest of what will be made; ``file`` and ``offset`` of its tensors mean nothing yet.

    Raises:
        InvalidDelta: it is not that of the version that the pack is said to make.
    """
    removed = frozenset(pack.header.removed)
    tensors = {name: entry for name, entry in base.by_name.items() if name not in removed}
    tensors |= {entry.name: _listed(entry) for entry in pack.header.tensors}
    sides = {name: side_file(name, content) for name, content in side_files.items()}
    manifest = make_manifest(tensors, sides, architecture=architecture_of(side_files))
    promised = pack.header.target.digest
    if manifest.digest != promised:
        refuse(f"it promises {promised}, what it lists is {manifest.digest}", file=pack.ranges.name)
    return manifest


def _listed(entry: PackedTensor) -> TensorEntry:
    return TensorEntry(
        name=entry.name,
        dtype=entry.dtype,
        shape=entry.shape,
        nbytes=entry.nbytes,
        file=SINGLE_FILE,
        offset=0,
        sha256=entry.sha256,
    )


def _content(pack: Pack, base: Folder, side: PackedFile) -> bytes:
    if side.packed:
        return pack.side_file(side)
    content = base.contents.side_files.get(side.name, b"") if side.size else b""
    if hashlib.sha256(content).hexdigest() != side.sha256:
        raise DigestMismatch(
            f"{pack.ranges.name}: side file {side.name}: the one of the base is another",
            advice="name the folder that the pack was built from",
            details={"file": side.name, "expected": side.sha256},
        )
    return content


def _require_room(folder: Path, manifest: Manifest) -> None:
    free = shutil.disk_usage(folder).free
    if free < manifest.total_bytes:
        raise InsufficientDisk(
            f"{folder}: the new folder needs {manifest.total_bytes / 1e9:.2f} GB, {free / 1e9:.2f} GB are free",
            advice=f"give {_VOLUME} more room",
        )


@contextlib.contextmanager
def _drafts(destination: Path) -> Iterator[tuple[Path, Path]]:
    """Make a folder that becomes the destination, and one for side files; what is left of them goes."""
    with contextlib.ExitStack() as undo:
        drafts = []
        for _ in range(2):
            draft = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", dir=destination.parent))
            undo.callback(shutil.rmtree, draft, ignore_errors=True)
            drafts.append(draft)
        yield drafts[0], drafts[1]


@dataclass(frozen=True, kw_only=True)
class _Job:
    """A tensor, and where it is written."""

    entry: TensorEntry
    file: int
    at: int


def _write(draft: Path, parts: Sequence[Shard], pack: Pack, base: Folder, *, crew: Crew) -> None:
    with contextlib.ExitStack() as stack:
        jobs: list[_Job] = []
        written: list[int] = []
        for part in parts:
            file = stack.enter_context((draft / part.file).open("xb")).fileno()
            written.append(file)
            jobs += _begin(file, part)
        jobs.sort(key=lambda job: job.entry.nbytes, reverse=True)
        opened = stack.enter_context(base.opened(base.manifest.by_name.keys()))
        crew.run(_Maker(pack, base, opened, crew).make, jobs)
        for file in written:
            os.fsync(file)


def _begin(file: int, part: Shard) -> Iterator[_Job]:
    header = saving.compose_header(part.tensors)
    saving.write_at(file, 0, memoryview(header))
    os.fchmod(file, 0o644)
    position = len(header)
    for entry in part.tensors:
        yield _Job(entry=entry, file=file, at=position)
        position += entry.nbytes


class _Maker:
    """Makes tensors where they belong: those that the pack names by it, others by copying; all are hashed."""

    def __init__(self, pack: Pack, base: Folder, opened: Mapping[str, Opened], crew: Crew) -> None:
        self._pack, self._base, self._opened, self._crew = pack, base, opened, crew
        self._by_hash = {entry.sha256: entry for entry in base.manifest.tensors}

    def make(self, job: _Job) -> None:
        entry = self._pack.entries.get(job.entry.name)
        if entry is None:
            self._copy(job)
            return
        position = job.at

        def write(piece: memoryview) -> None:
            nonlocal position
            self._crew.go_on()
            saving.write_at(job.file, position, piece)
            position += len(piece)
            self._crew.advance(len(piece))

        apply([Step(self._pack, entry)], base=self._reader(entry.base) if entry.base else None, write=write)

    def _reader(self, sha256: str) -> ReadBase:
        old = self._by_hash[sha256]
        file = self._opened[old.file]
        return lambda begin, view: files.read_into(file, old.offset + begin, view)

    def _copy(self, job: _Job) -> None:
        old, digest, position = self._base.manifest.by_name[job.entry.name], hashlib.sha256(), job.at
        file = self._opened[old.file]
        for chunk in self._crew.chunks(file, old.offset, old.nbytes):
            digest.update(chunk)
            saving.write_at(job.file, position, chunk)
            position += len(chunk)
        prove(old, digest.hexdigest(), self._base.name)
