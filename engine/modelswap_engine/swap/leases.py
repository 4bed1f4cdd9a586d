"""Holding new requests by lease, for whoever wants the engine quiet and changes no version.

Unlike a swap's pause this stops no step of the engine: what is inside ends, and what comes waits at the gate.
"""

from modelswap_engine.protocol.engine_state import EngineState
from modelswap_engine.protocol.errors import BadRequest, DrainTimeout
from modelswap_engine.protocol.messages import LONGEST_LEASE_SECONDS, PauseRequest, ResumeRequest
from modelswap_engine.swap.clock import within
from modelswap_engine.swap.core import Core
from modelswap_engine.swap.lock import Scope
from modelswap_engine.swap.view import engine_state


class Leases:
    """The leases that callers hold.

    Args:
        core: the shared state.
    """

    def __init__(self, core: Core) -> None:
        self._core = core

    async def take(self, request: PauseRequest) -> EngineState:
        """Hold new requests by lease.

        Raises:
            BadRequest: an empty id, or a time outside 0 to one hour.
            ForeignOwner: somebody else holds a lease with this id.
            Busy: too many leases are held.
        """
        if not request.lease_id or not 0 < request.seconds <= LONGEST_LEASE_SECONDS:
            raise BadRequest(f"a lease needs an id and more than 0 and at most {LONGEST_LEASE_SECONDS} seconds")
        self._core.gate.take_lease(request.lease_id, owner=request.owner, seconds=request.seconds)
        return engine_state(self._core)

    def holds(self, lease_id: str) -> bool:
        """Say whether somebody holds new requests by this lease."""
        return self._core.gate.holds(lease_id)

    async def quiet(self, seconds: float, *, scope: Scope = Scope.ALL) -> None:
        """Wait until no request of the scope is inside; whoever wants it to stay that way holds a lease.

        Raises:
            DrainTimeout: some were, for longer than that.
        """
        core = self._core
        try:
            await within(core.clock, seconds, core.lock.idle(scope))
        except TimeoutError:
            raise DrainTimeout(
                f"{core.lock.inside} requests did not end within {seconds:g} s", advice="wait longer, or abort them"
            ) from None

    async def give_back(self, request: ResumeRequest) -> EngineState:
        """Give a lease back.

        Raises:
            ForeignOwner: it is somebody else's.
        """
        self._core.gate.end_lease(request.lease_id, owner=request.owner)
        return engine_state(self._core)
