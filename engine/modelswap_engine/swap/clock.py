"""Time as a value, and waiting with a bound.

Everything in ``swap`` that waits goes through here, so that tests move time by hand and no wait is endless. This module
knows nothing of what is waited for.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
Offload = Callable[..., Awaitable[Any]]
"""Runs a blocking call away from the event loop: ``asyncio.to_thread``, or at once in tests."""


class Clock(Protocol):
    """Where time comes from."""

    def monotonic(self) -> float:
        """Seconds that never go back."""

    def timestamp(self) -> str:
        """The time of day as an RFC 3339 string in UTC."""

    async def sleep(self, seconds: float) -> None:
        """Return after that many seconds of :meth:`monotonic`."""


class SystemClock:
    """The machine's clock."""

    def monotonic(self) -> float:
        """Seconds that never go back."""
        return time.monotonic()

    def timestamp(self) -> str:
        """The time of day as an RFC 3339 string in UTC."""
        return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")

    async def sleep(self, seconds: float) -> None:
        """Return after that many seconds."""
        await asyncio.sleep(seconds)


class OneThread:
    """Runs blocking calls one after the other in a thread of their own, where no other work is before them."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    async def __call__(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Run a call and return its result; one that is given up before its turn is left out."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, call, *arguments)


async def within(
    clock: Clock, seconds: float, work: Coroutine[Any, Any, T], *, unless: asyncio.Future[None] | None = None
) -> T:
    """Return the result of ``work``, or give up on it.

    Work that is given up is cancelled and not waited for: it may hang, which is why there is a bound.

    Args:
        clock: what measures the bound.
        seconds: how long to wait.
        work: a coroutine that has not been started.
        unless: when this future gets an exception first, the work is given up and that exception raised.

    Raises:
        TimeoutError: the time is over.
    """
    task = asyncio.ensure_future(work)
    alarm = asyncio.ensure_future(clock.sleep(seconds))
    awaited: set[asyncio.Future[Any]] = {task, alarm} | ({unless} if unless is not None else set())
    try:
        await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if unless is not None and unless.done():
            unless.result()
        raise TimeoutError
    finally:
        alarm.cancel()
        if not task.done():
            task.add_done_callback(_forget)
            task.cancel()


def _forget(task: asyncio.Future[Any]) -> None:
    """Look at the outcome of abandoned work, so that asyncio does not report it as forgotten."""
    if not task.cancelled():
        task.exception()
