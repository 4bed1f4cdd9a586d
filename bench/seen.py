"""What clients saw of their requests, as the tokens came. Knows no engine."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Callable, Sequence

_MORE_SECONDS = 300.0


class Asked:
    """One request; times are monotonic seconds."""

    def __init__(self, prompt_tokens: int, noticed: Callable[[int], None]) -> None:
        self.prompt_tokens = prompt_tokens
        self.tokens: list[float] = []
        self._noticed = noticed

    def take(self, count: int) -> None:
        """Note that tokens came."""
        self.tokens += [time.monotonic()] * count
        self._noticed(count)

    def gap_at(self, moment: float) -> tuple[float, int] | None:
        """Return the time between two tokens in which a moment lies, and how many tokens there were before it."""
        for number, (earlier, later) in enumerate(itertools.pairwise(self.tokens), start=1):
            if earlier <= moment < later:
                return later - earlier, number
        return None


class Record:
    """All requests of some clients."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self._count = 0
        self._more = asyncio.Event()

    def open(self, prompt_tokens: int) -> Asked:
        """Begin a request."""
        asked = Asked(prompt_tokens, self._notice)
        self.asked.append(asked)
        return asked

    def _notice(self, count: int) -> None:
        self._count += count
        self._more.set()

    async def more(self, count: int) -> None:
        """Return when so many more tokens have come.

        Raises:
            TimeoutError: they did not within five minutes.
        """
        wanted = self._count + count
        async with asyncio.timeout(_MORE_SECONDS):
            while self._count < wanted:
                self._more.clear()
                await self._more.wait()

    async def begun(self, requests: int) -> None:
        """Return when so many requests have a token."""
        while sum(bool(asked.tokens) for asked in self.asked) < requests:
            await self.more(1)

    def gaps(self, begin: float = 0.0, end: float = float("inf")) -> list[float]:
        """Return the times between two tokens of a request that ended within a span of time."""
        return [
            later - earlier
            for asked in self.asked
            for earlier, later in itertools.pairwise(asked.tokens)
            if begin <= later < end
        ]

    def rate(self, begin: float) -> float:
        """Return the tokens per second from a moment until now."""
        end = time.monotonic()
        return sum(begin <= moment < end for asked in self.asked for moment in asked.tokens) / (end - begin)


def median(values: Sequence[float]) -> float:
    """Return the median; 0 without values."""
    return statistics.median(values) if values else 0.0
