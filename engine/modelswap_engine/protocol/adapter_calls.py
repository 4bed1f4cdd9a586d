"""The calls that load, unload, assign and look up LoRA adapters; what they carry is in ``adapters``."""

from typing import Annotated, Final

import msgspec

from modelswap_engine.protocol.adapters import AdapterSource
from modelswap_engine.protocol.assignment import AssignedAdapter
from modelswap_engine.protocol.errors import ErrorBody
from modelswap_engine.protocol.messages import Fence
from modelswap_engine.protocol.policy import DrainSeconds
from modelswap_engine.protocol.wire import LONGEST_ID, Message

MOST_RESOLVED: Final = 16
"""Sources that one call looks up."""

OperationId = Annotated[str, msgspec.Meta(max_length=LONGEST_ID)]


class LoadAdapterRequest(Message, frozen=True, kw_only=True):
    """``POST /adapters``: answered when the adapter serves under its name.

    The same content again changes nothing; other content takes the name over, the old one drains for so many seconds.
    """

    operation_id: OperationId = ""
    fence: Fence = Fence()
    source: AdapterSource
    drain_timeout_seconds: DrainSeconds = 60.0


class UnloadAdapterRequest(Message, frozen=True, kw_only=True):
    """``DELETE /adapters/{name}``: the name is gone at once; answered when its last request has ended, or in time."""

    operation_id: OperationId = ""
    fence: Fence = Fence()
    drain_timeout_seconds: DrainSeconds = 60.0


class AssignAdaptersRequest(Message, frozen=True, kw_only=True):
    """``PUT /adapters``: all adapters of the assignment, those of other pods too; answered when they are remembered.

    The fence's ``revision`` is the assignment's ``adaptersRevision``. Loading and unloading follow by themselves, as
    after a change of the mounted assignment, and :class:`AssignedState` tells how far they are.
    """

    fence: Fence
    adapters: list[AssignedAdapter] = []


class ResolveAdaptersRequest(Message, frozen=True, kw_only=True):
    """``POST /adapters/resolve``: what is at these sources? Nothing is loaded."""

    sources: Annotated[list[AdapterSource], msgspec.Meta(min_length=1, max_length=MOST_RESOLVED)]


class ResolvedAdapter(Message, frozen=True, kw_only=True):
    """What one source holds, or why that cannot be served here."""

    name: str = ""
    uri: str = ""
    base_digest: str = ""
    digest: str = ""
    rank: int = 0
    bytes: int = 0
    error: ErrorBody | None = None


class ResolvedAdapters(Message, frozen=True, kw_only=True):
    """One answer for each source that was asked for, in order."""

    adapters: list[ResolvedAdapter] = []
