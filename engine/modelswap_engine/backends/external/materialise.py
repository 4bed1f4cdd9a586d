"""The whole checkpoint of a version as files at one path, for an engine that starts, or loads, from a folder.

Under one root, which nobody else writes to::

    checkpoints/<64 hex of the digest>/    safetensors files, side files and the manifest; whole or not there
    current  → checkpoints/…               what an engine that starts must load
    previous → checkpoints/…               what ``current`` was before

A folder gets its name when all of it is written, proved and on the disk, and is moved away before it is removed; links
are made beside and renamed. So whoever is killed, between whichever two steps, leaves the old ``current`` or the new
one. What is in doubt is hashed again: a folder that an earlier process left is read once before it is trusted (the
engine is about to read all of it anyway). It knows no engine; when to switch is for the caller to say.
"""

import asyncio
import contextlib
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Final, TypeVar

from modelswap_engine.backends.external.copying import unwritable, write_shards
from modelswap_engine.backends.port import Load, TensorRange
from modelswap_engine.checkpoint import saving
from modelswap_engine.checkpoint.build import hash_contents
from modelswap_engine.checkpoint.canonical import architecture_of, side_file
from modelswap_engine.checkpoint.crew import Progress
from modelswap_engine.checkpoint.layout import read_contents
from modelswap_engine.checkpoint.manifest import Manifest, TensorEntry, make_manifest
from modelswap_engine.protocol.errors import (
    DigestMismatch,
    InsufficientDisk,
    NotFound,
    Refused,
    SourceChanged,
    SourceUnreadable,
    UnsupportedChange,
)

CURRENT: Final = "current"
PREVIOUS: Final = "previous"
SHARD_BYTES: Final = 5_000_000_000
MIB: Final = 1 << 20
_FOLDER: Final = "checkpoints"
_PREFIX: Final = "sha256:"
_SPARE_BYTES: Final = MIB  # for what is not tensors or side files: headers, index, manifest, directory entries
_PER_TENSOR_BYTES: Final = 1024  # a tensor's share of header, index and manifest, generously

T = TypeVar("T")


def free_bytes(folder: Path) -> int:
    """Return what the file system of a folder still gives to a user without privileges."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


class Materialiser:
    """Checkpoints under one root, and which of them is current.

    Args:
        root: the folder; made when needed. Nobody else writes to it.
        limit_bytes: what all of it may take; 0: as much as the file system has. An emptyDir's ``sizeLimit`` is not
            visible in the file system, and exceeding it evicts the pod.
        shard_bytes: upper bound of one safetensors file, unless a single tensor is larger.
        free: says what the file system still gives.
    """

    def __init__(
        self,
        root: Path,
        *,
        limit_bytes: int = 0,
        shard_bytes: int = SHARD_BYTES,
        free: Callable[[Path], int] = free_bytes,
    ) -> None:
        self._root, self._folder = root, root / _FOLDER
        self._limit_bytes, self._shard_bytes, self._free = limit_bytes, shard_bytes, free
        self._proved: set[str] = set()

    @property
    def path(self) -> Path:
        """The stable path of whatever is current, for the engine's command line."""
        return self._root / CURRENT

    async def current(self) -> str:
        """Return the digest of what is current, "" when nothing is."""
        return await self._thread(lambda: self._digest(CURRENT))

    async def previous(self) -> str:
        """Return the digest of what was current before, "" when nothing was, or it is gone."""
        return await self._thread(lambda: self._digest(PREVIOUS))

    async def write(self, order: Load, *, progress: Progress | None = None) -> Path:
        """Return the folder with the whole version; what is there already, and proved, is not written again.

        Raises:
            ManifestMismatch, DigestMismatch: the bytes are not those of the version.
            InsufficientDisk: it does not fit; the message has the figures.
            UnsupportedChange: a tensor lies in no file.
            SourceUnreadable, SourceChanged, Unavailable: not now.
        """
        stop = threading.Event()
        try:
            return await self._thread(lambda: self._write(order, progress, stop))
        except asyncio.CancelledError:
            stop.set()  # the threads end at their next chunk
            raise

    async def switch(self, digest: str) -> None:
        """Make a version that was written the current one; the one before becomes the previous one.

        Raises:
            NotFound: it was not written.
            Unavailable: the links cannot be written.
        """
        await self._thread(lambda: self._switch(digest))

    async def collect(self, *, keep: Collection[str] = (), previous: bool = True) -> None:
        """Remove everything but the current version, the previous one, and the digests in ``keep``.

        Args:
            keep: digests that are needed although they are not current yet.
            previous: False gives the previous version up, too.
        """
        await self._thread(lambda: self._collect(keep, previous=previous))

    async def _thread(self, work: Callable[[], T]) -> T:
        return await asyncio.to_thread(self._guarded, work)

    def _guarded(self, work: Callable[[], T]) -> T:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            return work()
        except OSError as error:
            raise unwritable(self._root, error) from None

    # Writing

    def _write(self, order: Load, progress: Progress | None, stop: threading.Event) -> Path:
        folder = self._folder / _name(order.digest)
        if folder.is_dir():
            if folder.name in self._proved or self._intact(folder, order.digest, stop):
                self._proved.add(folder.name)
                return folder
            self._remove(folder)
        manifest = _manifest(order)
        self._require_room(manifest)
        parts = saving.shards(manifest, shard_bytes=self._shard_bytes)
        with _draft(folder) as draft:
            ranges = {wanted.name: wanted for wanted in order.tensors}
            write_shards(draft, parts, ranges, progress=progress, stop=stop)
            saving.complete(draft, folder, manifest=manifest, parts=parts, side_files=Path(order.directory))
        self._proved.add(folder.name)
        return folder

    def _intact(self, folder: Path, digest: str, stop: threading.Event) -> bool:
        try:
            contents = read_contents(folder, roots=[folder])
            return hash_contents(contents, roots=[folder], stop=stop).digest == digest
        except (Refused, SourceChanged, SourceUnreadable):
            return False

    def _require_room(self, manifest: Manifest) -> None:
        needed = _SPARE_BYTES + manifest.total_bytes + len(manifest.tensors) * _PER_TENSOR_BYTES
        needed += sum(side.size for side in manifest.side_files)
        if needed > self._room():
            self._collect((), previous=True)
        room = self._room()
        if needed > room:
            raise InsufficientDisk(
                f"{self._root}: the checkpoint {manifest.digest[:19]}… needs {needed / MIB:.1f} MiB, "
                f"{room / MIB:.1f} MiB may be used beside the current and the previous one",
                advice="give the volume of the engine's checkpoints more room: three times the largest checkpoint",
                details={"neededMiB": f"{needed / MIB:.1f}", "availableMiB": f"{room / MIB:.1f}"},
            )

    def _room(self) -> int:
        free = self._free(self._root)
        return min(free, self._limit_bytes - used_bytes(self._root)) if self._limit_bytes else free

    # Choosing

    def _switch(self, digest: str) -> None:
        folder = self._folder / _name(digest)
        if not folder.is_dir():
            raise NotFound(f"{folder}: not written", advice="write the version before switching to it")
        before = self._target(CURRENT)
        if before == folder:
            return
        if before is not None:
            self._link(PREVIOUS, before)
        self._link(CURRENT, folder)

    def _link(self, name: str, folder: Path) -> None:
        draft = self._root / f".{name}"
        draft.unlink(missing_ok=True)
        draft.symlink_to(folder.relative_to(self._root))
        draft.replace(self._root / name)
        saving.sync(self._root)

    def _target(self, name: str) -> Path | None:
        try:
            folder = self._folder / (self._root / name).readlink().name
        except FileNotFoundError:
            return None
        return folder if folder.is_dir() else None

    def _digest(self, name: str) -> str:
        folder = self._target(name)
        return _PREFIX + folder.name if folder is not None else ""

    # Removing

    def _collect(self, keep: Collection[str], *, previous: bool) -> None:
        if not previous:
            (self._root / PREVIOUS).unlink(missing_ok=True)
        kept = {folder for folder in (self._target(CURRENT), self._target(PREVIOUS)) if folder is not None}
        kept |= {self._folder / _name(digest) for digest in keep}
        for entry in list(self._folder.iterdir()):
            if entry not in kept:
                self._remove(entry)

    def _remove(self, folder: Path) -> None:
        """Take a folder away under its name at once, and then its files."""
        self._proved.discard(folder.name)
        if not folder.name.startswith("."):
            moved = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=self._folder))
            folder = folder.rename(moved / folder.name).parent
        shutil.rmtree(folder, ignore_errors=True)  # what stays has no name that counts, and goes the next time


