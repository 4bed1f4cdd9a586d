"""LoRA adapters on the wire, in camelCase (docs/architecture.md, Adapters).

Only the values; the calls that carry them are in ``adapter_calls``. An adapter is known by ``name@digest12``: the name
that clients ask for and the first twelve hex digits of its content digest. New content under a name is another adapter
that takes the name over.
"""

from enum import StrEnum
from typing import Annotated, Final

import msgspec

from modelswap_engine.protocol.errors import ErrorBody
from modelswap_engine.protocol.policy import Verification
from modelswap_engine.protocol.wire import Message

ADAPTER_NAME: Final = r"^[A-Za-z0-9]([A-Za-z0-9._:/@-]*[A-Za-z0-9])?\Z"
"""The names that the LoRAAdapter definition allows, too."""

LONGEST_NAME: Final = 253
MOST_ADAPTERS: Final = 256
"""Adapters that one base swap may bring along."""

DIGEST_SHOWN: Final = 12

AdapterName = Annotated[str, msgspec.Meta(pattern=ADAPTER_NAME, max_length=LONGEST_NAME)]


def adapter_id(name: str, digest: str) -> str:
    """Return the identity of an adapter's content under a name."""
    return f"{name}@{digest.removeprefix('sha256:')[:DIGEST_SHOWN]}"


def place_of(uri: str) -> str:
    """Return what answers for a source: a server, a bucket, a claim, or the top of a path."""
    scheme, _, rest = uri.partition("://")
    host, _, path = rest.partition("/")
    return f"{scheme}://{host or '/' + path.partition('/')[0]}"


class AdapterState(StrEnum):
    """Where one adapter's content is.

    ``STAGED`` it is in memory, no name leads to it yet; ``READY`` in a slot of the engine; ``EVICTED`` registered and
    in memory, it comes back to a slot when asked for; ``DRAINING`` no name leads to it any more, requests still use
    it; ``TOMBSTONE`` the same, and whoever waited for it has given up; ``UNLOADED`` it is gone; ``FAILED`` registered,
    but its bytes were lost with a worker and could not be read again.
    """

    STAGED = "Staged"
    READY = "Ready"
    EVICTED = "Evicted"
    DRAINING = "Draining"
    TOMBSTONE = "Tombstone"
    UNLOADED = "Unloaded"
    FAILED = "Failed"


class OnIncompatible(StrEnum):
    """What a base swap does about adapters that name another base: refuse, or unload them in the same commit."""

    BLOCK = "Block"
    UNLOAD = "Unload"


class AdapterSource(Message, frozen=True, kw_only=True):
    """An adapter's content: a place, and pins when they are not empty.

    Attributes:
        name: what clients ask for.
        uri: the folder with ``adapter_config.json`` and ``adapter_model.safetensors``.
        digest: refuse any other content.
        base_digest: the only base it may be used with; empty fits every base of its shape.
        pinned: keep it in a slot; it is never evicted.
        credentials, verification: as in a :class:`VersionRef`.
    """

    name: AdapterName
    uri: str
    digest: str = ""
    base_digest: str = ""
    pinned: bool = False
    credentials: str = ""
    verification: Verification | None = None


class AdapterChange(Message, frozen=True, kw_only=True):
    """What a base swap does with adapters, in its own commit.

    ``sources`` are staged with the base; a name may occur once for each base digest, the entry of the new base is
    taken and otherwise the one that names no base.
    """

    on_incompatible: OnIncompatible = OnIncompatible.BLOCK
    sources: Annotated[list[AdapterSource], msgspec.Meta(max_length=MOST_ADAPTERS)] = []


class AdapterStatus(Message, frozen=True, kw_only=True):
    """One adapter's content.

    Attributes:
        id: ``name@digest12``.
        state: see :class:`AdapterState`.
        bytes: what it takes in memory, and in a slot.
        references: requests that use it now.
        slot: the slot it is in, -1 for none.
        idle_seconds: since a request last asked for it.
        owner_uid: who decided about the name last, in which ``epoch`` and ``revision``.
    """

    name: str = ""
    id: str = ""
    digest: str = ""
    uri: str = ""
    base_digest: str = ""
    state: AdapterState = AdapterState.UNLOADED
    pinned: bool = False
    rank: int = 0
    bytes: int = 0
    references: int = 0
    slot: int = -1
    idle_seconds: float = 0.0
    owner_uid: str = ""
    epoch: int = 0
    revision: int = 0
    error: ErrorBody | None = None


class AssignedProblem(Message, frozen=True, kw_only=True):
    """An assigned adapter that is not served as it is assigned, and what the last attempt met.

    What was served under the name before goes on. ``digest`` and ``base_digest`` are those of the source tried last.
    """

    name: str = ""
    uri: str = ""
    digest: str = ""
    base_digest: str = ""
    attempts: int = 0
    error: ErrorBody | None = None


class AssignedState(Message, frozen=True, kw_only=True):
    """Which assignment of adapters this pod follows, and how far it has come.

    Attributes:
        owner_uid: whose it is, decided in ``epoch`` and ``revision`` (the assignment's ``adaptersRevision``).
        adapters: how many of them are this pod's.
        open: names that are being loaded or taken away; 0 once nothing is left to do but for the ``problems``. What no
            name leads to any more may still be on its way out of memory then: it is listed as Draining.
    """

    owner_uid: str = ""
    epoch: int = 0
    revision: int = 0
    adapters: int = 0
    open: int = 0
    problems: list[AssignedProblem] = []


class AdapterRegistry(Message, frozen=True, kw_only=True):
    """``GET /adapters``, and ``adapters`` of the state.

    Attributes:
        slots: places in the engine; 0 means that adapters cannot be served, and ``reason`` why.
        slot_bytes_limit: bytes that the adapters in slots may have together, 0 for no limit.
        host_bytes_limit: bytes that all adapters may have together.
        assigned: None while no assignment has been seen here.
    """

    slots: int = 0
    slots_used: int = 0
    slot_bytes: int = 0
    slot_bytes_limit: int = 0
    host_bytes: int = 0
    host_bytes_limit: int = 0
    max_pinned: int = 0
    max_rank: int = 0
    loads: int = 0
    evictions: int = 0
    reason: str = ""
    adapters: list[AdapterStatus] = []
    assigned: AssignedState | None = None
