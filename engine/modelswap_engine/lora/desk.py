"""Adapters as callers see them: loaded, unloaded and listed by the control port, used by requests.

Changes take the lock of their own name and nothing else. They never wait for requests of others, requests never wait
for them, and a request that names an adapter that is not there is told so: nothing answers in its place.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from modelswap_engine.lora.beside import BesideBase
from modelswap_engine.lora.entries import Entry
from modelswap_engine.lora.terms import asked
from modelswap_engine.protocol.adapter_calls import AssignAdaptersRequest, LoadAdapterRequest, UnloadAdapterRequest
from modelswap_engine.protocol.adapters import AdapterRegistry, AdapterState, AdapterStatus, adapter_id
from modelswap_engine.protocol.errors import IncompatibleAdapter
from modelswap_engine.protocol.messages import Fence, VersionRef
from modelswap_engine.swap.records import Registered


class AdapterDesk(BesideBase):
    """The adapters of one engine process; also the companion of its base (:class:`.beside.BesideBase`)."""

    # Requests.

    def has(self, name: str) -> bool:
        """Say whether a name leads to an adapter."""
        return self._registry.has(name)

    @asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[Entry]:
        """Have an adapter while the context lasts: acquired at once, in a slot of the engine when this is entered.

        Raises:
            AdapterNotFound: no such name.
            SlotsBusy, NotReady, WorkerLost: not now.
        """
        entry = self._registry.acquire(name)
        try:
            await self._shelf.ready(entry)
            yield entry
        finally:
            self._shelf.release(entry)

    # Reading.

    def contents(self) -> tuple[AdapterStatus, ...]:
        """Return all contents, those that names lead to first, and the names that wait for another base."""
        now = self._clock.monotonic()
        entries = sorted(self._registry.entries(), key=lambda entry: (not entry.registered, entry.id))
        waiting = [item for name, item in self._registrations.items() if item.sources and not self._registry.has(name)]
        return (*(self._status(entry, now=now) for entry in entries), *map(_waiting, waiting))

    def registered(self) -> tuple[AdapterStatus, ...]:
        """Return the contents that names lead to, by name."""
        now = self._clock.monotonic()
        return tuple(self._status(entry, now=now) for entry in self._registry.registered())

    def status(self, name: str) -> AdapterStatus:
        """Return the content that a name leads to.

        Raises:
            AdapterNotFound: none.
        """
        return self._status(self._registry.resolve(name), now=self._clock.monotonic())

    def view(self) -> AdapterRegistry:
        """Return the one view of all of it."""
        registry, layout = self._registry, self._layout_or_none()
        limits = registry.limits
        return AdapterRegistry(
            slots=limits.slots,
            slots_used=registry.slots_used,
            slot_bytes=registry.slot_bytes,
            slot_bytes_limit=limits.slot_bytes,
            host_bytes=registry.host_bytes,
            host_bytes_limit=limits.host_bytes,
            max_pinned=limits.max_pinned,
            max_rank=layout.max_rank if layout is not None else 0,
            loads=self._shelf.loads,
            evictions=self._shelf.evictions,
            reason=layout.reason if layout is not None else "",
            adapters=list(self.contents()),
            assigned=self._following.state(),
        )

    def _status(self, entry: Entry, *, now: float) -> AdapterStatus:
        status = entry.status(now=now)
        known = self._registrations.get(entry.content.name)
        if known is None or not entry.registered:
            return status
        accepted = known.accepted
        return msgspec.structs.replace(
            status, owner_uid=accepted.owner_uid, epoch=accepted.epoch, revision=accepted.revision
        )

    # Changing.

    async def load(self, request: LoadAdapterRequest, *, if_match: str | None = None) -> AdapterStatus:
        """Load an adapter, or let other content take its name over; returns when it serves.

        Raises:
            Refused: it cannot be served here.
            Fenced: the caller is not entitled, or decided on another state.
            Unavailable: not now.
        """
        fence = request.fence
        self._registrations.check_call(fence, if_match)
        self.reader.check_name(request.source.name)
        source = asked(request.source, self._changes.base)
        entry = await self._changes.load(
            source,
            fence=fence,
            operation_id=request.operation_id,
            drain_seconds=request.drain_timeout_seconds,
            entitled=lambda target: self._check_order(fence, target),
        )
        return self._status(entry, now=self._clock.monotonic())

    async def unload(self, name: str, request: UnloadAdapterRequest, *, if_match: str | None = None) -> AdapterStatus:
        """Let a name lead nowhere from now on, and wait for its last request; it may take longer than that.

        Raises:
            AdapterNotFound: it leads nowhere already.
            Fenced: the caller is not entitled, or decided on another state.
        """
        fence = request.fence
        self._registrations.check_call(fence, if_match)
        entry = await self._changes.unload(
            name,
            fence=fence,
            operation_id=request.operation_id,
            entitled=lambda target: self._check_order(fence, target),
        )
        gone = await self._shelf.drained(entry, request.drain_timeout_seconds)
        self._registrations.base.touch()
        status = entry.status(now=self._clock.monotonic())
        return msgspec.structs.replace(status, state=AdapterState.UNLOADED, slot=-1) if gone else status

    async def assign(self, request: AssignAdaptersRequest, *, if_match: str | None = None) -> AdapterRegistry:
        """Follow an assignment from now on; what it changes is begun when this returns.

        Raises:
            BadRequest: it names no owner.
            Fenced: the caller is not entitled, or decided on another state.
        """
        self._registrations.check_call(request.fence, if_match)
        await self._assignments.accept(request.fence, request.adapters)
        self._following.wake()
        return self.view()

    def _check_order(self, fence: Fence, target: VersionRef) -> None:
        self._registrations.check_order(fence, target, assigned=self._assignments.decision(target.version))


def _waiting(registered: Registered) -> AdapterStatus:
    """Return the status of a name whose content is bound to a base that is not live."""
    source, accepted = registered.sources[0], registered.accepted
    bound = IncompatibleAdapter(
        f"adapter {source.name} is bound to base {source.base_digest}, which is not live",
        advice="it comes back with that base; or load its content for the live one",
    )
    return AdapterStatus(
        name=source.name,
        id=adapter_id(source.name, source.digest),
        digest=source.digest,
        uri=source.uri,
        base_digest=source.base_digest,
        pinned=source.pinned,
        owner_uid=accepted.owner_uid,
        epoch=accepted.epoch,
        revision=accepted.revision,
        error=bound.body(),
    )
