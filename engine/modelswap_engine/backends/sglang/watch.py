"""Looking after an SGLang that nobody talks to: does it make tokens, and is it still the same start?

Beside a swap it is asked nothing, for it would have to make a token. What a launcher says of its starts is part of what
the control side answers.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

from modelswap_engine.backends.sglang.control import SglangControl
from modelswap_engine.protocol.errors import ModelswapError, NotReady

_PATIENCE: Final = 3
"""How many looks in a row must fail before an engine counts as hanging."""


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
        self._boot_id = ""

    def start(self) -> None:
        """Begin; a second time is nothing."""
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    async def expect(self, boot_id: str) -> None:
        """From now on the engine is this start; any other is a loss of it."""
        self._boot_id, self._failures = boot_id, 0

    def hurry(self) -> None:
        """Look now."""
        self._hurried.set()

    async def stop(self) -> None:
        """End."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._every):
                    await self._hurried.wait()
            self._hurried.clear()
            if self._boot_id and not self._busy():
                await self._look()

    async def _look(self) -> None:
        boot_id = self._boot_id
        try:
            facts = await self._control.facts(seconds=self._seconds)
            why = "" if facts.boot_id == boot_id else "SGLang was restarted"
            answers = bool(why) or await self._control.alive(seconds=self._seconds)
        except NotReady as error:
            why, answers = error.message, True
        except ModelswapError:
            why, answers = "", False
        if self._busy() or self._boot_id != boot_id:
            return  # somebody began to talk to it meanwhile, which can make it slow to answer others
        self._failures = 0 if answers else self._failures + 1
        if why or self._failures >= _PATIENCE:
            self._boot_id = ""
            self._lost(why or f"SGLang does not answer ({self._failures} times in a row)", not why)
