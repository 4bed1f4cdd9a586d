"""Holds a pause across calls: a thread of its own enters the pause and stays in it until told, or until time is up.

A pause is a lease. Whoever asked for it may be gone; then it ends by itself, after what was begun under it was undone.
"""

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Final

from modelswap_engine.protocol.errors import Busy, Cancelled, Internal, NotReady

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


class Pauses:
    """The pause that a process is in, if it is in one, and whose the last one was that ended by itself.

    Args:
        seconds: how long a lease lasts without being asked for again.
        expired: called, still inside the pause, when one ran out.

    Attributes:
        lease: of the present pause.
    """

    def __init__(self, *, seconds: float, expired: Callable[[PauseLease], None]) -> None:
        self.lease: PauseLease | None = None
        self._seconds = seconds
        self._expired = expired
        self._lapsed = ""

    def begin(
        self,
        operation_id: str,
        parking: Callable[[], AbstractContextManager[object]],
        *,
        timeout: float,
        parked: Callable[[], None],
    ) -> float:
        """Park the engine, or renew the operation's pause; return the seconds that it took.

        Args:
            operation_id: whose pause it is.
            parking: makes what parks the engine.
            timeout: how long the way to a step boundary may take, in seconds.
            parked: called once the engine is parked, before that counts as paused.

        Raises:
            Cancelled: another operation's pause is in force.
            Busy, NotReady: see :meth:`PauseLease.acquire`.
        """
        lease = self.lease
        if lease is not None and lease.held:
            if lease.operation_id != operation_id:
                raise Cancelled(f"the engine is paused by operation {lease.operation_id}")
            lease.renew()
            return 0.0
        lease = PauseLease(operation_id, parking(), seconds=self._seconds, expired=self._expired)
        seconds = lease.acquire(timeout)
        parked()
        self.lease, self._lapsed = lease, ""
        return seconds

    def require(self, operation_id: str) -> None:
        """Renew the operation's pause.

        Raises:
            Cancelled: it ran out.
            Internal: it has none.
        """
        lease = self.lease
        if lease is not None and lease.held and lease.operation_id == operation_id:
            lease.renew()
            return
        if self._lapsed == operation_id:
            raise Cancelled(
                f"the pause of operation {operation_id} ended by itself after "
                f"{self._seconds:g} s; what was not proven by then was undone",
                advice="pause again",
            )
        raise Internal(f"operation {operation_id} does not hold a pause")

    def lapse(self, lease: PauseLease) -> None:
        """Remember that this pause ended by itself."""
        self.lease, self._lapsed = None, lease.operation_id

    def take_out(self) -> PauseLease | None:
        """Return the lease for its release; nothing is paused any more from here on."""
        lease, self.lease = self.lease, None
        return lease
