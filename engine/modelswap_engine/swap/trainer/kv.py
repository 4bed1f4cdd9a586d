"""Cached keys and values, forgotten on request: what a commit does to them, without a commit."""

from modelswap_engine.backends.port import RequestPolicy
from modelswap_engine.backends.transfer import FlushCache
from modelswap_engine.protocol.errors import Busy
from modelswap_engine.swap.core import Core
from modelswap_engine.swap.trainer.exchange import Exchange


class KvCache:
    """The cache of all ranks.

    Args:
        core: the shared state.
        exchange: has the engine do it.
    """

    def __init__(self, core: Core, *, exchange: Exchange) -> None:
        self._core = core
        self._exchange = exchange

    async def flush(self, policy: RequestPolicy) -> int:
        """Forget everything that is cached; return how many running requests were ended or begin again.

        Raises:
            Busy: requests are running and the policy says that there are none, or a swap is in progress.
        """
        core = self._core
        if core.operations.current is not None:
            raise Busy(f"operation {core.operations.current.id!r} is in progress", advice="it flushes the cache itself")
        core.preempt()
        async with core.mutex:
            replies = await self._exchange.carry_out(FlushCache(policy=policy), seconds=core.engine.patience.call)
            return max(reply.requests for reply in replies)
