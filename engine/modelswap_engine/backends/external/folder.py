"""A folder with some tensors of a version, for an engine that loads folders: written by us, from proven bytes only.

The user's own folder never reaches the engine: it can hold more than the manifest says, be cut short, or change while
it is read, and engines die of that, or take it. What is in a folder of ours was hashed as it was written, is finite,
and appears whole or not at all.
"""

import hashlib
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

from modelswap_engine.backends.external.copying import opened, unwritable
from modelswap_engine.backends.port import TensorRange
from modelswap_engine.checkpoint import files
from modelswap_engine.checkpoint.canonical import SIDE_FILES
from modelswap_engine.checkpoint.crew import CHUNK_BYTES
from modelswap_engine.checkpoint.finite import FiniteCheck, not_finite
from modelswap_engine.checkpoint.layout import SINGLE_FILE
from modelswap_engine.checkpoint.rules import DTYPE_BITS, expected_nbytes
from modelswap_engine.checkpoint.saving import compose_header
from modelswap_engine.protocol.errors import Cancelled, InvalidCheckpoint, ManifestMismatch, UnsupportedChange


@dataclass(frozen=True)
class Join:
    """Tensors whose bytes are hashed together, one after the other, and so many zero bytes after them."""

    names: tuple[str, ...]
    zeros: int = 0


@dataclass(frozen=True, kw_only=True)
class Written:
    """What a folder holds: where its tensors lie, and the sha256 of the bytes of each join.

    ``stamp`` is that of their file; see :func:`stamp_of`.
    """

    tensors: tuple[TensorRange, ...]
    joined: Mapping[str, str]
    stamp: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(item.nbytes for item in self.tensors)


def write_folder(
    destination: Path,
    *,
    tensors: Sequence[TensorRange],
    side_files: Path,
    joins: Mapping[str, Join],
    notes: Mapping[str, bytes],
    stop: threading.Event,
) -> Written:
    """Write a checkpoint folder with these tensors and side files; takes as long as reading and hashing them.

    Args:
        destination: its path; must not exist.
        tensors: what goes into it, each name once.
        side_files: folder with the version's config and tokenizer.
        joins: what is also hashed together, by key; two that share a tensor are of the same tensors.
        notes: further files, for whoever reads the folder later.
        stop: set from elsewhere, it ends the work.

    Raises:
        ManifestMismatch, InvalidCheckpoint, ChecksFailed: a tensor is not what was promised, or not fit to be used.
        UnsupportedChange: a tensor lies in no file.
        SourceUnreadable, SourceChanged: a source failed, or ended early.
        InsufficientDisk, Unavailable: the folder cannot be written.
        Cancelled: ``stop`` was set.
    """
    order = _in_order(tensors, joins)
    draft: Path | None = None
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", dir=destination.parent))
        with (draft / SINGLE_FILE).open("xb") as file:
            header = compose_header(order)
            file.write(header)
            joined = _Joined(joins)
            for wanted in order:
                for piece in proven_pieces(wanted, stop=stop):
                    file.write(piece)
                    joined.see(wanted.name, piece)
            _synced(file)
        stamp = stamp_of(draft)
        for name in sorted(SIDE_FILES & {file.name for file in side_files.iterdir()}):
            shutil.copyfile(side_files / name, draft / name)
        for name, data in notes.items():
            (draft / name).write_bytes(data)
        draft.chmod(0o755)
        draft.rename(destination)
    except OSError as error:
        raise unwritable(destination, error) from None
    finally:
        if draft is not None:
            shutil.rmtree(draft, ignore_errors=True)
    return Written(tensors=_placed(order, destination / SINGLE_FILE, len(header)), joined=joined.sums(), stamp=stamp)


def stamp_of(folder: Path) -> tuple[int, ...]:
    """Return what tells whether the tensors in a folder of ours were written to since; empty where they are gone.

    The time of the last change is set by the system alone: nobody who may write to the file can put it back.
    """
    try:
        seen = (folder / SINGLE_FILE).stat()
    except OSError:
        return ()
    return seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns


def joined_sums(
    tensors: Mapping[str, TensorRange], joins: Mapping[str, Join], *, stop: threading.Event
) -> dict[str, str]:
    """Return key → sha256 of the bytes of each join; reads and proves its tensors.

    Raises:
        ManifestMismatch, InvalidCheckpoint, ChecksFailed, UnsupportedChange, SourceUnreadable, SourceChanged,
            Cancelled: see above.
    """
    joined = _Joined(joins)
    for names in dict.fromkeys(join.names for join in joins.values()):
        for name in names:
            for piece in proven_pieces(tensors[name], stop=stop):
                joined.see(name, piece)
    return joined.sums()


