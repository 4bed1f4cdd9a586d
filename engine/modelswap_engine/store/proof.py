"""Whether a file of the store is what its name says, whoever wrote it: regular, unchanged while it was read, its hash.

A store may be a folder of several pods, so names in it may be links, pipes or folders by now: nothing here follows,
blocks or reads without end.
"""

import contextlib
import errno
import hashlib
import logging
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

from modelswap_engine.checkpoint.crew import Crew
from modelswap_engine.checkpoint.files import Opened, Stamp, stamp_of
from modelswap_engine.protocol.errors import SourceChanged, SourceUnreadable

log = logging.getLogger("modelswap.store")

CAREFUL: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""With this a link is refused, and a pipe is seen to be one instead of being waited for."""


class Hashed(msgspec.Struct, frozen=True, kw_only=True):
    """What a file hashes to (64 hex digits), and the stamp that it had from the first byte to the last."""

    sha256: str
    stamp: Stamp


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
    """Return the stamp of a regular file in a folder that is no link; None where there is none."""
    try:
        above, status = os.lstat(path.parent), os.lstat(path)
    except OSError:
        return None
    return stamp_of(status) if stat.S_ISREG(status.st_mode) and stat.S_ISDIR(above.st_mode) else None


def hash_all(files: Mapping[str, Path]) -> dict[str, Hashed]:
    """Hash files by all cores; what could not be read, or changed meanwhile, is not among the results.

    A file that this process cannot read may be right all the same: descriptors, memory or rights may be missing.
    """
    crew = Crew("proving blobs", total=0)

    def hashed(path: Path) -> Hashed | None:
        try:
            with _opened(path) as opened:
                digest = hashlib.sha256()
                for chunk in crew.chunks(opened, 0, opened.stamp.size):
                    digest.update(chunk)
                if stamp_of(os.fstat(opened.fd)) == opened.stamp:
                    return Hashed(sha256=digest.hexdigest(), stamp=opened.stamp)
        except (OSError, SourceChanged, SourceUnreadable) as error:
            log.warning("%s: cannot be read, and does not count until it can: %s", path, error)
        return None

    results = crew.run(hashed, files.values())
    return {key: result for key, result in zip(files, results, strict=True) if result is not None}


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Opened]:
    fd = open_regular(path)
    try:
        yield Opened(name=path.name, path=path, fd=fd, stamp=stamp_of(os.fstat(fd)))
    finally:
        os.close(fd)
