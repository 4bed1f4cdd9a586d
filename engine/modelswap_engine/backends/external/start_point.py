"""What an engine starts on: at most one whole checkpoint at a time, and none while that would be the wrong one.

The launcher starts an engine on whatever is announced, so the order matters: what is announced was written and proved
before, and it is withdrawn before anything else can have to be served. An engine that starts in between waits.
"""

import asyncio
from functools import partial
from pathlib import Path
from typing import Final

from modelswap_engine.backends.external import handshake
from modelswap_engine.backends.external.handshake import Launch
from modelswap_engine.backends.external.materialise import Materialiser
from modelswap_engine.backends.port import Load
from modelswap_engine.protocol.errors import Unavailable

_ADVICE: Final = "check that the memory volume which sidecar and launcher share is mounted and writable"


class StartPoint:
    """Announces checkpoints to the launcher.

    Args:
        place: writes them.
        runtime: the memory volume that is shared with the launcher.
    """

    def __init__(self, place: Materialiser, *, runtime: Path) -> None:
        self._place, self._runtime = place, runtime

    async def offer(self, order: Load) -> Path:
        """Have engines start on this version from now on; returns its folder.

        Raises:
            ModelswapError: it cannot be written, see :meth:`Materialiser.write`; nothing is announced then.
        """
        await self.withdraw()
        folder = await self._place.write(order)
        await self._place.switch(order.digest)
        await self._told(
            partial(handshake.announce, self._runtime, Launch(model=str(self._place.path), digest=order.digest))
        )
        await self._place.collect()
        return folder

    async def withdraw(self) -> None:
        """Have engines wait: what is to be served is about to be another version, or nobody knows yet what it is."""
        await self._told(partial(handshake.withdraw, self._runtime))

    async def _told(self, work: "partial[None]") -> None:
        try:
            await asyncio.to_thread(work)
        except OSError as error:
            raise Unavailable(f"{self._runtime}: {error.strerror or error}", advice=_ADVICE) from None