def proven_pieces(wanted: TensorRange, *, stop: threading.Event) -> Iterator[memoryview]:
    """Yield the bytes of a tensor; they are proven once the iteration has ended, and not before.

    Raises:
        ManifestMismatch, InvalidCheckpoint, ChecksFailed, UnsupportedChange, SourceUnreadable, SourceChanged,
            Cancelled: see above.
    """
    if not wanted.path:
        raise UnsupportedChange(
            f"tensor {wanted.name} was sent to the sidecar, and this engine takes tensors from folders only",
            advice="give the version as a checkpoint at a source",
        )
    expected = expected_nbytes(wanted.dtype, wanted.shape, file=wanted.path, tensor=wanted.name)
    if expected != wanted.nbytes:
        raise InvalidCheckpoint(
            f"tensor {wanted.name}: {wanted.dtype}{list(wanted.shape)} needs {expected} bytes, not {wanted.nbytes}",
            advice="the header of the file is wrong; save the checkpoint again",
            details={"tensor": wanted.name},
        )
    digest, finite = hashlib.sha256(), FiniteCheck(wanted.dtype)
    for piece in _pieces(wanted, stop):
        digest.update(piece)
        finite.see(piece)
        yield piece
    if digest.hexdigest() != wanted.sha256:
        raise ManifestMismatch(
            f"tensor {wanted.name}: bytes hash to {digest.hexdigest()[:16]}…, the manifest says {wanted.sha256[:16]}…",
            advice="the file was damaged or changed after its manifest was made; copy it again or rebuild the manifest",
            details={"tensor": wanted.name, "expected": wanted.sha256, "actual": digest.hexdigest()},
        )
    if not finite.finite:
        raise not_finite(wanted.name)


def _pieces(wanted: TensorRange, stop: threading.Event) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(min(CHUNK_BYTES, wanted.nbytes)))
    with opened(wanted) as source:
        for begin in range(0, wanted.nbytes, CHUNK_BYTES):
            if stop.is_set():
                raise Cancelled("writing the folder for the engine was cancelled")
            piece = buffer[: min(CHUNK_BYTES, wanted.nbytes - begin)]
            files.read_into(source, wanted.offset + begin, piece)
            yield piece


class _Joined:
    def __init__(self, joins: Mapping[str, Join]) -> None:
        self._joins = joins
        self._digests = {key: hashlib.sha256() for key in joins}
        self._of: dict[str, list[str]] = {}
        for key, join in joins.items():
            for name in join.names:
                self._of.setdefault(name, []).append(key)

    def see(self, name: str, piece: memoryview) -> None:
        for key in self._of.get(name, ()):
            self._digests[key].update(piece)

    def sums(self) -> dict[str, str]:
        for key, digest in self._digests.items():
            for begin in range(0, self._joins[key].zeros, CHUNK_BYTES):
                digest.update(bytes(min(CHUNK_BYTES, self._joins[key].zeros - begin)))
        return {key: digest.hexdigest() for key, digest in self._digests.items()}


def _in_order(tensors: Sequence[TensorRange], joins: Mapping[str, Join]) -> list[TensorRange]:
    """Return the tensors with those of a join in its order, so that each is read once, and the widest elements first.

    So every tensor begins at a multiple of the size of its elements, which readers of the format count on.
    """
    by_name = {item.name: item for item in tensors}
    together = {name for join in joins.values() for name in join.names}
    units = [[by_name[name] for name in names] for names in dict.fromkeys(join.names for join in joins.values())]
    units += [[item] for item in tensors if item.name not in together]
    units.sort(key=lambda unit: -min(DTYPE_BITS.get(item.dtype, 0) for item in unit))
    return [item for unit in units for item in unit]


def _placed(order: Sequence[TensorRange], file: Path, begin: int) -> tuple[TensorRange, ...]:
    placed = []
    for item in order:
        placed.append(msgspec.structs.replace(item, path=str(file), offset=begin))
        begin += item.nbytes
    return tuple(placed)


def _synced(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def point(link: Path, target: Path) -> None:
    """Make a symbolic link lead to a folder from one moment to the next, whether it is there already or not.

    Raises:
        InsufficientDisk, Unavailable: the volume does not take it.
    """
    draft = link.with_name(f".{link.name}.{os.getpid()}")
    try:
        draft.unlink(missing_ok=True)
        draft.symlink_to(target)
        draft.replace(link)
    except OSError as error:
        raise unwritable(link, error) from None
