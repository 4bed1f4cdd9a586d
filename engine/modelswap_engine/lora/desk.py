"""Adapters as callers see them: loaded, unloaded and listed by the control port, used by requests.

Changes take the lock of their own name and nothing else. They never wait for requests of others, requests never wait
for them, and a request that names an adapter that is not there is told so: nothing answers in its place.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

import msgspec

from modelswap_engine.backends.adapters import AdapterHost, AdapterLayout
from modelswap_engine.lora.assignments import Assignments
from modelswap_engine.lora.changes import Changes
from modelswap_engine.lora.entries import Entry
from modelswap_engine.lora.following import Following
from modelswap_engine.lora.reading import Fitting, Opener, Read, look, open_fitting, read
from modelswap_engine.lora.registrations import Registrations
from modelswap_engine.lora.registry import Registry
from modelswap_engine.lora.restoring import Restoring
from modelswap_engine.lora.settings import LoraSettings
from modelswap_engine.lora.shelf import Shelf
from modelswap_engine.lora.terms import OnTerms, asked, settled
from modelswap_engine.lora.together import Together
from modelswap_engine.lora.vouching import Vouching
from modelswap_engine.protocol.adapter_calls import (
    AssignAdaptersRequest,
    LoadAdapterRequest,
    ResolveAdaptersRequest,
    ResolvedAdapter,
    ResolvedAdapters,
    UnloadAdapterRequest,
)
from modelswap_engine.protocol.adapters import (
    AdapterChange,
    AdapterRegistry,
    AdapterSource,
    AdapterState,
    AdapterStatus,
    adapter_id,
)
from modelswap_engine.protocol.errors import (
    BadRequest,
    IncompatibleAdapter,
    ModelswapError,
    NotReady,
    Refused,
    Unavailable,
)
from modelswap_engine.protocol.looking import LookRequest, SourceLook
from modelswap_engine.protocol.messages import Fence, VersionRef
from modelswap_engine.swap.clock import Clock, within
from modelswap_engine.swap.companion import Base, Effect
from modelswap_engine.swap.records import Registered

T = TypeVar("T")
TOGETHER_SECONDS: Final = 20.0
"""How long one of several sources that are looked up together may take."""


class AdapterDesk:
    """The adapters of one engine process; also the :class:`~modelswap_engine.swap.companion.Companion` of its base.

    Args:
        host: the engine.
        opener: finds adapters by URI.
        clock: time.
        settings: bounds.
        vouching: who must vouch for adapters; by itself nobody.
    """

    def __init__(
        self,
        *,
        host: AdapterHost,
        opener: Opener,
        clock: Clock,
        settings: LoraSettings,
        vouching: Vouching | None = None,
    ) -> None:
        self._host = host
        self._opener = opener
        self._vouching = vouching or Vouching()
        self._clock = clock
        self._settings = settings
        self._registry = Registry(settings.limits, now=clock.monotonic)
        self._shelf = Shelf(host, self._registry, clock=clock, acquire_seconds=settings.acquire_seconds)
        self._registrations = Registrations(pod_uid=settings.pod_uid)
        self._together: Together | None = None
        self._assignments = Assignments(pod_uid=settings.pod_uid)
        self._changes = Changes(
            registry=self._registry,
            shelf=self._shelf,
            registrations=self._registrations,
            read=self._read,
            sealed=lambda: self._together is not None and self._together.sealed,
        )
        self._following = Following(
            assignments=self._assignments,
            changes=self._changes,
            registry=self._registry,
            shelf=self._shelf,
            registrations=self._registrations,
            check_name=self._check_name,
            clock=clock,
            pod_uid=settings.pod_uid,
        )

    # Companion of the base.

    def attach(self, base: Base) -> None:
        """Learn which base this is, and what the journal remembers."""
        self._registrations.attach(base)
        self._assignments.attach(base)

    async def restore(self, base: VersionRef) -> None:
        """Bring back what belongs to a base that was loaded as a whole, as far as it can be had in time."""
        began, seconds = self._clock.monotonic(), self._settings.load_seconds
        if self._together is not None and base.digest == self._together.target and self._together.switched:
            await self.settle()  # it cannot be taken back any more
        elif self._together is not None:
            self._together.revert()
        layout = self._layout_or_none()
        if layout is not None:
            self._registry.limits = self._settings.limits_in(layout)
        self._changes.restoring = base
        await self._assignments.adopt()
        restoring = Restoring(self._registry, self._shelf, read=self._read, clock=self._clock)
        await restoring.run(
            base.digest, list(self._registrations.values()), seconds=seconds / 2
        )  # the rest is for new ones
        await self._following.bring_all(max(0.0, seconds - (self._clock.monotonic() - began)))
        self._registrations.base.touch()

    async def assess(self, change: AdapterChange, *, target: VersionRef) -> Effect:
        """Say what a change of the base to ``target`` would do to the adapters."""
        for source in change.sources:
            self._check_name(source.name)
        try:
            together = self._change(change, target)
        except Refused as error:
            return Effect(refusals=(error,))
        return await together.assess(self._open)

    async def adopt(self, change: AdapterChange, *, target: VersionRef) -> None:
        """Register what is asked for, to be restored with the base that is about to be loaded."""
        for source in change.sources:
            self._check_name(source.name)
            bases = {other.base_digest for other in change.sources}
            assigned = self._assignments.decision(source.name)
            await self._registrations.came_with_base(asked(source, target), bases=bases, assigned=assigned)

    async def stage(self, operation_id: str, change: AdapterChange, *, target: VersionRef) -> None:
        """Bring what belongs to the new base into the engine's memory."""
        self._together = self._change(change, target)
        await self._together.stage(self._read, operation_id)
        # Ahead of the commit: after a crash whichever base comes up has its own. For the old one it changes nothing.
        for source in self._together.bound():
            before = self._registrations.get(source.name)
            await self._registrations.came_with_base(
                source,
                bases={self._together.source, target.digest},
                assigned=self._together.decisions.get(source.name),
            )
            self._together.ahead[source.name] = (before, self._registrations[source.name])

    def seal(self) -> None:
        """Refuse the change of the base if an adapter came meanwhile that blocks it."""
        if self._together is not None:
            self._together.seal()

    def activate(self, digest: str) -> None:
        """Let names lead to what belongs to this base."""
        self._changes.restoring = None
        self._following.wake()
        if self._together is None:
            return
        if digest == self._together.target:
            self._together.switch()
        else:
            self._together.revert()

    async def settle(self) -> None:
        """Keep what serves, register it, and give the rest back."""
        together, self._together = self._together, None
        if together is None:
            return
        if not together.switched:
            for name, (before, after) in together.ahead.items():
                await self._registrations.put_back(name, before, unless=after)
        live = self._registrations.base.live_ref()
        bases = {together.target, together.source, live.digest if live is not None else ""}
        for entry, source in together.end(drain_seconds=self._settings.drain_seconds):
            if not entry.registered:
                continue  # somebody decided about the name after the commit, which is not to be undone
            assigned = together.decisions.get(source.name)
            await self._registrations.came_with_base(source, bases=bases, assigned=assigned)
            if entry.registered:
                await self._changes.place_now(entry)
        self._registrations.base.touch()
        self._following.wake()

    def _change(self, change: AdapterChange, target: VersionRef) -> Together:
        live = self._registrations.base.live_ref()
        return Together(
            registry=self._registry,
            shelf=self._shelf,
            registered=self._registrations,
            assigned=self._assignments.source_for,
            decisions=self._assignments.decisions(),
            source=live.digest if live is not None else "",
            target=target.digest,
            sources=[asked(source, target) for source in change.sources],
            on_incompatible=change.on_incompatible,
        )

    async def stop(self) -> None:
        """End what goes on in the background."""
        await self._following.stop()
        await self._shelf.stop()

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

    def _layout_or_none(self) -> AdapterLayout | None:
        try:
            return self._host.adapters()
        except NotReady:
            return None

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
        self._check_name(request.source.name)
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

    async def resolve(self, request: ResolveAdaptersRequest) -> ResolvedAdapters:
        """Say what sources hold, and whether it could be served here; nothing is loaded.

        Of several none keeps the answer back for long: what takes its time is to be asked for by itself.
        """
        seconds, together = self._settings.load_seconds, len(request.sources) > 1
        bound = min(seconds, TOGETHER_SECONDS) if together else seconds
        return ResolvedAdapters(
            adapters=await asyncio.gather(*(self._resolve(source, bound) for source in request.sources))
        )

    async def _resolve(self, source: AdapterSource, seconds: float) -> ResolvedAdapter:
        found = ResolvedAdapter(name=source.name, uri=source.uri, base_digest=source.base_digest)
        try:
            self._check_name(source.name)
            content = (await self._within(source.name, self._reading(settled(source), "resolve"), seconds)).content
        except ModelswapError as error:
            return msgspec.structs.replace(found, error=error.body())
        return msgspec.structs.replace(found, digest=content.digest, rank=content.rank, bytes=content.nbytes)

    async def look(self, request: LookRequest) -> SourceLook:
        """Say whether an adapter's source still holds it; see :func:`reading.look`.

        Raises:
            ModelswapError: it cannot be told now.
        """
        ref, seconds = request.target, self._settings.load_seconds
        return await self._within(ref.version, look(self._opener, ref, known=request.known), seconds)

    def _check_order(self, fence: Fence, target: VersionRef) -> None:
        self._registrations.check_order(fence, target, assigned=self._assignments.decision(target.version))

    async def _open(self, source: OnTerms) -> Fitting:
        return await self._within(source.name, self._opening(source), self._settings.load_seconds)

    async def _read(self, source: OnTerms, operation_id: str) -> Read:
        return await self._within(source.name, self._reading(source, operation_id), self._settings.load_seconds)

    async def _reading(self, source: OnTerms, operation_id: str) -> Read:
        return await read(await self._opening(source), operation_id=operation_id)

    def _opening(self, source: OnTerms) -> Coroutine[Any, Any, Fitting]:
        return open_fitting(self._opener, source, self._host.adapters(), vouching=self._vouching)

    async def _within(self, name: str, work: Coroutine[Any, Any, T], seconds: float) -> T:
        try:
            return await within(self._clock, seconds, work)
        except TimeoutError:
            raise Unavailable(
                f"adapter {name} was not read within {seconds:g} s", advice="check its source, and the way there"
            ) from None

    def _check_name(self, name: str) -> None:
        if name == self._settings.served_model_name:
            raise BadRequest(f"{name} is the name of the base model", advice="give the adapter a name of its own")


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
