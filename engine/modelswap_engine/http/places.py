"""How many requests may be inside a data port at once."""

from collections.abc import Iterator
from contextlib import contextmanager

from modelswap_engine.http.openai.errors import Overloaded


class Places:
    """Places for requests: they bound how many bodies and answers are in memory.

    Args:
        most: how many there are.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._taken = 0

    @contextmanager
    def take(self, number: int = 1) -> Iterator[None]:
        """Have so many while the context lasts.

        Raises:
            Overloaded: there are not that many left.
        """
        if number and self._taken + number > self._most:
            raise Overloaded(
                f"{self._taken} requests are being worked on, more are not taken",
                advice="try again shortly, or at another replica",
            )
        self._taken += number
        try:
            yield
        finally:
            self._taken -= number
