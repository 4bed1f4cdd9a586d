"""Holds a pause across calls: a thread of its own enters the pause and stays in it until told, or until time is up.

A pause is a lease. Whoever asked for it may be gone; then it ends by itself, after what was begun under it was undone.
"""

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Final

from modelswap_engine.protocol.errors import Busy, NotReady

_TICK: Final = 0.25


class PauseLease:
    """One pause of one operation.

    Args:
        operation_id: who holds it.
        parking: the context manager that parks the engine.
        seconds: how long the lease lasts without :meth:`renew`.
        expired: called once, still inside the pause, when the lease ran out.
    """

    def __init__(
        self,
        operation_id: str,
        parking: AbstractContextManager[object],
        *,
        seconds: float,
        expired: Callable[["PauseLease"], None],
    ) -> None:
        self.operation_id = operation_id
        self._parking = parking
        self._seconds = seconds
        self._expired = expired
        self._deadline = time.monotonic() + seconds
        self._parked = threading.Event()
        self._released = threading.Event()
        self._ended = threading.Event()
        self._failure: Exception | None = None

    def acquire(self, timeout: float) -> float:
        """Park the engine; return the seconds it took to reach a step boundary.

        Raises:
            Busy: no step boundary within ``timeout`` seconds; the pause is withdrawn.
            NotReady: the engine's loop is gone.
        """
        started = time.perf_counter()
        threading.Thread(target=self._hold, name="pause", daemon=True).start()
        if not self._parked.wait(timeout):
            self._released.set()
            raise Busy(
                f"the engine reached no step boundary within {timeout:g} s",
                advice="allow more time, or smaller batches (max_batch_tokens)",
            )
        if self._failure is not None:
            raise NotReady(f"the engine cannot be paused: {self._failure}", advice="load a version first")
        self.renew()
        return time.perf_counter() - started

    def renew(self) -> None:
        """Start the lease's time again."""
        self._deadline = time.monotonic() + self._seconds

    def release(self) -> None:
        """Let the engine step again, and wait until it may."""
        self._released.set()
        self._ended.wait()

    @property
    def withdrawn(self) -> bool:
        """True once the holder has let go."""
        return self._released.is_set()

    @property
    def held(self) -> bool:
        """True while the engine is parked by this lease."""
        return self._parked.is_set() and not self._ended.is_set() and not self._released.is_set()

    def _hold(self) -> None:
        try:
            with self._parking:
                self._parked.set()
                while not self._released.wait(_TICK):
                    if time.monotonic() >= self._deadline:
                        self._expired(self)
                        return
        except RuntimeError as error:
            self._failure = error
        finally:
            self._ended.set()
            self._parked.set()
