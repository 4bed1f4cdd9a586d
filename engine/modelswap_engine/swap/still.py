"""Holding the engine still for somebody who only looks: new requests wait, those inside end, nothing is changed."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from modelswap_engine.protocol.errors import DrainTimeout
from modelswap_engine.swap.clock import within
from modelswap_engine.swap.core import Core
from modelswap_engine.swap.lock import Scope

_HOLD: Final = "check"


@asynccontextmanager
async def still(core: Core, seconds: float) -> AsyncIterator[None]:
    """Keep requests out while the context lasts, which begins when nobody is inside any more. The caller has the mutex.

    Raises:
        DrainTimeout: somebody was, for longer than that.
        Busy: a swap or a recovery came first.
    """
    core.gate.close(_HOLD, allowance=seconds)
    try:
        try:
            with core.preemptible() as preempted:
                await within(core.clock, seconds, core.lock.idle(Scope.ALL), unless=preempted)
        except TimeoutError:
            raise DrainTimeout(
                f"{core.lock.inside} requests did not end within {seconds:g} s, and the check did not begin",
                advice="allow more time, or check without still, which leaves out what cannot be seen meanwhile",
            ) from None
        yield
    finally:
        core.gate.open(_HOLD)
