"""A blob on its way into the store: written in pieces, in any order, and hashed before it counts.

What comes in order is hashed while it is in the processor's cache; the rest is read again when all of it is there.
"""

import hashlib
import os
import threading
from pathlib import Path
from typing import Final

from modelswap_engine.checkpoint.files import Stamp, stamp_of
from modelswap_engine.store.disk import put_in_place, use_now
from modelswap_engine.store.proof import open_regular

_BUFFER_BYTES: Final = 4 << 20


class Incoming:
    """A file of the store that has no name yet; several threads may write different pieces of it.

    Its descriptor is open from the first byte to the last only: thousands of small blobs may be on their way.

    Args:
        path: of the file; nobody else writes it.
        sha256: what its bytes must hash to.
        nbytes: its size.
    """

    def __init__(self, path: Path, *, sha256: str, nbytes: int) -> None:
        self.path = path
        self.sha256 = sha256
        self.nbytes = nbytes
        self._missing = nbytes
        self._fd = -1
        self._writers = 0
        self._closed = False
        self._lock = threading.Lock()
        self._digest = hashlib.sha256()
        self._hashed = 0

    @property
    def complete(self) -> bool:
        """True when every byte has been written; pieces that overlap are the caller's mistake."""
        return self._missing == 0

    @property
    def missing(self) -> int:
        """Bytes that have not been written yet."""
        return self._missing

    def reserve(self) -> None:
        """Make the file as long as it will be, so that other processes at the folder see what is still to come.

        Raises:
            OSError: the disk.
        """
        fd = open_regular(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            os.ftruncate(fd, self.nbytes)
        finally:
            os.close(fd)

    def write(self, at: int, data: bytes | memoryview) -> None:
        """Write a piece at a byte of the blob; nothing when it was closed meanwhile.

        Raises:
            OSError: the disk does not take it.
        """
        with self._lock:
            if self._closed:
                return
            if self._fd < 0:
                self._fd = open_regular(self.path, os.O_RDWR)
            self._writers += 1
        if at == self._hashed:  # of one thread alone: pieces do not overlap
            self._digest.update(data)
            self._hashed += len(data)
        view = memoryview(data)
        try:
            while view:
                count = os.pwrite(self._fd, view, at)
                view, at = view[count:], at + count
        finally:
            with self._lock:
                self._writers -= 1
                self._missing -= len(data) - len(view)
                self._release()

    def hashed(self) -> str:
        """Return the sha256 of what was written (64 hex digits), not of what others may have written to the file.

        Raises:
            OSError: the disk, or somebody put something else in the file's place.
        """
        if self._hashed < self.nbytes:
            buffer = memoryview(bytearray(min(_BUFFER_BYTES, self.nbytes - self._hashed)))
            with os.fdopen(open_regular(self.path), "rb", buffering=0) as stream:
                stream.seek(self._hashed)
                while self._hashed < self.nbytes and (count := stream.readinto(buffer)):
                    self._digest.update(buffer[:count])
                    self._hashed += count
        return self._digest.hexdigest()

    def named(self, target: Path) -> Stamp:
        """Give the file a name; return its stamp.

        Raises:
            OSError: the disk, or somebody put something else in the file's place.
        """
        fd = open_regular(self.path)
        try:
            use_now(fd)
            os.fchmod(fd, 0o444)
            put_in_place(self.path, target)
            return stamp_of(os.fstat(fd))
        finally:
            os.close(fd)

    def again(self) -> None:
        """Forget what was written; nobody may be writing."""
        with self._lock:
            self._missing, self._digest, self._hashed = self.nbytes, hashlib.sha256(), 0

    def close(self) -> None:
        """Take nothing more; the file is closed when nobody writes to it any more."""
        with self._lock:
            self._closed = True
            self._release()

    def _release(self) -> None:
        # A descriptor that is closed under a thread that writes may be another file's by the time it writes.
        if self._fd >= 0 and not self._writers and (self._closed or self.complete):
            os.close(self._fd)
            self._fd = -1
