"""Staged tensors are there for a time: whoever staged them may be gone, and their memory is somebody's."""

import threading
from collections.abc import Callable


class StagedLease:
    """Ends what an operation has staged unless somebody asks about it in time.

    Args:
        seconds: from one call to the next.
        expired: called with the operation's id, in a thread of its own.
    """

    def __init__(self, *, seconds: float, expired: Callable[[str], None]) -> None:
        self._seconds = seconds
        self._expired = expired
        self._timer: threading.Timer | None = None

    def renew(self, operation_id: str) -> None:
        """Start the time again, for this operation."""
        self.end()
        self._timer = threading.Timer(self._seconds, self._expired, (operation_id,))
        self._timer.daemon = True
        self._timer.start()

    def end(self) -> None:
        """Nothing is staged any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
