"""Tensors from where they lie into files of a new folder, each hashed on its way.

The bytes that are written are the bytes that were hashed, so a source that changes meanwhile is caught. They are copied
and never linked: a hard link, or a link to the source, would change together with it after it was proved. It needs no
torch, since a sidecar has none, and knows neither engines nor where the folder will end up.
"""

import contextlib
import errno
import hashlib
import os
import stat
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from modelswap_engine.backends.port import TensorRange
from modelswap_engine.checkpoint import files
from modelswap_engine.checkpoint.files import Opened
from modelswap_engine.checkpoint.hashing import CHUNK_BYTES, Progress, cores
from modelswap_engine.checkpoint.saving import Shard, compose_header
from modelswap_engine.protocol.errors import (
    Cancelled,
    InsufficientDisk,
    ManifestMismatch,
    ModelswapError,
    SourceUnreadable,
    Unavailable,
)

_READ: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_WRITE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, kw_only=True)
class _Job:
    wanted: TensorRange
    file: int
    at: int


def write_shards(
    folder: Path,
    parts: Sequence[Shard],
    ranges: Mapping[str, TensorRange],
    *,
    progress: Progress | None = None,
    stop: threading.Event | None = None,
) -> None:
    """Write the safetensors files of a folder; they are on the disk when this returns.

    Args:
        folder: exists; the files do not.
        parts: the files and their tensors, in order.
        ranges: where the bytes of each tensor lie, by name, and what they must hash to.
        progress: told (bytes done, bytes in all), from another thread but never from two at once.
        stop: set from elsewhere, it ends the work with ``Cancelled``.

    Raises:
        ManifestMismatch: the bytes of a tensor are not those that were promised.
        SourceUnreadable, SourceChanged: a source failed, or ended early.
        InsufficientDisk, Unavailable: the folder cannot be written.
        Cancelled: ``stop`` was set.
    """
    try:
        with contextlib.ExitStack() as stack:
            jobs: list[_Job] = []
            opened: list[int] = []
            for part in parts:
                file = os.open(folder / part.file, _WRITE, 0o444)
                stack.callback(os.close, file)
                opened.append(file)
                jobs += _begin(file, part, ranges)
            _Crew(jobs, progress=progress, stop=stop or threading.Event()).run()
            for file in opened:
                os.fsync(file)
    except OSError as error:
        raise unwritable(folder, error) from None


def unwritable(folder: Path, error: OSError) -> ModelswapError:
    """Return what a failed write means."""
    reason = f"{folder}: {error.strerror or error}"
    if error.errno in _FULL:
        return InsufficientDisk(reason, advice="give the volume of the engine's checkpoints more room")
    return Unavailable(reason, advice="check that the volume of the engine's checkpoints is mounted and writable")


def _begin(file: int, part: Shard, ranges: Mapping[str, TensorRange]) -> Iterator[_Job]:
    header = compose_header(part.tensors)
    _write_at(file, 0, memoryview(header))
    position = len(header)
    for entry in part.tensors:
        yield _Job(wanted=ranges[entry.name], file=file, at=position)
        position += entry.nbytes


class _Crew:
    """One thread for each core, each with one buffer; the largest tensors go first."""

    def __init__(self, jobs: Sequence[_Job], *, progress: Progress | None, stop: threading.Event) -> None:
        self._jobs = sorted(jobs, key=lambda job: job.wanted.nbytes, reverse=True)
        self._total = sum(job.wanted.nbytes for job in jobs)
        self._progress, self._stop = progress, stop
        self._abandoned = threading.Event()
        self._local = threading.local()
        self._lock = threading.Lock()
        self._done = 0

    def run(self) -> None:
        """Do all jobs; the first that fails ends the others, and nobody writes any more when this returns."""
        with ThreadPoolExecutor(max_workers=cores(), thread_name_prefix="copy") as pool:
            futures = [pool.submit(self._copy, job) for job in self._jobs]
            try:
                for future in as_completed(futures):
                    future.result()
            except BaseException:
                self._abandoned.set()
                pool.shutdown(cancel_futures=True)
                raise

    def _copy(self, job: _Job) -> None:
        buffer, wanted = self._buffer(), job.wanted
        digest = hashlib.sha256()
        with opened(wanted) as source:
            for position in range(0, wanted.nbytes, CHUNK_BYTES):
                if self._stop.is_set() or self._abandoned.is_set():
                    raise Cancelled("writing the checkpoint was cancelled")
                view = buffer[: min(CHUNK_BYTES, wanted.nbytes - position)]
                files.read_into(source, wanted.offset + position, view)
                digest.update(view)
                _write_at(job.file, job.at + position, view)
                self._advance(len(view))
        if digest.hexdigest() != wanted.sha256:
            raise ManifestMismatch(
                f"tensor {wanted.name}: its bytes in {wanted.path} hash to {digest.hexdigest()[:16]}…, "
                f"the manifest says {wanted.sha256[:16]}…",
                advice="the file was damaged or changed after its manifest was made; copy it again",
                details={"tensor": wanted.name, "expected": wanted.sha256, "actual": digest.hexdigest()},
            )

    def _buffer(self) -> memoryview:
        if not hasattr(self._local, "buffer"):
            self._local.buffer = memoryview(bytearray(CHUNK_BYTES))
        buffer: memoryview = self._local.buffer
        return buffer

    def _advance(self, count: int) -> None:
        with self._lock:
            self._done += count
            if self._progress is not None:
                self._progress(self._done, self._total)


@contextlib.contextmanager
def opened(wanted: TensorRange) -> Iterator[Opened]:
    """Open the file that a tensor lies in; neither a link nor a pipe that took its place.

    Raises:
        SourceUnreadable: it cannot be opened, or is no regular file.
    """
    try:
        descriptor = os.open(wanted.path, _READ)
    except OSError as error:
        raise _unreadable(wanted, error.strerror or str(error)) from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise _unreadable(wanted, "not a regular file")
        yield Opened(name=wanted.path, path=Path(wanted.path), fd=descriptor, stamp=files.stamp_of(status))
    finally:
        os.close(descriptor)


def _unreadable(wanted: TensorRange, reason: str) -> SourceUnreadable:
    return SourceUnreadable(
        f"tensor {wanted.name}: {wanted.path}: {reason}",
        advice="check the volume and the permissions of the file",
        details={"tensor": wanted.name, "file": wanted.path},
    )


def _write_at(file: int, offset: int, view: memoryview) -> None:
    done = 0
    while done < len(view):
        done += os.pwrite(file, view[done:], offset + done)
