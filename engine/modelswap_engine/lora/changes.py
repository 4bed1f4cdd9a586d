"""How content gets under a name, and away from it. Who may ask for that is not known here.

A change holds the lock of its own name while it is made, never while requests end.
"""

from collections.abc import Callable

import msgspec

from modelswap_engine.lora.entries import Entry
from modelswap_engine.lora.fit import check_base
from modelswap_engine.lora.reading import Reader
from modelswap_engine.lora.registrations import Registrations
from modelswap_engine.lora.registry import Registry
from modelswap_engine.lora.shelf import Shelf, log
from modelswap_engine.lora.terms import OnTerms
from modelswap_engine.protocol.adapters import AdapterSource
from modelswap_engine.protocol.errors import Busy, ModelswapError, NotReady
from modelswap_engine.protocol.messages import Fence, VersionRef

Entitled = Callable[[VersionRef], None]
"""Raises when the caller may not decide (any more) about the name that ``version`` says."""


class Changes:
    """The adapters of one engine, changed.

    Args:
        registry, shelf, registrations: of the desk.
        read: reads an adapter.
        sealed: says whether the base is being exchanged at this moment.

    Attributes:
        restoring: the base that is being loaded; it is live for adapters before it is for requests.
    """

    def __init__(
        self,
        *,
        registry: Registry,
        shelf: Shelf,
        registrations: Registrations,
        read: Reader,
        sealed: Callable[[], bool],
    ) -> None:
        self._registry = registry
        self._shelf = shelf
        self._registrations = registrations
        self._read = read
        self._sealed = sealed
        self.restoring: VersionRef | None = None

    @property
    def base(self) -> VersionRef | None:
        """The base that adapters are brought to."""
        return self.restoring or self._registrations.base.live_ref()

    @property
    def base_digest(self) -> str:
        """Its digest, "" while there is none."""
        return self.base.digest if self.base is not None else ""

    async def load(
        self, source: OnTerms, *, fence: Fence, operation_id: str, drain_seconds: float, entitled: Entitled
    ) -> Entry:
        """Let a name lead to the content of a source; return when it does.

        Raises:
            ModelswapError: it cannot; the name leads to what it led to.
        """
        target = VersionRef(version=source.name, uri=source.uri, digest=source.digest)
        async with self._shelf.name(source.name):
            entitled(target)
            self._require_base(source)
            brought = await self._read(source, operation_id)
            entry = await self._shelf.bring(brought)
            try:
                # Nothing is awaited between this and the name.
                entitled(target)
                self._require_base(source)
                if not entry.present:
                    raise NotReady("the engine lost its memory while the adapter was read", advice="load it again")
            except ModelswapError:
                self._registry.unstage(entry, brought.content)
                self._shelf.sweep(entry)
                raise
            former = self._registry.publish(entry, brought.content)
            pinned = msgspec.structs.replace(source, digest=brought.content.digest)
            await self._registrations.decided(fence, target, pinned, operation_id=operation_id)
        if former is not None:
            self._shelf.drain(former, drain_seconds)
        await self.place_now(entry)
        return entry

    async def unload(self, name: str, *, fence: Fence, operation_id: str, entitled: Entitled) -> Entry:
        """Let a name lead nowhere from now on; return what it led to, which is still to drain.

        Raises:
            AdapterNotFound: it leads nowhere already.
        """
        target = VersionRef(version=name)
        async with self._shelf.name(name):
            entitled(target)
            entry = self._registry.withdraw(name)
            await self._registrations.decided(fence, target, None, operation_id=operation_id)
        return entry

    async def forget(self, name: str, *, fence: Fence, operation_id: str) -> None:
        """Remember that a name is nobody's; what it leads to, if anything, is not touched."""
        await self._registrations.decided(fence, VersionRef(version=name), None, operation_id=operation_id)

    async def place_now(self, entry: Entry) -> None:
        """Spare the first request the wait for a slot; without a free one it comes when it is asked for."""
        try:
            await self._shelf.place(entry)
        except ModelswapError as error:
            log.warning("adapter %s is not in a slot yet: %s", entry.id, error.message)

    def _require_base(self, source: AdapterSource) -> None:
        digest = self.base_digest
        if not digest:
            raise NotReady("no base is live yet", advice="try again when the engine is ready")
        check_base(source.name, source.base_digest, digest)
        if source.base_digest and self._sealed():
            raise Busy("the base is being changed", advice="try again when the swap has ended")
