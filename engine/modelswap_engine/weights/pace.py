"""Keeps background reading and hashing from starving the decoding that goes on beside it.

It knows time and the scheduler's priority of the calling thread, nothing about weights.
"""

import os
import threading
import time
from collections.abc import Callable
from typing import Final

from modelswap_engine.protocol.errors import Cancelled

_LOWEST: Final = 19


class Pace:
    """Limits how many bytes per second background work touches, and lets another thread stop it.

    Args:
        bytes_per_second: upper bound of the rate; 0 means none.
        niceness: how much threads that are started for the work should give way, 0 to 19.
        clock: monotonic time in seconds.
    """

    def __init__(
        self, *, bytes_per_second: int = 0, niceness: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.niceness = niceness
        self._rate = bytes_per_second
        self._clock = clock
        self._due = 0.0
        self._lock = threading.Lock()
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """Make the next :meth:`spend` raise, and wake one that waits."""
        self._cancelled.set()

    def spend(self, nbytes: int) -> None:
        """Account for ``nbytes`` and wait until they are due; threads that share a pace share its rate.

        Raises:
            Cancelled: :meth:`cancel` was called.
        """
        wait = 0.0
        if self._rate:
            with self._lock:
                now = self._clock()
                self._due = max(self._due, now) + nbytes / self._rate
                # Waits shorter than a scheduler tick are collected instead of slept.
                wait = self._due - now
        if self._cancelled.wait(wait) if wait > 0.005 else self._cancelled.is_set():
            raise Cancelled("the work was cancelled before it had gone through all tensors")


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
