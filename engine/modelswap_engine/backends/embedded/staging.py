"""Runs a staging in a thread of its own that gives way to decoding, and that another thread can call off.

A source may hang for good (a network volume whose server is gone). The thread that reads it cannot be stopped then; it
is left behind, and what it may still find out counts for nothing.
"""

import threading
from collections.abc import Callable
from typing import Final

from modelswap_engine.protocol.errors import Cancelled, SourceUnreadable
from modelswap_engine.weights.pace import Pace, lower_priority
from modelswap_engine.weights.version import Staged

MOST_LEFT: Final = 4
_GRACE_SECONDS: Final = 1.0


class _Run:
    """One staging: its thread, its end, and what came of it."""

    def __init__(self, operation_id: str, work: Callable[[Pace], Staged], *, pace: Pace, niceness: int) -> None:
        self.operation_id = operation_id
        self.thread = threading.Thread(target=self._body, args=(work, niceness), name="stage", daemon=True)
        self._pace = pace
        self._over = threading.Event()
        self._result: Staged | None = None
        self._error: BaseException | None = None

    def _body(self, work: Callable[[Pace], Staged], niceness: int) -> None:
        try:
            lower_priority(niceness)
            self._result = work(self._pace)
        except BaseException as error:  # noqa: BLE001  # handed to the waiting thread, whatever it is
            self._error = error
        finally:
            self._over.set()

    def call_off(self) -> None:
        self._pace.cancel()
        self._over.set()

    def wait(self) -> Staged:
        self._over.wait()
        # Normally it ends at its next chunk; its memory should be free before anybody is told that it is.
        self.thread.join(_GRACE_SECONDS)
        if self._error is not None:
            raise self._error
        if self._result is None:
            raise Cancelled("staging was called off; its source hangs and the reading was left behind")
        return self._result


class Staging:
    """The staging that runs, if one does.

    Args:
        new_pace: makes the pace of one staging.
        niceness: how much its thread, and those that it starts, give way.
    """

    def __init__(self, *, new_pace: Callable[[], Pace], niceness: int) -> None:
        self._new_pace = new_pace
        self._niceness = niceness
        self._lock = threading.Lock()
        self._current: _Run | None = None
        self._called_off: set[str] = set()
        self._left: list[threading.Thread] = []

    def run(self, operation_id: str, work: Callable[[Pace], Staged]) -> Staged:
        """Do the work in a fresh thread (a lowered priority cannot be raised again) and wait for it.

        Raises:
            Exception: what the work raised.
            Cancelled: it was called off, maybe before it began.
            SourceUnreadable: too many earlier ones still hang in their sources.
        """
        run = _Run(operation_id, work, pace=self._new_pace(), niceness=self._niceness)
        with self._lock:
            if operation_id in self._called_off:
                self._called_off.discard(operation_id)
                raise Cancelled("staging was called off before it began")
            self._refuse_to_pile_up()
            self._current = run
        try:
            run.thread.start()
            return run.wait()
        finally:
            with self._lock:
                self._current = None
                self._called_off.discard(operation_id)
                if run.thread.is_alive():
                    self._left.append(run.thread)

    def _refuse_to_pile_up(self) -> None:
        self._left = [thread for thread in self._left if thread.is_alive()]
        if len(self._left) >= MOST_LEFT:
            raise SourceUnreadable(
                f"{len(self._left)} earlier stagings still hang in reading their sources",
                advice="bring the volumes of the checkpoints back, or restart the engine",
            )

    def cancel(self, operation_id: str) -> None:
        """Call off the staging of this operation, also one that has yet to begin; from any thread."""
        with self._lock:
            self._called_off.add(operation_id)
            if self._current is not None and self._current.operation_id == operation_id:
                self._current.call_off()

    def forget(self, operation_id: str) -> None:
        """No staging that was called off is still to come for this operation."""
        with self._lock:
            self._called_off.discard(operation_id)
