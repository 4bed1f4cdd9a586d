"""The end of an instance whose version was replaced: it ends what it began, and is given up when that takes too long.

The front alone decides when: a request holds its instance from being let in to its end, so an instance that nobody
holds can go, and none goes before. Nothing here takes the new version back.
"""

from modelswap_engine.protocol.errors import ModelswapError
from modelswap_engine.swap import recovery
from modelswap_engine.swap.clock import within
from modelswap_engine.swap.core import Core, log
from modelswap_engine.swap.operations import Operation
from modelswap_engine.swap.versions import Version


async def reclaim(core: Core, operation: Operation, old: Version) -> ModelswapError | None:
    """Wait until nobody holds the old instance, or its time is over; then end it. Returns why that failed.

    The caller has published the new version and named the old one as retiring.
    """
    operation.note(overlapped_requests=core.lock.holding(old.digest))
    try:
        await within(core.clock, core.settings.reclaim_seconds, core.lock.unheld(old.digest))
    except TimeoutError:
        left, seconds = core.lock.holding(old.digest), core.settings.reclaim_seconds
        log.warning("%d requests did not end within %g s on the instance of %s", left, seconds, old.digest)

    async def retire() -> None:
        core.retiring = None  # from here on nobody is handed to it
        replies = await core.engine.retire(operation.id)
        operation.note(forced_requests=sum(reply.requests for reply in replies))

    return await recovery.guarded(retire)
