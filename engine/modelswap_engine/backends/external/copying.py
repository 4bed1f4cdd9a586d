"""Tensors from where they lie into files of a new folder, each hashed on its way.

The bytes that are written are the bytes that were hashed, so a source that changes meanwhile is caught. They are copied
and never linked: a hard link, or a link to the source, would change together with it after it was proved. It needs no
torch, since a sidecar has none, and knows neither engines nor where the folder will end up.
"""

import contextlib
import hashlib
import os
import stat
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from modelswap_engine.backends.port import TensorRange
from modelswap_engine.checkpoint import files, saving
from modelswap_engine.checkpoint.crew import Crew, Progress
from modelswap_engine.checkpoint.files import Opened
from modelswap_engine.checkpoint.saving import Shard, compose_header, write_at
from modelswap_engine.protocol.errors import ManifestMismatch, SourceUnreadable

_READ: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_WRITE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC

unwritable = partial(saving.unwritable, volume="the volume of the engine's checkpoints")
"""What a failed write means."""


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
            made: list[int] = []
            for part in parts:
                file = os.open(folder / part.file, _WRITE, 0o444)
                stack.callback(os.close, file)
                made.append(file)
                jobs += _begin(file, part, ranges)
            jobs.sort(key=lambda job: job.wanted.nbytes, reverse=True)
            total = sum(job.wanted.nbytes for job in jobs)
            crew = Crew("writing the checkpoint", total=total, progress=progress, stop=stop)
            crew.run(partial(_copy, crew), jobs)
            for file in made:
                os.fsync(file)
    except OSError as error:
        raise unwritable(folder, error) from None


def _begin(file: int, part: Shard, ranges: Mapping[str, TensorRange]) -> Iterator[_Job]:
    header = compose_header(part.tensors)
    write_at(file, 0, memoryview(header))
    position = len(header)
    for entry in part.tensors:
        yield _Job(wanted=ranges[entry.name], file=file, at=position)
        position += entry.nbytes


def _copy(crew: Crew, job: _Job) -> None:
    digest, position, wanted = hashlib.sha256(), job.at, job.wanted
    with opened(wanted) as source:
        for chunk in crew.chunks(source, wanted.offset, wanted.nbytes):
            digest.update(chunk)
            write_at(job.file, position, chunk)
            position += len(chunk)
    if digest.hexdigest() != wanted.sha256:
        raise ManifestMismatch(
            f"tensor {wanted.name}: its bytes in {wanted.path} hash to {digest.hexdigest()[:16]}…, "
            f"the manifest says {wanted.sha256[:16]}…",
            advice="the file was damaged or changed after its manifest was made; copy it again",
            details={"tensor": wanted.name, "expected": wanted.sha256, "actual": digest.hexdigest()},
        )


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
