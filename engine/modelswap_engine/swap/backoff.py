"""How long to wait before a worker that was lost is started again. Pure.

A worker that dies once is started at once. One that dies soon after each start, or cannot be started, would otherwise
keep a node busy with loading for ever.
"""

from typing import Final

_CALM: Final = 2.0  # in longest pauses: who has been up for that long is well


class Backoff:
    """The pauses of one engine.

    Args:
        shortest: the first of them in seconds; before it, a worker is started once without any.
        longest: their bound.
    """

    def __init__(self, *, shortest: float, longest: float) -> None:
        self._shortest = shortest
        self._longest = longest
        self._losses = 0
        self._succeeded = True

    def pause(self, *, up: float) -> float:
        """Return how long to wait before the next start; ``up`` is for how long the last one had been good."""
        if self._succeeded and up >= _CALM * self._longest:
            self._losses = 0
        self._losses += 1
        if self._losses == 1:
            return 0.0
        return float(min(self._longest, self._shortest * 2.0 ** min(self._losses - 2, 30)))

    def tried(self, *, succeeded: bool) -> None:
        """Take note of how a start ended."""
        self._succeeded = succeeded
