"""The calls that load and unload LoRA adapters; what they carry is in ``adapters``."""

from typing import Annotated

import msgspec

from modelswap_engine.protocol.adapters import AdapterSource
from modelswap_engine.protocol.messages import Fence
from modelswap_engine.protocol.policy import LONGEST_DRAIN_SECONDS
from modelswap_engine.protocol.wire import LONGEST_ID, Message

DrainSeconds = Annotated[float, msgspec.Meta(ge=0, le=LONGEST_DRAIN_SECONDS)]
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
