"""The processes that use one folder of blobs: what each of them needs, who is still there, and one at a time.

Each has a folder of its own below ``members/``: a file that it keeps locked for as long as it lives, so that the kernel
says who has gone; the hashes that it needs; and the files that it is writing. Whoever comes next removes what the dead
left. Files of others are hints, never facts about bytes: one that lies costs others a fetch or some room. All blocks.
"""

import contextlib
import fcntl
import logging
import os
import shutil
import stat
import tempfile
import time
import weakref
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Final

import msgspec

from modelswap_engine.checkpoint.files import Stamp
from modelswap_engine.checkpoint.rules import is_hash
from modelswap_engine.protocol.errors import SourceUnreadable
from modelswap_engine.store.disk import make_folder
from modelswap_engine.store.proof import open_regular, stamp_at

log = logging.getLogger("modelswap.store")

PATIENCE_SECONDS: Final = 20.0
"""So long another process may make room; one that is stopped in the middle must not stop all others."""
PAUSE_SECONDS: Final = 0.01
MAX_PINS_BYTES: Final = 32 << 20
_LOCK: Final = "lock"
_PINS: Final = "pins"


class Others(msgspec.Struct, frozen=True, kw_only=True):
    """What other processes need: hashes, bytes that are on their way, and how many of those are not on the disk yet."""

    held: frozenset[str]
    coming: int
    unwritten: int


class Members:
    """See the module; one object is one member.

    Args:
        folder: of the store; made when needed. What is made in it gets its mode, so that whoever may write there may
            also clean up after others.
        patience: seconds to wait for another process.
        pause: waits that many seconds.
    """

    def __init__(
        self, folder: Path, *, patience: float = PATIENCE_SECONDS, pause: Callable[[float], None] = time.sleep
    ) -> None:
        self._folder = folder
        self._patience, self._pause = patience, pause
        self._late = False  # the one before was waited for in vain
        self._pinned: frozenset[str] = frozenset()
        self._told: tuple[frozenset[str], Stamp | None] = frozenset(), None  # what the file of pins says, and which one
        self._alive: weakref.finalize[..., Members] | None = None
        self._lock = -1
        self.own = folder
        """Where this member writes what nobody else may use yet."""

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Be the only one that makes room, comes, or says what it needs.

        Joins where this is no member (any more), and says what could not be said before.

        Raises:
            SourceUnreadable: another process does not end.
            OSError: the disk.
        """
        with self._waited(self._patience):
            yield

    @contextlib.contextmanager
    def _waited(self, patience: float) -> Iterator[None]:
        self._folder.mkdir(parents=True, exist_ok=True)
        fd = self._open_lock()
        try:
            self._wait_for(fd, patience)
            if not self._is_member():
                self._join()
            if not self._is_told():
                self._tell()
            yield
        finally:
            os.close(fd)

    def _open_lock(self) -> int:
        path, mode = self._folder / _LOCK, stat.S_IMODE(self._folder.stat().st_mode) & 0o666
        with contextlib.suppress(FileNotFoundError):
            return open_regular(path, os.O_RDWR)  # not "create or open": of another user's file in /tmp that is refused
        fd = open_regular(path, os.O_RDWR | os.O_CREAT, mode=mode)
        with contextlib.suppress(PermissionError):  # somebody else was first
            os.fchmod(fd, mode)
        return fd

    def _wait_for(self, fd: int, patience: float) -> None:
        left = patience
        while not _locked(fd):
            if left <= 0:
                self._late = True
                raise SourceUnreadable(
                    f"{self._folder}: another process has been making room for {self._patience:g} s",
                    advice="look for a pod of the node that uses the same content store and does not run",
                )
            self._pause(PAUSE_SECONDS)
            left -= PAUSE_SECONDS
        self._late = False

    def _is_member(self) -> bool:
        """Say whether what marks this member is there; somebody may have emptied the folder."""
        if self._lock < 0:
            return False
        try:
            return os.path.samestat(os.lstat(self.own / _LOCK), os.fstat(self._lock))
        except OSError:
            return False

    def _join(self) -> None:
        if self._alive is not None:
            self._alive()
        own = Path(tempfile.mkdtemp(dir=make_folder(self._folder / "members", like=self._folder)))
        own.chmod(stat.S_IMODE(self._folder.stat().st_mode))
        self._lock = os.open(own / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._alive = weakref.finalize(self, os.close, self._lock)
        os.fchmod(self._lock, 0o644)  # who may not read it takes its owner for alive
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.own = own

    def pin(self, hashes: Collection[str]) -> None:
        """Say which blobs this process needs, here already or not; nobody who is alone later removes them.

        What cannot be said now is said by whoever is alone next. One that did not end is not waited for again.

        Raises:
            SourceUnreadable, OSError: see :meth:`alone`.
        """
        self._pinned = frozenset(hashes)
        if not self._is_told():
            with self._waited(0 if self._late else self._patience):
                pass

    def _is_told(self) -> bool:
        """Say whether the file of pins says what is needed, and lies where it was put."""
        return self._told == (self._pinned, stamp_at(self.own / _PINS))

    def _tell(self) -> None:
        pinned, draft = self._pinned, self.own / f"{_PINS}.new"
        try:
            draft.unlink(missing_ok=True)
            draft.write_text("".join(f"{sha256}\n" for sha256 in sorted(pinned)))
            draft.chmod(0o644)
            draft.replace(self.own / _PINS)
            self._told = pinned, stamp_at(self.own / _PINS)
        except OSError as error:  # of a full disk, perhaps, and the room that would help is made by who is alone
            log.warning("%s: other processes cannot be told what is in use: %s", self._folder, error)

    def others(self) -> Others:
        """Return what the others need, and remove what is left of those that have gone; only while alone."""
        held: set[str] = set()
        coming = unwritten = 0
        for entry in os.scandir(self._folder / "members"):
            member = Path(entry.path)
            if member == self.own:
                continue
            if not entry.is_dir(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    member.unlink()
            elif _gone(member):
                shutil.rmtree(member, ignore_errors=True)
            else:
                held |= _pins_of(member)
                for status in _incoming_of(member):
                    coming += status.st_size
                    unwritten += max(0, status.st_size - 512 * status.st_blocks)
        return Others(held=frozenset(held), coming=coming, unwritten=unwritten)


def _locked(fd: int, *, how: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _gone(member: Path) -> bool:
    try:
        fd = open_regular(member / _LOCK)
    except PermissionError:
        return False
    except OSError:
        return True
    try:
        return _locked(fd, how=fcntl.LOCK_SH)
    finally:
        os.close(fd)


def _pins_of(member: Path) -> set[str]:
    try:
        fd = open_regular(member / _PINS)
        with os.fdopen(fd, "rb") as stream:
            lines = stream.read(MAX_PINS_BYTES).decode("ascii", "replace").split("\n")
    except OSError:
        return set()
    return {line for line in lines if is_hash(line)}


def _incoming_of(member: Path) -> Iterator[os.stat_result]:
    with contextlib.suppress(OSError):
        for entry in os.scandir(member):
            if entry.name.isdigit() and entry.is_file(follow_symlinks=False):
                yield entry.stat(follow_symlinks=False)
