"""Process groups with somebody outside, and weights that leave the engine."""

from enum import StrEnum
from typing import Annotated

import msgspec

from modelswap_engine.protocol.updates import MOST_MEMBERS, Bound, GroupName
from modelswap_engine.protocol.wire import Message

DEFAULT_SHARD_BYTES = 5_000_000_000


class GroupBackend(StrEnum):
    """How the members talk: ``gloo`` for tensors in host memory, ``nccl`` for those of a device."""

    GLOO = "gloo"
    NCCL = "nccl"


class JoinGroupRequest(Message, frozen=True, kw_only=True):
    """``POST /groups``: meet the other members of a process group; answers when all are there.

    The member with rank 0 listens at ``address`` and ``port``. This engine's ranks take the places from ``rank`` on;
    with ``sends``, for weights that leave, its first rank alone takes ``rank``.
    """

    group: GroupName
    address: Annotated[str, msgspec.Meta(min_length=1, max_length=253)]
    port: Annotated[int, msgspec.Meta(ge=1, le=65_535)]
    rank: Annotated[int, msgspec.Meta(ge=0, le=MOST_MEMBERS)]
    size: Annotated[int, msgspec.Meta(ge=2, le=MOST_MEMBERS)]
    backend: GroupBackend = GroupBackend.GLOO
    sends: bool = False
    seconds: Bound = 120.0


class SendRequest(Message, frozen=True, kw_only=True):
    """``POST /groups/{name}/send``: broadcast all live tensors that the engine reads, sorted by name."""

    seconds: Bound = 300.0


class SendResult(Message, frozen=True, kw_only=True):
    """What was sent; ``digest`` pins it for whoever takes it."""

    digest: str
    tensors: int
    bytes: int


class SaveRequest(Message, frozen=True, kw_only=True):
    """``POST /export/save``: write the live version as a new checkpoint folder below an export root.

    Files have at most ``shard_bytes`` bytes of tensors, but at least one tensor. The manifest is written last, and the
    folder appears when it is whole.
    """

    uri: str
    shard_bytes: Annotated[int, msgspec.Meta(ge=1)] = DEFAULT_SHARD_BYTES


class SaveResult(Message, frozen=True, kw_only=True):
    """What was written. ``lasting``: the version is loaded from there after a loss."""

    uri: str
    digest: str
    files: list[str]
    bytes: int
    lasting: bool


class ReadRequest(Message, frozen=True, kw_only=True):
    """``POST /export/read``: the first ``rows`` of one live tensor."""

    name: str
    rows: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)] = 100


class ReadResult(Message, frozen=True, kw_only=True):
    """Numbers in row-major order, and the shape of what was read."""

    name: str
    dtype: str
    shape: list[int]
    numbers: list[float]
