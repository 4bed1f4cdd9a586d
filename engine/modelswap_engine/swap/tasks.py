"""Work of the engine's own: it outlives whoever asked for it, and ends with the process."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, Final

_log: Final = logging.getLogger("modelswap.swap")


class Tasks:
    """What goes on in the background."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run work that nobody waits for."""
        self._start(work).add_done_callback(_report)

    async def see_through(self, work: Coroutine[Any, Any, None]) -> None:
        """Wait for work, which goes on when the caller goes away."""
        await asyncio.shield(self._start(work))

    async def end(self) -> None:
        """Cancel all work and wait for it."""
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        _log.error("a background task failed", exc_info=task.exception())
