"""Adapters as callers see them: loaded, unloaded and listed by the control port, used by requests.

Changes take the lock of their own name and nothing else. They never wait for requests of others, requests never wait
for them, and a request that names an adapter that is not there is told so: nothing answers in its place.
"""

from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from modelswap_engine.backends.adapters import AdapterHost, AdapterLayout
from modelswap_engine.lora.entries import Entry
from modelswap_engine.lora.fit import check_base
from modelswap_engine.lora.reading import Opener, Read, open_fitting, read
from modelswap_engine.lora.registry import Registry
from modelswap_engine.lora.restoring import Restoring
from modelswap_engine.lora.settings import LoraSettings
from modelswap_engine.lora.shelf import Shelf, log
from modelswap_engine.protocol.adapter_calls import LoadAdapterRequest, UnloadAdapterRequest
from modelswap_engine.protocol.adapters import AdapterRegistry, AdapterSource, AdapterState, AdapterStatus
from modelswap_engine.protocol.errors import (
    BadRequest,
    ModelswapError,
    NotReady,
    StaleRevision,
    Unavailable,
)
from modelswap_engine.protocol.messages import Fence, VersionRef
from modelswap_engine.swap import fence as fences
from modelswap_engine.swap.clock import Clock, within
from modelswap_engine.swap.companion import Base
from modelswap_engine.swap.records import Registered


