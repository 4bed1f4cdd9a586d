"""Who may read from a source now: some at a time, fewer of one place, and one of those of a place that hung before.

So a place that does not answer holds up what lies there, and nothing that lies elsewhere.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

AT_ONCE: Final = 8
OF_A_PLACE: Final = 4


class Turns:
    """See the module; whoever waits longest and may, is next."""

    def __init__(self) -> None:
        self._busy: Counter[str] = Counter()
        self._again: Counter[str] = Counter()
        self._waiting: list[asyncio.Future[None]] = []

    @asynccontextmanager
    async def take(self, place: str, *, again: bool) -> AsyncIterator[None]:
        """Have a turn; ``again`` is for what did not answer the last time."""
        while not self._free(place, again=again):
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            await turn
        self._busy[place] += 1
        self._again[place] += again
        try:
            yield
        finally:
            self._busy[place] -= 1
            self._again[place] -= again
            self._busy, self._again = +self._busy, +self._again
            waiting, self._waiting = self._waiting, []
            for turn in waiting:
                if not turn.done():
                    turn.set_result(None)

    def _free(self, place: str, *, again: bool) -> bool:
        if again and self._again[place]:
            return False
        return self._busy.total() < AT_ONCE and self._busy[place] < OF_A_PLACE