def _name(digest: str) -> str:
    return digest.removeprefix(_PREFIX)


def _manifest(order: Load) -> Manifest:
    """Return the version as it will be written, places left out, and hold it against the digest before anything is.

    Raises:
        DigestMismatch: tensors and side files are not those of the digest.
        UnsupportedChange: a tensor lies in no file.
    """
    for wanted in order.tensors:
        if not wanted.path:
            raise UnsupportedChange(
                f"tensor {wanted.name}: a trainer sent it, and it lies in no file",
                advice="save the version to a folder first; an engine in its own container loads from folders only",
                details={"tensor": wanted.name},
            )
    found = _side_files(Path(order.directory))
    manifest = make_manifest(
        {wanted.name: _entry(wanted) for wanted in order.tensors},
        {name: side_file(name, data) for name, data in found.items()},
        architecture=architecture_of(found),
    )
    if manifest.digest != order.digest:
        raise DigestMismatch(
            f"{order.directory}: tensors and side files together are {manifest.digest}, wanted is {order.digest}",
            advice="the version is not used; resolve it again",
            details={"expected": order.digest, "actual": manifest.digest},
        )
    return manifest


def _entry(wanted: TensorRange) -> TensorEntry:
    return TensorEntry(
        name=wanted.name,
        dtype=wanted.dtype,
        shape=wanted.shape,
        nbytes=wanted.nbytes,
        file="",
        offset=0,
        sha256=wanted.sha256,
    )


def _side_files(directory: Path) -> dict[str, bytes]:
    try:
        return {entry.name: entry.read_bytes() for entry in directory.iterdir()}
    except OSError as error:
        raise SourceUnreadable(
            f"{directory}: the side files of the version cannot be read: {error.strerror or error}",
            advice="check the state directory",
        ) from None


@contextlib.contextmanager
def _draft(folder: Path) -> Iterator[Path]:
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        yield draft
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def used_bytes(root: Path) -> int:
    """Return what everything below a folder takes on the disk."""
    used = 0
    for folder, _, names in os.walk(root):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                status = os.lstat(os.path.join(folder, name))
                used += max(status.st_blocks * 512, status.st_size)
    return used
