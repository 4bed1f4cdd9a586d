"""Fetching versions ahead: what is asked for, and how far it has come."""

from enum import StrEnum

from modelswap_engine.protocol.errors import ErrorBody
from modelswap_engine.protocol.messages import Fence, VersionRef
from modelswap_engine.protocol.wire import Message


class PrefetchRequest(Message, frozen=True, kw_only=True):
    """``POST /prefetch``: have these versions here, in this order, and no others ahead of their time.

    What live weights are not touched by needs no turn: it goes on beside requests and swaps.
    """

    fence: Fence = Fence()
    targets: list[VersionRef] = []


class PrefetchPhase(StrEnum):
    """Where a version stands."""

    PENDING = "Pending"
    FETCHING = "Fetching"
    FETCHED = "Fetched"
    FAILED = "Failed"


class PrefetchState(Message, frozen=True, kw_only=True):
    """One version: what a swap to it would have to read is here when its phase is Fetched.

    Attributes:
        target: as it was asked for.
        digest: what it was resolved to; "" before that.
        bytes_fetched: what came from the source for it; ``bytes_from_peers`` from other pods of the slot.
        error: why it is not here; a failed one is tried again.
    """

    target: VersionRef
    phase: PrefetchPhase = PrefetchPhase.PENDING
    digest: str = ""
    bytes_fetched: int = 0
    bytes_from_peers: int = 0
    error: ErrorBody | None = None
