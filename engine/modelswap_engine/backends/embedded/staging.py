"""Runs a staging in a thread of its own that gives way to decoding, and that another thread can call off."""

import threading
from collections.abc import Callable

from modelswap_engine.weights.pace import Pace, lower_priority
from modelswap_engine.weights.version import Staged


class Staging:
    """The staging that runs, if one does.

    Args:
        bytes_per_second: upper bound of its rate; 0 means none.
        niceness: how much its thread gives way.
    """

    def __init__(self, *, bytes_per_second: int, niceness: int) -> None:
        self._rate = bytes_per_second
        self._niceness = niceness
        self._current: tuple[str, Pace] | None = None

    def run(self, operation_id: str, work: Callable[[Pace], Staged]) -> Staged:
        """Do the work in a fresh thread (a lowered priority cannot be raised again) and wait for it.

        Raises:
            Exception: what the work raised; :class:`Cancelled` when it was called off.
        """
        pace = Pace(bytes_per_second=self._rate)
        outcome: list[Staged | BaseException] = []

        def body() -> None:
            try:
                lower_priority(self._niceness)
                outcome.append(work(pace))
            except BaseException as error:  # noqa: BLE001  # handed to the waiting thread, whatever it is
                outcome.append(error)

        self._current = (operation_id, pace)
        try:
            thread = threading.Thread(target=body, name="stage")
            thread.start()
            thread.join()
        finally:
            self._current = None
        result = outcome.pop()
        if isinstance(result, BaseException):
            raise result
        return result

    def cancel(self, operation_id: str) -> None:
        """Call off the staging of this operation, if it runs; from any thread."""
        current = self._current
        if current is not None and current[0] == operation_id:
            current[1].cancel()
