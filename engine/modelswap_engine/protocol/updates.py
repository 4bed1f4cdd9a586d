"""Weight updates by a trainer: begin, any number of parts from any source, commit or abort. One transaction.

Nothing is live before the commit, and then all of it is. The update has a lease: who begins one and goes away leaves
nothing behind.
"""

from typing import Annotated, Final

import msgspec

from modelswap_engine.protocol.messages import LONGEST_LEASE_SECONDS, LeaseId
from modelswap_engine.protocol.policy import Loading, Traffic
from modelswap_engine.protocol.wire import LONGEST_ID, Message

RECEIVED: Final = "received:"
"""The scheme of a version that was sent to an engine: it lies in that engine's memory and nowhere else."""

MOST_PATTERNS: Final = 64
MOST_MEMBERS: Final = 65_536

Owner = Annotated[str, msgspec.Meta(max_length=LONGEST_ID)]
Pattern = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
Offset = Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]
GroupName = Annotated[str, msgspec.Meta(min_length=1, max_length=LONGEST_ID)]
Bound = Annotated[float, msgspec.Meta(gt=0, le=LONGEST_LEASE_SECONDS)]
"""Seconds that a wait for somebody outside may take."""

Extent = Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]


class BeginUpdate(Message, frozen=True, kw_only=True):
    """``POST /updates``: open an update; the same id of the same owner again only renews its lease.

    ``traffic`` and ``loading`` are those of the swap that the commit makes of it.
    """

    update_id: LeaseId
    owner: Owner = ""
    seconds: Annotated[float, msgspec.Meta(gt=0, le=LONGEST_LEASE_SECONDS)] = 300.0
    traffic: Traffic = Traffic()
    loading: Loading = Loading()


class DiskPart(Message, frozen=True, kw_only=True):
    """``POST /updates/{id}/disk``: tensors of a checkpoint at a source whose names match one of the globs ``names``.

    Without ``names`` the whole version is meant, side files and all; it comes before any other part.
    """

    uri: str
    owner: Owner = ""
    names: Annotated[tuple[Pattern, ...], msgspec.Meta(max_length=MOST_PATTERNS)] = ()


class SharedTensor(Message, frozen=True, kw_only=True):
    """One tensor in a segment of shared memory; ``sha256`` (64 hex digits) is checked when it is given."""

    name: str
    dtype: str
    shape: Annotated[list[Extent], msgspec.Meta(max_length=32)]
    offset: Offset = 0
    sha256: str = ""


class SharedPart(Message, frozen=True, kw_only=True):
    """``POST /updates/{id}/shared``: tensors in a POSIX shared memory segment of this host.

    They are copied and hashed before the answer; afterwards the segment is the sender's again.
    """

    segment: str
    owner: Owner = ""
    tensors: list[SharedTensor]
    loader: str = ""


class Announced(Message, frozen=True, kw_only=True):
    """A tensor that somebody is going to broadcast."""

    name: str
    dtype: str
    shape: Annotated[list[Extent], msgspec.Meta(max_length=32)]


class BroadcastPart(Message, frozen=True, kw_only=True):
    """``POST /updates/{id}/broadcast``: tensors that the member ``root`` of a group broadcasts in this order.

    No ``tensors`` means all that the engine reads, sorted by name: what another engine sends. ``flattened`` means that
    they come as the bytes of one tensor.
    """

    group: GroupName
    owner: Owner = ""
    tensors: list[Announced] = []
    root: Annotated[int, msgspec.Meta(ge=0, le=MOST_MEMBERS)] = 0
    flattened: bool = False
    loader: str = ""
    seconds: Bound = 300.0


class CommitUpdate(Message, frozen=True, kw_only=True):
    """``POST /updates/{id}/commit``: make everything that arrived live, in one swap.

    ``version`` labels the result (by default the live label and the digest's beginning), ``digest`` pins it.
    """

    owner: Owner = ""
    version: Annotated[str, msgspec.Meta(max_length=LONGEST_ID)] = ""
    digest: str = ""


class AbortUpdate(Message, frozen=True, kw_only=True):
    """``POST /updates/{id}/abort``: drop everything that arrived; nothing of it was live."""

    owner: Owner = ""
