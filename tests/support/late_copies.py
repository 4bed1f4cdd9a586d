"""A device that is as late as a device may be: copies happen in order, and not before somebody waits for them.

Its memory is that of the process, so a transfer that does not wait where it must leaves wrong bytes behind that a test
can see, on every run.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator

import torch

from modelswap_engine.weights.place import Room


class LateCopies:
    """A queue of copies; see :class:`modelswap_engine.weights.place.Copies`."""

    device = torch.device("cpu")

    def __init__(self, *, capacity: int = 1 << 40) -> None:
        self.buffers = 0
        self.settled = True
        self._capacity = capacity
        self._queue: deque[tuple[torch.Tensor, torch.Tensor]] = deque()
        self._queued = self._done = 0
        self._lock = threading.Lock()

    def buffer(self, nbytes: int) -> torch.Tensor:
        self.buffers += 1
        return torch.empty(nbytes, dtype=torch.uint8)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        with self._lock:
            self._queue.append((target, source))
            self._queued += 1
            number = self._queued
        return lambda: self._run(number)

    def _run(self, until: int) -> None:
        with self._lock:
            while self._done < until:
                target, source = self._queue.popleft()
                target.copy_(source)
                self._done += 1

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """What is computed inside comes behind the copies, so they are made first."""
        self._run(self._queued)
        if self._capacity <= 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has 1 MiB free.")
        self._capacity -= 1
        self.settled = False
        yield

    def settle(self) -> None:
        """Wait for the copies, and for what was computed behind them, which only looks done here."""
        self._run(self._queued)
        self.settled = True

    def quiesce(self) -> None:
        self.settle()

    def trim(self) -> None:
        pass

    def room(self) -> Room:
        return Room(limit=1 << 30, available=1 << 29)
