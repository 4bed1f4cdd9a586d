"""Opening files of a folder that somebody else writes: regular ones, inside the allowed roots, and known by a stamp.

Links are followed only to places inside the roots (volume mounts and caches are made of links). The path is resolved,
opened without following a last link, and resolved once more: what was opened must be the very file that lies there.
"""

import contextlib
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from modelswap_engine.checkpoint.rules import refuse
from modelswap_engine.protocol.errors import SourceChanged, SourceUnreadable


class Stamp(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What changes when a file is replaced or rewritten."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int


class Opened(msgspec.Struct, frozen=True, kw_only=True):
    """An open regular file: ``name`` as the checkpoint calls it, ``path`` without links."""

    name: str
    path: Path
    fd: int
    stamp: Stamp


def stamp_of(status: os.stat_result) -> Stamp:
    """Return the stamp in a status."""
    return Stamp(size=status.st_size, mtime_ns=status.st_mtime_ns, ctime_ns=status.st_ctime_ns, inode=status.st_ino)


def contained(path: Path, roots: Sequence[Path]) -> bool:
    """Say whether a resolved path is one of the resolved roots or below one."""
    return any(path.is_relative_to(root) for root in roots)


@contextlib.contextmanager
def open_inside(directory: Path, name: str, *, roots: Sequence[Path]) -> Iterator[Opened]:
    """Open a file of a folder for reading.

    Raises:
        FileNotFoundError: there is none; what that means is for the caller to say.
        InvalidCheckpoint: a link that leaves the roots or goes in circles, or not a regular file.
        SourceUnreadable: the file system refuses.
    """
    with _reading(name):
        path = _resolve(directory / name, name=name, roots=roots)
        # O_NONBLOCK: opening a FIFO must not hang before it is seen to be one.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        with _reading(name):
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                refuse("not a regular file", file=name)
            there = os.stat(_resolve(directory / name, name=name, roots=roots))
            if (there.st_dev, there.st_ino) != (status.st_dev, status.st_ino):
                raise SourceChanged(f"{name}: replaced while it was opened", details={"file": name})
        yield Opened(name=name, path=path, fd=fd, stamp=stamp_of(status))
    finally:
        os.close(fd)


def read_whole(opened: Opened, *, limit: int) -> bytes:
    """Read a small file.

    Raises:
        InvalidCheckpoint: it is larger than the limit (bytes).
        SourceChanged, SourceUnreadable: see :func:`read_exactly`.
    """
    if opened.stamp.size > limit:
        refuse(f"{opened.stamp.size} bytes; at most {limit} are read", file=opened.name)
    return read_exactly(opened, 0, opened.stamp.size)


def read_exactly(opened: Opened, offset: int, count: int) -> bytes:
    """Read a range into memory.

    Raises:
        SourceChanged: the file ends before the range does.
        SourceUnreadable: the file system refuses.
    """
    buffer = bytearray(count)
    read_into(opened, offset, memoryview(buffer))
    return bytes(buffer)


def read_into(opened: Opened, offset: int, view: memoryview) -> None:
    """Fill a buffer from a range.

    Raises:
        SourceChanged: the file ends before the range does.
        SourceUnreadable: the file system refuses.
    """
    done = 0
    while done < len(view):
        with _reading(opened.name):
            count = os.preadv(opened.fd, [view[done:]], offset + done)
        if count == 0:
            raise SourceChanged(
                f"{opened.name}: ended at byte {offset + done} while it was read",
                advice="write new versions to a new folder instead of overwriting one",
                details={"file": opened.name},
            )
        done += count


def check_stamp(opened: Opened) -> None:
    """Check that an open file was not written since it was opened.

    Raises:
        SourceChanged: it was.
    """
    if stamp_of(os.fstat(opened.fd)) != opened.stamp:
        raise SourceChanged(
            f"{opened.name}: overwritten while it was read",
            advice="write new versions to a new folder instead of overwriting one",
            details={"file": opened.name},
        )


@contextlib.contextmanager
def _reading(name: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise SourceUnreadable(
            f"{name}: {error.strerror or error}",
            advice="check the volume and the permissions of the file",
            details={"file": name},
        ) from None


def _resolve(path: Path, *, name: str, roots: Sequence[Path]) -> Path:
    try:
        resolved = path.resolve(strict=True)
    except RuntimeError:  # how Python 3.11 and 3.12 report a circle of links
        refuse("a symbolic link that leads to itself", file=name)
    if not contained(resolved, roots):
        refuse("a symbolic link that leaves the allowed folder", file=name, advice="copy the file into the checkpoint")
    return resolved
