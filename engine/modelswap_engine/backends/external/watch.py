"""Looks after an engine that somebody else starts: it says when the engine is lost, and when it is another one.

It asks the control side only, so it can neither disturb nor be held up by a swap. Where a launcher starts the engine,
its word about an end or another start is believed at once; silence must be repeated.
"""

import asyncio
from collections.abc import Callable

from modelswap_engine.backends.external.control import EngineControl
from modelswap_engine.backends.external.restart import log
from modelswap_engine.protocol.errors import ModelswapError


class Watch:
    """The task that asks.

    Args:
        control: of the engine.
        seconds: from one question to the next.
        answer_seconds: how long an answer may take.
        misses: how many in a row may be missing before the engine counts as lost.
        lost: told so, once for each loss.
        launched: names the start that the launcher speaks of, "" when it speaks of none; may block.
    """

    def __init__(
        self,
        control: EngineControl,
        *,
        seconds: float,
        answer_seconds: float,
        misses: int,
        lost: Callable[[], None],
        launched: Callable[[], str] = str,
    ) -> None:
        self._control = control
        self._seconds = seconds
        self._answer_seconds = answer_seconds
        self._most = misses
        self._lost = lost
        self._launched = launched
        self._missed = 0
        self._boot_id = ""
        self._launch = ""
        self._hurried = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin; a second time is nothing."""
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    async def expect(self, boot_id: str) -> None:
        """From now on the engine is this start; any other is a loss of it."""
        launch = await asyncio.to_thread(self._launched)
        self._boot_id, self._missed, self._launch = boot_id, 0, launch

    def hurry(self) -> None:
        """Ask now."""
        self._hurried.set()

    async def stop(self) -> None:
        """End."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await self._look()
            try:
                async with asyncio.timeout(self._seconds):
                    await self._hurried.wait()
            except TimeoutError:
                continue
            self._hurried.clear()
            # Whoever hurries saw one request fail: another look right after this one would see the same moment.
            await asyncio.sleep(self._seconds / 10)

    async def _look(self) -> None:
        expected = self._launch
        launched = await asyncio.to_thread(self._launched)
        if expected and expected == self._launch != launched:
            log.warning("the engine %s, says its launcher", "was started again" if launched else "ended")
            self._launch, self._missed = "", self._most
            self._lost()
            return
        if not await self._control.alive(seconds=self._answer_seconds):
            self._missed += 1
            if self._missed == self._most and self._boot_id:
                log.warning("the engine did not answer %d times in a row", self._missed)
                self._lost()
            return
        back, self._missed = self._missed > 0, 0
        if back and self._boot_id and await self._another():
            log.warning("the engine was restarted")
            self._lost()

    async def _another(self) -> bool:
        try:
            facts = await self._control.facts(seconds=self._answer_seconds)
        except ModelswapError:
            self._missed = 1  # it was not away for good, and not here either: look again
            return False
        return facts.boot_id != self._boot_id
