"""The end of the process: leave the endpoints, refuse new requests, wait for those in flight, all within a time."""

from modelswap_engine.protocol.errors import Cancelled, NotReady
from modelswap_engine.swap.clock import within
from modelswap_engine.swap.core import Core
from modelswap_engine.swap.lock import Scope


async def drain(core: Core, seconds: float) -> None:
    """Get the process to where it can end without harm, or as near as the time allows.

    A swap that can be dropped is dropped, one that cannot is seen through.
    """
    core.stopping = True
    core.touch()
    operation = core.operations.current
    if operation is not None:
        operation.interrupt(Cancelled("the engine is stopping", advice="swap again when the pod is back"))
    try:
        await within(core.clock, seconds, _empty(core))
    except TimeoutError:
        refuse(core)


def refuse(core: Core) -> None:
    """Answer every new request that the engine is stopping."""
    core.stopping = True
    stopping = NotReady("the engine is stopping", advice="try another replica", details={"retryAfterSeconds": "1"})
    core.gate.refuse(stopping.body())


async def _empty(core: Core) -> None:
    core.closing = True
    # A pod that terminates leaves the endpoints by that, without any probe; only the news has to travel.
    await core.clock.sleep(core.settings.propagation_seconds)
    refuse(core)
    await core.lock.idle(Scope.ALL)
    core.preempt()
    async with core.mutex:  # a swap past its point of return has ended
        return
