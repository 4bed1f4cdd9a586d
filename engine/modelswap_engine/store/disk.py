"""What the store does to files, and what it says of a disk that does not take something."""

import contextlib
import errno
import os
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from modelswap_engine.checkpoint.rules import is_hash
from modelswap_engine.protocol.errors import InsufficientDisk, SourceUnreadable

MIB: Final = 1 << 20
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def no_room(*, needed: int, excess: int, kept: int) -> InsufficientDisk:
    """Return the error that says how many bytes are missing."""
    return InsufficientDisk(
        f"the content store needs {needed / MIB:.1f} MiB more, {excess / MIB:.1f} MiB are missing: "
        f"{kept / MIB:.1f} MiB of it are held by versions in use",
        advice="give the engine's state volume more room (emptyDir sizeLimit, --store-size)",
        details={"neededMiB": f"{needed / MIB:.1f}", "missingMiB": f"{excess / MIB:.1f}"},
    )


def not_right(blob: Path) -> SourceUnreadable:
    """Return the error that says that a blob which was just written is not there as it was written."""
    try:
        owner = f"user {os.lstat(blob).st_uid}"
    except OSError:
        owner = "nobody"
    return SourceUnreadable(
        f"{blob}: somebody else wrote to it, or it cannot be read; what lies there now is of {owner}",
        advice="it is fetched again; where another user's file stays in the way, remove it",
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


def make_folder(path: Path, *, like: Path) -> Path:
    """Make a folder with the mode of another one, unless it is there; no link is taken for one.

    Raises:
        OSError: the disk, or something else lies there.
    """
    with contextlib.suppress(FileExistsError):
        path.mkdir()
        path.chmod(stat.S_IMODE(like.stat().st_mode))
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "not a folder", str(path))
    return path


def blobs_below(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Go through the files that are named by a hash, in the folders of a folder; no link is followed.

    Raises:
        OSError: the folder cannot be read. What goes meanwhile is passed over.
    """
    for part in os.scandir(folder):
        if not part.is_dir(follow_symlinks=False):
            continue
        with contextlib.suppress(OSError):
            for entry in os.scandir(part):
                with contextlib.suppress(FileNotFoundError):
                    if is_hash(entry.name) and entry.is_file(follow_symlinks=False):
                        yield Path(entry.path), entry.stat(follow_symlinks=False)


def put_in_place(path: Path, target: Path) -> None:
    """Give a file its name, whatever has that name now.

    Raises:
        OSError: the disk; PermissionError also where another user has that name, and the folder is sticky.
    """
    with _folder_of(target) as folder:
        try:
            os.replace(path, target.name, dst_dir_fd=folder)
        except OSError:  # a folder in its place is somebody's trick, and must not keep the blob away for good
            shutil.rmtree(target.name, ignore_errors=True, dir_fd=folder)
            os.replace(path, target.name, dst_dir_fd=folder)


def remove(path: Path) -> bool:
    """Remove a blob, or what lies in its place; say whether it is gone. Another user's may stay."""
    with contextlib.suppress(OSError), _folder_of(path) as folder:
        try:
            os.unlink(path.name, dir_fd=folder)
        except OSError:
            shutil.rmtree(path.name, ignore_errors=True, dir_fd=folder)  # where it is a folder
    return not os.path.lexists(path)


@contextlib.contextmanager
def _folder_of(blob: Path) -> Iterator[int]:
    """Open the folder of a blob; a link in its place, or in that of the one above, may lead to others' files."""
    above = os.open(blob.parent.parent, _FOLDER)
    try:
        folder = os.open(blob.parent.name, _FOLDER, dir_fd=above)
    finally:
        os.close(above)
    try:
        yield folder
    finally:
        os.close(folder)


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
