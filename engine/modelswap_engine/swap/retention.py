"""The retained previous version: how long its tensors stay in memory, and giving them up.

They buy a rollback in milliseconds and cost as many bytes as the swap changed. They go when their time is over, when a
swap needs the room, when somebody says so, and never while something else is going on.
"""

from modelswap_engine.protocol.errors import Busy, NotFound
from modelswap_engine.swap.core import Core, log


def expired(core: Core) -> bool:
    """Say whether the retained version has been kept for as long as it should be, and nobody is busy with it."""
    left = core.previous_seconds_left
    return left is not None and left <= 0 and not core.mutex.locked()


async def expire(core: Core) -> None:
    """Give the retained version up because its time is over."""
    async with core.mutex:
        left = core.previous_seconds_left
        if left is not None and left <= 0:
            log.info("the retained version has been kept for its %g s", core.settings.previous_seconds)
            await _give_up(core)


async def give_up(core: Core) -> None:
    """Give the retained version up because somebody asked for it.

    Raises:
        Busy: an operation is in progress.
        NotFound: none is retained.
    """
    current = core.operations.current
    if current is not None:
        raise Busy(f"operation {current.id!r} is in progress", advice="try again when it has ended")
    core.preempt()
    async with core.mutex:
        if core.previous is None:
            raise NotFound("no previous version is retained", advice="there is nothing to release")
        await _give_up(core)


async def _give_up(core: Core) -> None:
    digest = core.previous.digest if core.previous is not None else ""
    core.previous = None
    core.touch()
    await core.engine.release(f"release-{core.settings.boot_id}", previous=True)
    await core.forget(digest)
    await core.refresh_memory()
