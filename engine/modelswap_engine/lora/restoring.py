"""Bringing adapters back after a whole base was loaded: at start, and when a worker was lost.

Each adapter stands for itself: one that cannot be read again keeps its name, with the reason, and the base serves.
"""

from collections.abc import Iterable

from modelswap_engine.lora.entries import Content, Entry
from modelswap_engine.lora.reading import Reader
from modelswap_engine.lora.registry import Registry
from modelswap_engine.lora.shelf import Shelf, log
from modelswap_engine.protocol.adapters import AdapterSource, adapter_id
from modelswap_engine.protocol.errors import ErrorBody, ModelswapError
from modelswap_engine.swap.records import Registered


class Restoring:
    """One restoration.

    Args:
        registry: what there is.
        shelf: where it is.
        read: reads an adapter again.
    """

    def __init__(self, registry: Registry, shelf: Shelf, *, read: Reader) -> None:
        self._registry = registry
        self._shelf = shelf
        self._read = read

    async def run(self, base_digest: str, registered: Iterable[Registered]) -> None:
        """Bring back what belongs to the base, the pinned ones first into their slots."""
        registry = self._registry
        registry.lost()
        for entry in registry.entries():
            self._shelf.sweep(entry)
        wanted = [item.source_for(base_digest) for item in registered]
        served = {source.name for source in wanted if source is not None}
        for entry in registry.registered():
            if entry.content.name not in served:
                self._shelf.sweep(registry.withdraw(entry.content.name))
        for source in wanted:
            if source is not None:
                await self._bring_back(source)
        for entry in sorted(registry.registered(), key=lambda entry: (not entry.pinned, -entry.used)):
            if entry.present and not await self._place(entry):
                break

    async def _bring_back(self, source: AdapterSource) -> None:
        async with self._shelf.name(source.name):
            try:
                brought = await self._read(source, "restore")
                entry = await self._shelf.bring(brought)
            except ModelswapError as error:
                self._failed(source, error.body())
            else:
                self._publish(entry, brought.content)

    def _publish(self, entry: Entry, content: Content) -> None:
        former = self._registry.publish(entry, content)
        if former is not None:
            self._shelf.sweep(former)

    def _failed(self, source: AdapterSource, error: ErrorBody) -> None:
        log.warning("adapter %s could not be brought back: %s", source.name, error.message)
        entry = self._registry.find(adapter_id(source.name, source.digest))
        if entry is None or not entry.registered:
            unknown = _unknown(source)
            entry = self._registry.stage(unknown)
            self._publish(entry, unknown)
        self._registry.restored(entry, error=error)

    async def _place(self, entry: Entry) -> bool:
        try:
            return await self._shelf.place(entry)
        except ModelswapError as error:
            log.warning("adapter %s is not in a slot yet: %s", entry.id, error.message)
            return False


def _unknown(source: AdapterSource) -> Content:
    """Return a content of which only the name and the digest are known."""
    return Content(
        name=source.name,
        digest=source.digest,
        uri=source.uri,
        base_digest=source.base_digest,
        rank=0,
        nbytes=0,
        pinned=False,
    )
