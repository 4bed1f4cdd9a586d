"""The end of the process: leave the endpoints, let clients move away, refuse what still comes, all within a time.

Nobody is refused while a client may not know yet: an answer that was streaming when the end began has told its client
nothing, so that client's next request on the same connection is answered too, and told to connect anew. And as long as
requests come, the news has not come to where they come from: a busy node can take many times as long as an idle one.
"""

from typing import Final

from modelswap_engine.protocol.errors import Cancelled, NotReady
from modelswap_engine.swap.clock import within
from modelswap_engine.swap.core import Core
from modelswap_engine.swap.lock import Scope

QUIET_TIMES: Final = 4
"""For so many times the propagation time nobody may have come when the process ends."""


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
    propagation = core.settings.propagation_seconds
    # A pod that terminates leaves the endpoints by that, without any probe; only the news has to travel.
    await core.clock.sleep(propagation)
    quiet = 0
    while quiet < QUIET_TIMES:
        await core.lock.idle(Scope.ALL)
        came = core.lock.entered
        await core.clock.sleep(propagation)
        quiet = quiet + 1 if core.lock.entered == came else 0
    refuse(core)
    core.preempt()
    async with core.mutex:  # a swap past its point of return has ended
        return
