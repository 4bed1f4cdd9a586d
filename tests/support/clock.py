"""Time that only moves when a test says so.

``run`` drives an awaitable: whenever nothing can happen any more at the present instant, time jumps to the next moment
somebody sleeps until. A minute of timeouts passes in microseconds, and in the same order every time.
"""

import asyncio
import heapq
import itertools
from collections.abc import Awaitable
from datetime import UTC, datetime, timedelta
from typing import TypeVar

T = TypeVar("T")
_EPOCH = datetime(2026, 1, 1, tzinfo=UTC)


class ManualClock:
    def __init__(self) -> None:
        self.now = 1000.0
        self._order = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def monotonic(self) -> float:
        return self.now

    def timestamp(self) -> str:
        return (_EPOCH + timedelta(seconds=self.now)).isoformat().replace("+00:00", "Z")

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        sleeper = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self.now + seconds, next(self._order), sleeper))
        await sleeper

    async def settle(self) -> None:
        """Let everything happen that can happen without time passing."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(0)
        while loop._ready:  # type: ignore[attr-defined]  # the only exact sign that nothing is left to do
            await asyncio.sleep(0)

    async def advance(self, seconds: float) -> None:
        """Let that much time pass, waking sleepers one after the other at their own moments."""
        until = self.now + seconds
        await self.settle()
        while self._next() is not None and self._sleepers[0][0] <= until:
            self._wake()
            await self.settle()
        self.now = until

    async def run(self, work: Awaitable[T], *, at_most: float = 1e6) -> T:
        """Return the result of work, letting as much time pass as it takes."""
        task = asyncio.ensure_future(work)
        until = self.now + at_most
        await self.settle()
        while not task.done():
            if self._next() is None or self._sleepers[0][0] > until:
                task.cancel()
                raise AssertionError("waits for something that never happens")
            self._wake()
            await self.settle()
        return task.result()

    def _next(self) -> asyncio.Future[None] | None:
        while self._sleepers and self._sleepers[0][2].done():
            heapq.heappop(self._sleepers)
        return self._sleepers[0][2] if self._sleepers else None

    def _wake(self) -> None:
        deadline, _, sleeper = heapq.heappop(self._sleepers)
        self.now = max(self.now, deadline)
        sleeper.set_result(None)
