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
        self._lock = threading.Lock()
        self._digest = hashlib.sha256()
        self._hashed = 0

    @property
    def complete(self) -> bool:
        """True when every byte has been written; pieces that overlap are the caller's mistake."""
        return self._missing == 0

    def write(self, at: int, data: bytes | memoryview) -> None:
        """Write a piece at a byte of the blob.

        Raises:
            OSError: the disk does not take it.
        """
        with self._lock:
            if self._fd < 0:
                self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if at == self._hashed:  # of one thread alone: pieces do not overlap
            self._digest.update(data)
            self._hashed += len(data)
        view = memoryview(data)
        while view:
            count = os.pwrite(self._fd, view, at)
            view, at = view[count:], at + count
        with self._lock:
            self._missing -= len(data)
            if self.complete:
                self.close()

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
        """Forget what was written."""
        self.close()
        self._missing, self._digest, self._hashed = self.nbytes, hashlib.sha256(), 0

    def close(self) -> None:
        """Close the file, whether or not it is complete."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
