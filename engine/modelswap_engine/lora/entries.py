"""The values of the registry: what there is room for, what an adapter is, and where one stands.

Plain values; only the registry changes an entry.
"""

from dataclasses import dataclass

from modelswap_engine.protocol.adapters import AdapterState, AdapterStatus, adapter_id
from modelswap_engine.protocol.errors import ErrorBody


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the engine has for adapters.

    Attributes:
        slots: adapters that one batch can use.
        slot_bytes: bytes that adapters in slots may have together; 0 for no limit beside the slots.
        host_bytes: bytes that all adapters may have together.
        max_pinned: adapters that may be pinned to their slots.
        held: adapters that there may be at all, those that drain too; 0 where only bytes bound them.
        held_option: how the engine's option for that is called.
    """

    slots: int
    slot_bytes: int
    host_bytes: int
    max_pinned: int
    held: int = 0
    held_option: str = ""


@dataclass(frozen=True, kw_only=True)
class Content:
    """What an adapter is; ``nbytes`` in runtime layout."""

    name: str
    digest: str
    uri: str
    base_digest: str
    rank: int
    nbytes: int
    pinned: bool

    @property
    def id(self) -> str:
        """``name@digest12``."""
        return adapter_id(self.name, self.digest)


class Entry:
    """One adapter's content in the registry; changed by the registry only.

    Attributes:
        content: what it is.
        slot: the slot it is in.
        references: requests that use it.
        claims: how many want to publish it, and ``pin_claims`` to pin it; it stays until they have, or have given up.
        registered: its name leads here.
        present: the engine holds its bytes; False from the loss of a worker until they were read again.
    """

    def __init__(self, content: Content, *, used: int, at: float) -> None:
        self.content = content
        self.slot: int | None = None
        self.references = 0
        self.claims = 0
        self.pin_claims = 0
        self.registered = False
        self.published = False
        self.abandoned = False
        self.present = True
        self.error: ErrorBody | None = None
        self.used = used
        self.used_at = at

    @property
    def id(self) -> str:
        """``name@digest12``."""
        return self.content.id

    @property
    def droppable(self) -> bool:
        """True when nobody uses it, and no name leads or is about to lead to it."""
        return not (self.registered or self.references or self.claims)

    @property
    def pinned(self) -> bool:
        """True when its slot is kept for it; one that was replaced or withdrawn is pinned no longer."""
        return bool((self.registered and self.content.pinned) or self.pin_claims)

    @property
    def evictable(self) -> bool:
        """True when it may lose its slot."""
        return not (self.references or self.pinned)

    @property
    def state(self) -> AdapterState:
        """Where it stands; see :class:`AdapterState`."""
        if self.registered:
            if not self.present:
                return AdapterState.FAILED
            return AdapterState.EVICTED if self.slot is None else AdapterState.READY
        if not self.published:
            return AdapterState.STAGED
        return AdapterState.TOMBSTONE if self.abandoned else AdapterState.DRAINING

    def status(self, *, now: float) -> AdapterStatus:
        """Return it as it is published."""
        content = self.content
        return AdapterStatus(
            name=content.name,
            id=content.id,
            digest=content.digest,
            uri=content.uri,
            base_digest=content.base_digest,
            state=self.state,
            pinned=self.pinned,
            rank=content.rank,
            bytes=content.nbytes,
            references=self.references,
            slot=-1 if self.slot is None else self.slot,
            idle_seconds=0.0 if self.references else max(0.0, now - self.used_at),
            error=self.error,
        )
