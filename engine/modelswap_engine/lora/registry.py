"""Which adapters are registered, who uses them, and where they are: in a slot of the engine or only in its memory.

Pure bookkeeping on one event loop: every method decides and records at once, nothing is awaited between a look-up and
its reference, so an adapter can neither vanish nor lose its slot under a request that has acquired it. What must
happen in the engine meanwhile is the desk's business (``desk.py``).

A name leads to one content. An adapter that was withdrawn is found by nobody again: only a new registration brings
its content back, never a request.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from modelswap_engine.lora.entries import Content, Entry, Limits
from modelswap_engine.protocol.errors import (
    AdapterLimit,
    AdapterNotFound,
    ErrorBody,
    InsufficientMemory,
    InvalidCheckpoint,
)
from modelswap_engine.swap.sleepers import Sleepers

_MIB: Final = 1 << 20


@dataclass(frozen=True)
class Placement:
    """Where an adapter can go, and which must leave their slots first, the longest unused one first."""

    slot: int
    evict: tuple[Entry, ...]


class Registry:
    """All adapters of one engine process.

    Args:
        limits: what there is room for.
        now: monotonic time in seconds.

    Attributes:
        losses: how often the engine has lost its memory.
    """

    def __init__(self, limits: Limits, *, now: Callable[[], float]) -> None:
        self.limits = limits
        self._now = now
        self._entries: dict[str, Entry] = {}
        self._names: dict[str, Entry] = {}
        self._uses = itertools.count()
        self._sleepers = Sleepers()
        self.losses = 0

    # Registration.

    def stage(self, content: Content) -> Entry:
        """Make room for a content that no name leads to yet, and claim it; one that is known stays what it is.

        Raises:
            AdapterLimit: it cannot be served however empty the engine is, or too many are pinned, or held.
            InsufficientMemory: the other adapters leave no room for its bytes.
            InvalidCheckpoint: another content has the same identity.
        """
        known = self._entries.get(content.id)
        self._check_pins(content, known)
        if known is not None:
            if known.content.digest != content.digest:
                raise InvalidCheckpoint(
                    f"adapter {content.id}: {content.digest} has the identity of {known.content.digest}, which is held",
                    advice="load it under another name",
                )
            if not known.present:
                self._check_bytes(content, held=self.host_bytes - known.content.nbytes)
            entry = known
        else:
            self._check_number(content)
            self._check_bytes(content, held=self.host_bytes)
            entry = self._entries[content.id] = Entry(content, used=next(self._uses), at=self._now())
        entry.claims += 1
        entry.pin_claims += content.pinned
        return entry

    def hold(self, entry: Entry) -> None:
        """Claim a content that is here, as it is; :meth:`unstage` or :meth:`publish` gives the claim back."""
        entry.claims += 1
        entry.pin_claims += entry.content.pinned

    def unstage(self, entry: Entry, content: Content) -> None:
        """Give a claim back."""
        entry.claims -= 1
        entry.pin_claims -= content.pinned
        self._sleepers.wake()

    def _check_pins(self, content: Content, known: Entry | None) -> None:
        if not content.pinned:
            return
        names = {entry.content.name for entry in self._entries.values() if entry.pinned and entry is not known}
        names.discard(content.name)  # it takes that place over
        if len(names) >= self.limits.max_pinned:
            raise AdapterLimit(
                f"adapter {content.name}: {len(names)} adapters are pinned, at most {self.limits.max_pinned} may be",
                advice="load it without pinning, unpin another one, or start the engine with more slots",
                details={"pinned": ",".join(sorted(names))},
            )

    def _check_number(self, content: Content) -> None:
        most = self.limits.held
        if most and len(self._entries) >= most:
            raise AdapterLimit(
                f"adapter {content.name}: the engine holds {len(self._entries)} adapters, those that drain "
                f"too, and can hold {most}",
                advice=f"unload an adapter, or start the engine with a higher {self.limits.held_option}; new content "
                "under a name needs room beside the old one",
                details={"held": ",".join(sorted(self._entries))},
            )

    def _check_bytes(self, content: Content, *, held: int) -> None:
        largest = min(self.limits.host_bytes, self.limits.slot_bytes or self.limits.host_bytes)
        if content.nbytes > largest:
            raise AdapterLimit(
                f"adapter {content.name} has {_mib(content.nbytes)} MiB, one may have {_mib(largest)} MiB here",
                advice="use a lower rank or fewer modules, or start the engine with more bytes for adapters",
            )
        if held + content.nbytes > self.limits.host_bytes:
            raise InsufficientMemory(
                f"adapter {content.name} needs {_mib(content.nbytes)} MiB; {len(self._entries)} adapters hold "
                f"{_mib(held)} of {_mib(self.limits.host_bytes)} MiB",
                advice="unload an adapter, or start the engine with more bytes for adapters",
                details={"neededMiB": _mib(content.nbytes), "heldMiB": _mib(held)},
            )

    def publish(self, entry: Entry, content: Content) -> Entry | None:
        """Let the name lead to a claimed content from now on; return the one that it led to, which drains.

        ``content`` says anew where it comes from, which base it is bound to and whether it is pinned.
        """
        entry.content = content
        self.unstage(entry, content)
        former = self._names.get(content.name)
        if former is not None:
            former.registered = False
        entry.registered = entry.published = True
        entry.abandoned = False
        self._names[content.name] = entry
        self._sleepers.wake()
        return former if former is not entry else None

    def withdraw(self, name: str) -> Entry:
        """Let the name lead nowhere; return the content that it led to, which drains.

        Raises:
            AdapterNotFound: it leads nowhere already.
        """
        entry = self.resolve(name)
        del self._names[name]
        entry.registered = False
        self._sleepers.wake()
        return entry

    def abandon(self, entry: Entry) -> None:
        """Whoever waited for the content to drain has given up; it goes when its last request does."""
        entry.abandoned = True

    def forget(self, entry: Entry) -> None:
        """Drop a content that drained, or that was staged and is not wanted.

        Raises:
            RuntimeError: it is registered or in use; a defect of the caller.
        """
        if not entry.droppable:
            raise RuntimeError(f"adapter {entry.id} is registered or in use")
        entry.slot = None
        self._entries.pop(entry.id, None)
        self._sleepers.wake()

    # Use.

    def has(self, name: str) -> bool:
        """Say whether a name leads to a content."""
        return name in self._names

    def resolve(self, name: str) -> Entry:
        """Return the content that a name leads to.

        Raises:
            AdapterNotFound: none.
        """
        entry = self._names.get(name)
        if entry is None:
            raise AdapterNotFound(f"no adapter {name[:200]!r} is registered here", advice="load it, or list adapters")
        return entry

    def acquire(self, name: str) -> Entry:
        """Return the content that a name leads to, referenced: it stays until :meth:`release`.

        Raises:
            AdapterNotFound: none.
        """
        entry = self.resolve(name)
        entry.references += 1
        entry.used, entry.used_at = next(self._uses), self._now()
        return entry

    def release(self, entry: Entry) -> None:
        """Give one reference back.

        Raises:
            RuntimeError: there is none to give back; a defect of the caller.
        """
        if entry.references < 1:
            raise RuntimeError(f"adapter {entry.id} was released more often than acquired")
        entry.references -= 1
        if not entry.references:
            self._sleepers.wake()

    # Slots.

    def placement(self, entry: Entry) -> Placement | None:
        """Say where an adapter that has no slot could go now, None when it must wait for requests to end."""
        limits = self.limits
        placed = sorted((other for other in self._entries.values() if other.slot is not None), key=_order)
        free = sorted(set(range(limits.slots)) - {other.slot for other in placed})
        spare = limits.slot_bytes - self.slot_bytes if limits.slot_bytes else None
        evict: list[Entry] = []
        for other in placed:
            if free and (spare is None or spare >= entry.content.nbytes):
                break
            if other.slot is not None and other.evictable:
                evict.append(other)
                free.append(other.slot)
                spare = None if spare is None else spare + other.content.nbytes
        if not free or (spare is not None and spare < entry.content.nbytes):
            return None
        return Placement(slot=free[0], evict=tuple(evict))

    def place(self, entry: Entry, slot: int) -> None:
        """Record that the engine has an adapter in a slot."""
        entry.slot = slot

    def displace(self, entry: Entry) -> None:
        """Record that an adapter is about to lose its slot; it stays in memory."""
        entry.slot = None

    # What there is.

    def lost(self) -> None:
        """The engine lost its memory: nothing is in a slot or present any more."""
        self.losses += 1
        for entry in self._entries.values():
            entry.slot, entry.present = None, False

    def restored(self, entry: Entry, *, error: ErrorBody | None = None) -> None:
        """Record that an adapter's bytes are there again, or why not."""
        entry.present, entry.error = error is None, error
        self._sleepers.wake()

    def find(self, identity: str) -> Entry | None:
        """Return the content with this ``name@digest12``."""
        return self._entries.get(identity)

    def entries(self) -> tuple[Entry, ...]:
        """Return all contents, the longest unused one first."""
        return tuple(sorted(self._entries.values(), key=lambda entry: entry.used))

    def registered(self) -> tuple[Entry, ...]:
        """Return the contents that names lead to, by name."""
        return tuple(self._names[name] for name in sorted(self._names))

    @property
    def host_bytes(self) -> int:
        """Bytes of all contents."""
        return sum(entry.content.nbytes for entry in self._entries.values())

    @property
    def slot_bytes(self) -> int:
        """Bytes of the contents in slots."""
        return sum(entry.content.nbytes for entry in self._entries.values() if entry.slot is not None)

    @property
    def slots_used(self) -> int:
        """How many contents are in slots."""
        return sum(entry.slot is not None for entry in self._entries.values())

    # Waiting. Callers bound it with ``clock.within``.

    async def idle(self, entry: Entry) -> None:
        """Return when no request uses a content."""
        while entry.references:
            await self.changed()

    async def changed(self) -> None:
        """Return at the next change that could let somebody go on."""
        await self._sleepers.sleep()


def _order(entry: Entry) -> tuple[bool, int]:
    """What leaves first: contents that no name leads to any more, then the longest unused."""
    return (bool(entry.registered or entry.claims), entry.used)


def _mib(number: int) -> str:
    return f"{number / _MIB:.1f}"
