"""A blob on its way into the store: written in pieces, in any order, and hashed before it counts.

What comes in order is hashed while it is in the processor's cache; the rest is read again when all of it is there.
"""

import hashlib
import os
import threading
from pathlib import Path
from typing import Final

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

    def write(self, at: int, data: bytes | memoryview) -> None:
        """Write a piece at a byte of the blob; nothing when it was closed meanwhile.

        Raises:
            OSError: the disk does not take it.
        """
        with self._lock:
            if self._closed:
                return
            if self._fd < 0:
                self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
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
        """Return the sha256 of what was written (64 hex digits)."""
        if self._hashed < self.nbytes:
            buffer = memoryview(bytearray(min(_BUFFER_BYTES, self.nbytes - self._hashed)))
            with self.path.open("rb", buffering=0) as stream:
                stream.seek(self._hashed)
                while count := stream.readinto(buffer):
                    self._digest.update(buffer[:count])
                    self._hashed += count
        return self._digest.hexdigest()

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
