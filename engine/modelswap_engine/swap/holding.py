"""The lease by which a staged swap waits beside the version that serves, until it is told to go on.

It knows time and nothing else; who may renew it, or tell the swap to go on, is in :mod:`.proceeding`.
"""

import asyncio
from contextlib import suppress

from modelswap_engine.protocol.errors import HoldEnded
from modelswap_engine.protocol.holding import Hold, HoldState
from modelswap_engine.swap.clock import Clock, within


class Holding:
    """The lease.

    Attributes:
        peers_ready: how many other pods were ready when it was told to go on.
    """

    def __init__(self, wanted: Hold, *, clock: Clock) -> None:
        self._clock = clock
        self._wanted = wanted
        self._deadline = 0.0
        self._told = asyncio.Event()
        self.peers_ready = 0
        self.renew(wanted.seconds)

    @property
    def over(self) -> bool:
        """True once it was told to go on."""
        return self._told.is_set()

    def state(self, *, held: bool) -> HoldState:
        """Return it as it is published."""
        left = max(0.0, self._deadline - self._clock.monotonic())
        return HoldState(held=held, mark=self._wanted.mark, seconds_left=left)

    def renew(self, seconds: float) -> None:
        """Begin the lease anew."""
        self._deadline = self._clock.monotonic() + seconds

    def let_go(self, *, peers_ready: int) -> None:
        """Tell the swap to go on, now or as soon as it has staged."""
        self.peers_ready = peers_ready
        self._told.set()

    async def passed(self, *, unless: asyncio.Future[None]) -> None:
        """Return once it was told to go on.

        Raises:
            HoldEnded: nobody did, or renewed the lease.
            ModelswapError: the operation was interrupted.
        """
        while not self.over:
            left = self._deadline - self._clock.monotonic()
            if left <= 0:
                raise HoldEnded("the lease of what was staged ended", advice="it is staged again when it is wanted")
            with suppress(TimeoutError):
                await within(self._clock, left, self._event(), unless=unless)

    async def _event(self) -> None:
        await self._told.wait()
