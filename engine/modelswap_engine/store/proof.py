"""Whether a file of the store is what its name says, whoever wrote it: regular, unchanged while it was read, its hash.

A store may be a folder of several pods, so names in it may be links, pipes or folders by now: nothing here follows,
blocks or reads without end.
"""

import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from modelswap_engine.checkpoint.crew import Crew
from modelswap_engine.checkpoint.files import Opened, Stamp, stamp_of
from modelswap_engine.protocol.errors import SourceChanged, SourceUnreadable

CAREFUL: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""With this a link is refused, and a pipe is seen to be one instead of being waited for."""


def open_regular(path: Path, flags: int = os.O_RDONLY, *, mode: int = 0o600) -> int:
    """Open a regular file and return its descriptor.

    Raises:
        OSError: it cannot be opened, or is something else.
    """
    fd = os.open(path, flags | CAREFUL, mode)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return fd


def stamp_at(path: Path) -> Stamp | None:
    """Return the stamp of a regular file; None where there is none."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return stamp_of(status) if stat.S_ISREG(status.st_mode) else None


def prove(files: Mapping[str, Path]) -> dict[str, Stamp]:
    """Hash files by all cores; return the stamps of those that hash to the name (64 hex) they are given under."""
    crew = Crew("proving blobs", total=0)

    def proved(item: tuple[str, Path]) -> Stamp | None:
        with contextlib.suppress(OSError, SourceChanged, SourceUnreadable), _opened(item[1]) as opened:
            digest = hashlib.sha256()
            for chunk in crew.chunks(opened, 0, opened.stamp.size):
                digest.update(chunk)
            if digest.hexdigest() == item[0] and stamp_of(os.fstat(opened.fd)) == opened.stamp:
                return opened.stamp
        return None

    stamps = crew.run(proved, files.items())
    return {sha256: stamp for sha256, stamp in zip(files, stamps, strict=True) if stamp is not None}


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Opened]:
    fd = open_regular(path)
    try:
        yield Opened(name=path.name, path=path, fd=fd, stamp=stamp_of(os.fstat(fd)))
    finally:
        os.close(fd)
