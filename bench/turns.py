"""How often something is measured: as often as there is time for, within bounds. Pure but for the clock it is given."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator


class Budget:
    """The time of a whole run.

    Args:
        seconds: when it is over, everything left is measured as little as it can be.
        clock: monotonic time in seconds.
    """

    def __init__(self, seconds: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds

    @property
    def left(self) -> float:
        """Seconds that are left; 0 when it is over."""
        return max(0.0, self._end - self._clock())

    def turns(self, *, most: int, seconds: float, least: int = 1) -> Iterator[int]:
        """Yield the numbers of turns until there were ``most``, or the next would likely end after ``seconds``.

        How long a turn takes is told by the longest one so far. ``least`` turns are made whatever they take.
        """
        begun, longest = self._clock(), 0.0
        end = begun + min(seconds, self.left)
        for number in range(most):
            now = self._clock()
            if number >= least and now + longest >= end:
                return
            yield number
            longest = max(longest, self._clock() - now)
