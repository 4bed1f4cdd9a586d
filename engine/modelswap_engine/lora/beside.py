"""Adapters beside their base: restored with it, judged, staged and exchanged when it changes.

This is the :class:`~modelswap_engine.swap.companion.Companion` that a swap knows. Requests, and changes of single
adapters, are the desk's.
"""

from modelswap_engine.backends.adapters import AdapterHost, AdapterLayout
from modelswap_engine.lora.assignments import Assignments
from modelswap_engine.lora.changes import Changes
from modelswap_engine.lora.following import Following
from modelswap_engine.lora.reader import Reader
from modelswap_engine.lora.reading import Opener
from modelswap_engine.lora.registrations import Registrations
from modelswap_engine.lora.registry import Registry
from modelswap_engine.lora.restoring import Restoring
from modelswap_engine.lora.settings import LoraSettings
from modelswap_engine.lora.shelf import Shelf
from modelswap_engine.lora.terms import asked
from modelswap_engine.lora.together import Together
from modelswap_engine.lora.vouching import Vouching
from modelswap_engine.protocol.adapters import AdapterChange
from modelswap_engine.protocol.errors import NotReady, Refused
from modelswap_engine.protocol.messages import VersionRef
from modelswap_engine.swap.clock import Clock
from modelswap_engine.swap.companion import Base, Effect


class BesideBase:
    """The half of :class:`~modelswap_engine.lora.desk.AdapterDesk` that is about the base.

    Args:
        host: the engine.
        opener: finds adapters by URI.
        clock: time.
        settings: bounds.
        vouching: who must vouch for adapters; by itself nobody.

    Attributes:
        reader: says what is at sources; it changes nothing.
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
        self.reader = Reader(host=host, opener=opener, vouching=vouching or Vouching(), clock=clock, settings=settings)
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
            read=self.reader.read,
            sealed=lambda: self._together is not None and self._together.sealed,
        )
        self._following = Following(
            assignments=self._assignments,
            changes=self._changes,
            registry=self._registry,
            shelf=self._shelf,
            registrations=self._registrations,
            check_name=self.reader.check_name,
            clock=clock,
            pod_uid=settings.pod_uid,
        )

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
        restoring = Restoring(self._registry, self._shelf, read=self.reader.read, clock=self._clock)
        await restoring.run(
            base.digest, list(self._registrations.values()), seconds=seconds / 2
        )  # the rest is for new ones
        await self._following.bring_all(max(0.0, seconds - (self._clock.monotonic() - began)))
        self._registrations.base.touch()

    async def assess(self, change: AdapterChange, *, target: VersionRef) -> Effect:
        """Say what a change of the base to ``target`` would do to the adapters."""
        for source in change.sources:
            self.reader.check_name(source.name)
        try:
            together = self._change(change, target)
        except Refused as error:
            return Effect(refusals=(error,))
        return await together.assess(self.reader.open)

    async def adopt(self, change: AdapterChange, *, target: VersionRef) -> None:
        """Register what is asked for, to be restored with the base that is about to be loaded."""
        for source in change.sources:
            self.reader.check_name(source.name)
            bases = {other.base_digest for other in change.sources}
            assigned = self._assignments.decision(source.name)
            await self._registrations.came_with_base(asked(source, target), bases=bases, assigned=assigned)

    async def stage(self, operation_id: str, change: AdapterChange, *, target: VersionRef) -> None:
        """Bring what belongs to the new base into the engine's memory."""
        self._together = self._change(change, target)
        await self._together.stage(self.reader.read, operation_id)
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

    def _layout_or_none(self) -> AdapterLayout | None:
        try:
            return self._host.adapters()
        except NotReady:
            return None
