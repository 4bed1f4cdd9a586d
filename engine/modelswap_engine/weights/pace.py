"""Keeps background reading and hashing from starving the decoding that goes on beside it.

A priority alone does not: a thread that gives way still takes the interpreter, the caches and the memory from those
that it gives way to, and so as much as it can get. So it also rests for the most part of the time, measured by what it
has used of a processor, whatever machine that is. This knows time and threads, nothing about weights.
"""

import os
import threading
import time
from collections.abc import Callable
from typing import Final

from modelswap_engine.protocol.errors import Cancelled

_LOWEST: Final = 19
_TICK_SECONDS: Final = 0.005


class Pace:
    """Limits how many bytes per second background work touches, and lets another thread stop it.

    Args:
        bytes_per_second: upper bound of the rate; 0 means none.
        niceness: how much threads that are started for the work should give way, 0 to 19.
        share: of a core that each of these threads may use while ``busy`` says so, above 0; 1 is no bound.
        busy: says whether there is anybody to give way to.
        clock: monotonic time in seconds.
        used: processor time of the calling thread in seconds.
    """

    def __init__(
        self,
        *,
        bytes_per_second: int = 0,
        niceness: int = 0,
        share: float = 1.0,
        busy: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
        used: Callable[[], float] = time.thread_time,
    ) -> None:
        self.niceness = niceness
        self._rate = bytes_per_second
        self._share = share
        self._busy = busy
        self._clock = clock
        self._used = used
        self._threads = threading.local()
        self._due = 0.0
        self._lock = threading.Lock()
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """Make the next :meth:`spend` raise, and wake one that waits."""
        self._cancelled.set()

    def spend(self, nbytes: int) -> None:
        """Account for ``nbytes`` and rest until they are due; threads that share a pace share its rate.

        Raises:
            Cancelled: :meth:`cancel` was called.
        """
        wait = self._rest()
        if self._rate:
            with self._lock:
                now = self._clock()
                self._due = max(self._due, now) + nbytes / self._rate
                wait = max(wait, self._due - now)
        # Waits shorter than a scheduler tick are collected instead of slept.
        if self._cancelled.wait(wait) if wait > _TICK_SECONDS else self._cancelled.is_set():
            raise Cancelled("the work was cancelled before it had gone through all tensors")

    def _rest(self) -> float:
        """Return how long the calling thread has to rest for what it has used since it was asked last."""
        if self._share >= 1.0:
            return 0.0
        now, mine = self._used(), self._threads
        used, mine.at = now - getattr(mine, "at", now), now
        if not self._busy():
            mine.owed = 0.0
            return 0.0
        owed: float = getattr(mine, "owed", 0.0) + used * (1.0 / self._share - 1.0)
        mine.owed = owed if owed <= _TICK_SECONDS else 0.0
        return owed


class Crew(Pace):
    """The pace of some threads that work for one call: cancelled when one of them fails, without ending the whole."""

    def __init__(self, whole: Pace) -> None:
        super().__init__()
        self._whole = whole

    def spend(self, nbytes: int) -> None:
        """Account for ``nbytes`` with everybody who shares the pace.

        Raises:
            Cancelled: the whole, or this crew, was told to end.
        """
        super().spend(0)
        self._whole.spend(nbytes)


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))


def lower_priority(niceness: int) -> None:
    """Make the calling thread, and no other, give way to the rest of the process (Linux: niceness is per thread)."""
    thread = threading.get_native_id()
    if niceness:
        # By so much, not to so much: the whole process may have been started to give way already.
        os.setpriority(os.PRIO_PROCESS, thread, min(_LOWEST, os.getpriority(os.PRIO_PROCESS, thread) + niceness))
