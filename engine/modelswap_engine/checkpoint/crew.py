"""Threads that go through the bytes of files: one for each core, each with one buffer that it uses again and again.

hashlib and the reads release the interpreter lock, so the speed is that of one core times the cores. The largest pieces
of work should go first, so that no core is left alone with one at the end. It knows bytes, and nothing of what is in
them.
"""

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Final, TypeVar

from modelswap_engine.checkpoint import files
from modelswap_engine.checkpoint.files import Opened
from modelswap_engine.protocol.errors import Cancelled

CHUNK_BYTES: Final = 8 << 20
BUFFERS_BYTES: Final = 64 << 20
"""What the buffers of all threads may take together: a sidecar's limit does not grow with the cores of its node."""
Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all), from any thread but never from two at once."""

JobT = TypeVar("JobT")
ResultT = TypeVar("ResultT")


def cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Crew:
    """The threads of one piece of work.

    Args:
        what: the work, for messages.
        total: bytes that all of it reads.
        progress: told about every chunk.
        stop: set from elsewhere, it ends the work with ``Cancelled``.
    """

    def __init__(
        self, what: str, *, total: int, progress: Progress | None = None, stop: threading.Event | None = None
    ) -> None:
        self._what = what
        self._total = total
        self._progress = progress
        self._stop = stop or threading.Event()
        self._abandoned = threading.Event()
        self._local = threading.local()
        self._cores = cores()
        self._chunk = min(CHUNK_BYTES, BUFFERS_BYTES // self._cores)
        self._lock = threading.Lock()
        self._done = 0

    def run(self, work: Callable[[JobT], ResultT], jobs: Iterable[JobT]) -> list[ResultT]:
        """Do all jobs and return what came of each, in order.

        The first that fails ends the others at their next chunk (so does Ctrl-C), and nobody works any more when this
        returns.
        """
        with ThreadPoolExecutor(max_workers=self._cores, thread_name_prefix=self._what.replace(" ", "-")) as pool:
            futures = [pool.submit(work, job) for job in jobs]
            try:
                for future in as_completed(futures):
                    future.result()
            except BaseException:
                self._abandoned.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return [future.result() for future in futures]

    def chunks(self, opened: Opened, offset: int, nbytes: int) -> Iterator[memoryview]:
        """Yield the bytes of a range of a file; each chunk is valid until the next.

        Raises:
            SourceChanged, SourceUnreadable: the file ends early, or cannot be read.
            Cancelled: the crew was told to end.
        """
        if not hasattr(self._local, "buffer"):
            self._local.buffer = memoryview(bytearray(self._chunk))
        for position in range(0, nbytes, self._chunk):
            self.go_on()
            view: memoryview = self._local.buffer[: min(self._chunk, nbytes - position)]
            files.read_into(opened, offset + position, view)
            yield view
            self.advance(len(view))

    def go_on(self) -> None:
        """Return where there is still something to be done.

        Raises:
            Cancelled: the crew was told to end.
        """
        if self._abandoned.is_set() or self._stop.is_set():
            raise Cancelled(f"{self._what} was cancelled")

    def advance(self, count: int) -> None:
        """Say that so many bytes more are done."""
        with self._lock:
            self._done += count
            if self._progress is not None:
                self._progress(self._done, self._total)