class AdapterDesk:
    """The adapters of one engine process; also the :class:`~modelswap_engine.swap.companion.Companion` of its base.

    Args:
        host: the engine.
        opener: finds adapters by URI.
        clock: time.
        settings: bounds.
    """

    def __init__(self, *, host: AdapterHost, opener: Opener, clock: Clock, settings: LoraSettings) -> None:
        self._host = host
        self._opener = opener
        self._clock = clock
        self._settings = settings
        self._registry = Registry(settings.limits, now=clock.monotonic)
        self._shelf = Shelf(host, self._registry, clock=clock, acquire_seconds=settings.acquire_seconds)
        self._registered: dict[str, Registered] = {}
        self._base: Base | None = None

    # Companion of the base.

    def attach(self, base: Base) -> None:
        """Learn which base this is, and what the journal remembers."""
        self._base = base
        self._registered = dict(base.registrations)

    async def restore(self, digest: str) -> None:
        """Bring back what belongs to a base that was loaded as a whole."""
        restoring = Restoring(self._registry, self._shelf, read=self._read, clock=self._clock, settings=self._settings)
        await restoring.run(digest, self._registered.values())
        self._live.touch()

    async def stop(self) -> None:
        """End what goes on in the background."""
        await self._shelf.stop()

    @property
    def _live(self) -> Base:
        if self._base is None:
            raise NotReady("the engine is starting", details={"retryAfterSeconds": "1"})
        return self._base

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
        """Return all contents, those that names lead to first."""
        now = self._clock.monotonic()
        entries = sorted(self._registry.entries(), key=lambda entry: (not entry.registered, entry.id))
        return tuple(self._status(entry, now=now) for entry in entries)

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
        limits, registry, layout = self._settings.limits, self._registry, self._layout_or_none()
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
        )

    def _status(self, entry: Entry, *, now: float) -> AdapterStatus:
        status = entry.status(now=now)
        known = self._registered.get(entry.content.name)
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
        source = request.source
        target = VersionRef(version=source.name, uri=source.uri, digest=source.digest)
        self._check_call(request.fence, if_match)
        if source.name == self._settings.served_model_name:
            raise BadRequest(
                f"{source.name} is the name of the base model", advice="give the adapter a name of its own"
            )
        async with self._shelf.name(source.name):
            self._check_order(request.fence, source.name, target)
            self._require_base(source)
            brought = await self._within(source.name, self._read(source, operation_id=request.operation_id))
            entry = await self._shelf.bring(brought)
            try:
                # Nothing is awaited between this and the name.
                self._require_base(source)
                if not entry.present:
                    raise NotReady("the engine lost its memory while the adapter was read", advice="load it again")
            except ModelswapError:
                self._registry.unstage(entry, brought.content)
                self._shelf.sweep(entry)
                raise
            former = self._registry.publish(entry, brought.content)
            await self._decided(request.fence, request.operation_id, target, _sources(brought, source))
        if former is not None:
            self._shelf.drain(former, request.drain_timeout_seconds)
        await self._place_now(entry)
        return self._status(entry, now=self._clock.monotonic())

    async def _read(self, source: AdapterSource, *, operation_id: str) -> Read:
        fitting = await open_fitting(self._opener, source, self._host.adapters())
        return await read(fitting, operation_id=operation_id)

    async def _within(self, name: str, work: Coroutine[Any, Any, Read]) -> Read:
        seconds = self._settings.load_seconds
        try:
            return await within(self._clock, seconds, work)
        except TimeoutError:
            raise Unavailable(
                f"adapter {name} was not read within {seconds:g} s", advice="check the volume of its source"
            ) from None

    async def _place_now(self, entry: Entry) -> None:
        """Spare the first request the wait for a slot; without a free one it comes when it is asked for."""
        try:
            await self._shelf.place(entry)
        except ModelswapError as error:
            log.warning("adapter %s is not in a slot yet: %s", entry.id, error.message)

    async def unload(self, name: str, request: UnloadAdapterRequest, *, if_match: str | None = None) -> AdapterStatus:
        """Let a name lead nowhere from now on, and wait for its last request; it may take longer than that.

        Raises:
            AdapterNotFound: it leads nowhere already.
            Fenced: the caller is not entitled, or decided on another state.
        """
        self._check_call(request.fence, if_match)
        async with self._shelf.name(name):
            self._check_order(request.fence, name, VersionRef(version=name))
            entry = self._registry.withdraw(name)
            await self._decided(request.fence, request.operation_id, VersionRef(version=name), ())
        gone = await self._shelf.drained(entry, request.drain_timeout_seconds)
        self._live.touch()
        status = entry.status(now=self._clock.monotonic())
        return msgspec.structs.replace(status, state=AdapterState.UNLOADED, slot=-1) if gone else status

    async def _decided(
        self, fence: Fence, operation_id: str, target: VersionRef, sources: tuple[AdapterSource, ...]
    ) -> None:
        """Remember a decision about a name."""
        known = self._registered.get(target.version)
        accepted = fences.accept(
            fence, known.accepted if known is not None else None, operation_id=operation_id, target=target
        )
        if not sources:
            accepted = msgspec.structs.replace(accepted, released=True)  # the name belongs to nobody any more
        bound = () if known is None or not sources or not sources[0].base_digest else known.sources
        others = tuple(source for source in bound if source.base_digest != sources[0].base_digest)
        record = Registered(name=target.version, accepted=accepted, sources=(*sources, *others))
        self._registered[target.version] = record
        self._live.touch()
        await self._live.record_owed(record)

    def _check_call(self, fence: Fence, if_match: str | None) -> None:
        base = self._live
        fences.check_pod(fence, self._settings.pod_uid)
        fences.check_match(if_match, base.etag)
        if base.stopping:
            raise NotReady("the engine is stopping", advice="try another replica")
        if fence.owner_uid != fences.CLI and fence.epoch < base.epoch:
            raise StaleRevision(
                f"epoch {fence.epoch} is that of an old leader; the last one obeyed here has {base.epoch}",
                advice="a new leader has taken over; leave it to that one",
                details={"epoch": str(base.epoch)},
            )

    def _check_order(self, fence: Fence, name: str, target: VersionRef) -> None:
        known = self._registered.get(name)
        fences.check_order(fence, known.accepted if known is not None else None, target=target)

    def _require_base(self, source: AdapterSource) -> str:
        live = self._live.live_ref()
        if live is None:
            raise NotReady("no base is live yet", advice="try again when the engine is ready")
        check_base(source.name, source.base_digest, live.digest)
        return live.digest


def _sources(brought: Read, source: AdapterSource) -> tuple[AdapterSource, ...]:
    return (msgspec.structs.replace(source, digest=brought.content.digest),)
