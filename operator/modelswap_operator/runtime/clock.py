"""The time by which the operator counts: it begins with the system's and never jumps.

A system's clock is set right, or wrong, in the middle of a rollout: soaks and deadlines must neither be over at once
nor take an hour longer. Only change windows ask what time it really is; by how much that differs is :meth:`ahead`.
"""

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta


def system_time() -> datetime:
    """Return the time that the system has now."""
    return datetime.now(UTC)


class SteadyClock:
    """Goes on from where the system's clock was when it was made.

    Args:
        system: the system's time.
        monotonic: seconds that never go back.
    """

    def __init__(
        self,
        *,
        system: Callable[[], datetime] = system_time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._system = system
        self._monotonic = monotonic
        self._began, self._at = system(), monotonic()

    def now(self) -> datetime:
        """Return the time to count by."""
        return self._began + timedelta(seconds=self._monotonic() - self._at)

    def ahead(self) -> timedelta:
        """Return how much later it is by the system's clock."""
        return self._system() - self.now()
