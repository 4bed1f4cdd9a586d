"""What the store does to files, and what it says of a disk that does not take something."""

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from modelswap_engine.protocol.errors import InsufficientDisk, SourceUnreadable

MIB: Final = 1 << 20


def no_room(*, needed: int, excess: int, kept: int) -> InsufficientDisk:
    """Return the error that says how many bytes are missing."""
    return InsufficientDisk(
        f"the content store needs {needed / MIB:.1f} MiB more, {excess / MIB:.1f} MiB are missing: "
        f"{kept / MIB:.1f} MiB of it are held by versions in use",
        advice="give the engine's state volume more room (emptyDir sizeLimit, --store-size)",
        details={"neededMiB": f"{needed / MIB:.1f}", "missingMiB": f"{excess / MIB:.1f}"},
    )


def use_now(file: Path | int) -> int:
    """Say by its time that a file is used; return that time (nanoseconds).

    Raises:
        OSError: the disk.
    """
    # By the finer clock: the file system's own gives one time to what is used one right after the other.
    now = time.time_ns()
    os.utime(file, ns=(now, now))
    return now


def put_in_place(path: Path, target: Path) -> None:
    """Give a file its name, whatever has that name now.

    Raises:
        OSError: the disk.
    """
    try:
        path.replace(target)
    except OSError:  # a folder in its place is somebody's trick, and must not keep the blob away for good
        shutil.rmtree(target, ignore_errors=True)
        path.replace(target)


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Say in our words that a disk does not take something."""
    try:
        yield
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise InsufficientDisk(
                f"the volume of {folder} is full", advice="give the engine's state volume more room"
            ) from None
        raise SourceUnreadable(
            f"{folder}: {error.strerror or error}", advice="check that the state directory is a writable volume"
        ) from None
