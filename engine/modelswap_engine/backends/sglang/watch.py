"""Looking after an engine that nobody talks to: does it answer, is it still the same start, what does it work on?"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Final

from modelswap_engine.backends.sglang.control import SglangControl
from modelswap_engine.protocol.errors import ModelswapError, NotReady

_PATIENCE: Final = 3
"""How many looks in a row must fail before an engine counts as hanging."""

_FRESH_SECONDS: Final = 0.25


class Watch:
    """Looks from time to time, and tells when the engine is lost.

    Args:
        control: of the engine.
        every: seconds between two looks; a look takes at most as long as ``seconds``.
        busy: True while somebody else talks to the engine; then nothing is asked.
        lost: told why it is lost, and whether its process still is there.
    """

    def __init__(
        self,
        control: SglangControl,
        *,
        every: float,
        seconds: float,
        busy: Callable[[], bool],
        lost: Callable[[str, bool], None],
    ) -> None:
        self._control = control
        self._every = every
        self._seconds = seconds
        self._busy = busy
        self._lost = lost
        self._task: asyncio.Task[None] | None = None
        self._failures = 0
        self._hurried = asyncio.Event()
        self.boot_id = ""

    def begin(self, boot_id: str) -> None:
        """Watch this start of the engine from now on."""
        self.boot_id, self._failures = boot_id, 0
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    def hurry(self) -> None:
        """Look now."""
        self._hurried.set()

    async def end(self) -> None:
        """Watch no more."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._every):
                    await self._hurried.wait()
            self._hurried.clear()
            if self.boot_id and not self._busy():
                await self._look()

    async def _look(self) -> None:
        boot_id = self.boot_id
        try:
            facts = await self._control.facts(seconds=self._seconds)
            why = "" if facts.boot_id == boot_id else "SGLang was restarted"
            answers = bool(why) or await self._control.alive(seconds=self._seconds)
        except NotReady as error:
            why, answers = error.message, True
        except ModelswapError:
            why, answers = "", False
        if self._busy() or self.boot_id != boot_id:
            return  # somebody began to talk to it meanwhile, which can make it slow to answer others
        self._failures = 0 if answers else self._failures + 1
        if why or self._failures >= _PATIENCE:
            self.boot_id = ""
            self._lost(why or f"SGLang does not answer ({self._failures} times in a row)", not why)


class RequestCount:
    """The number of requests in an engine, for a caller that cannot wait: asked for in the background.

    Until an answer is there that is not old, one request is assumed, so that nobody takes silence for rest.
    """

    def __init__(self, control: SglangControl, *, seconds: float) -> None:
        self._control = control
        self._seconds = seconds
        self._count = 1
        self._at = float("-inf")
        self._task: asyncio.Task[None] | None = None

    def now(self) -> int:
        """Return the number as last seen, and have it asked for again."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._ask())
        fresh = time.monotonic() - self._at <= _FRESH_SECONDS
        return self._count if fresh else max(1, self._count)

    async def _ask(self) -> None:
        asked = time.monotonic()
        with contextlib.suppress(ModelswapError):
            self._count, self._at = await self._control.requests(seconds=self._seconds), asked

    async def end(self) -> None:
        """Ask no more."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
