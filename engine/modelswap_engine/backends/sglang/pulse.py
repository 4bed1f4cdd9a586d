"""Whether an SGLang still makes tokens: that its first process answers does not show that the others live.

A step of a large model can take a minute on a processor, and nothing is answered within it. So it is asked in the
background, and only a long silence counts.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator

from modelswap_engine.backends.sglang.client import SglangClient
from modelswap_engine.protocol.errors import ModelswapError


class Pulse:
    """Has one token made now and then.

    Such a token can be on its way while weights are exchanged; it is nobody's, and gone after a few milliseconds, long
    before SGLang answers for it. Until then the cache is not emptied.

    Args:
        client: the engine's routes.
        every: seconds from one token to the next question.
        silent: seconds without a token after which it counts as dead.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        client: SglangClient,
        *,
        every: float = 10.0,
        silent: float = 180.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._every = every
        self._silent = silent
        self._clock = clock
        self._seen = clock()
        self._next = self._seen
        self._task: asyncio.Task[None] | None = None
        self._holders = 0

    def reset(self) -> None:
        """Another start: nothing is known of it, so it begins with the whole time."""
        self._seen = self._next = self._clock()

    def beats(self, *, paused: bool) -> bool:
        """Say whether it made a token lately, and have it asked for the next one when that is due.

        While it is paused it makes none, and none is asked for.
        """
        if paused:
            self.reset()
            return True
        now = self._clock()
        if now >= self._next and not self._holders and (self._task is None or self._task.done()):
            self._next = now + self._every
            self._task = asyncio.create_task(self._ask())
        return now - self._seen < self._silent

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Have no further token asked for within the block."""
        self._holders += 1
        try:
            yield
        finally:
            self._holders -= 1

    async def _ask(self) -> None:
        with contextlib.suppress(ModelswapError):
            if await self._client.generates(seconds=self._silent):
                self._seen = self._clock()

    async def end(self) -> None:
        """Ask no more."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
