"""Bringing adapters back after a whole base was loaded: at start, and when a worker was lost.

Each adapter stands for itself: one that cannot be read again keeps its name, with the reason, and the base serves.
Sources that hang hold the base up for one bound, however many they are.
"""

import asyncio
from collections.abc import Iterable
from typing import Final

from modelswap_engine.lora.entries import Content, Entry
from modelswap_engine.lora.reading import Reader, defect
from modelswap_engine.lora.registry import Registry
from modelswap_engine.lora.shelf import Shelf, log
from modelswap_engine.lora.terms import settled
from modelswap_engine.protocol.adapters import AdapterSource, adapter_id
from modelswap_engine.protocol.errors import ErrorBody, ModelswapError, Unavailable
from modelswap_engine.swap.clock import Clock, within
from modelswap_engine.swap.records import Registered

AT_ONCE: Final = 16
"""How many adapters are read at the same time."""


class Restoring:
    """One restoration.

    Args:
        registry: what there is.
        shelf: where it is.
        read: reads an adapter again.
        clock: time.
    """

    def __init__(self, registry: Registry, shelf: Shelf, *, read: Reader, clock: Clock) -> None:
        self._registry = registry
        self._shelf = shelf
        self._read = read
        self._clock = clock
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def run(self, base_digest: str, registered: Iterable[Registered], *, seconds: float) -> None:
        """Bring back what belongs to the base and can be read in time, the pinned ones first into their slots."""
        until = self._clock.monotonic() + seconds
        registry = self._registry
        registry.lost()
        for entry in registry.entries():
            self._shelf.sweep(entry)
        wanted = [item.source_for(base_digest) for item in registered]
        served = {source.name for source in wanted if source is not None}
        for entry in registry.registered():
            if entry.content.name not in served:
                self._shelf.sweep(registry.withdraw(entry.content.name))
        await asyncio.gather(*(self._bring_back(source, until) for source in wanted if source is not None))
        for entry in sorted(registry.registered(), key=lambda entry: (not entry.pinned, -entry.used)):
            if entry.present and not await self._place(entry):
                break

    async def _bring_back(self, source: AdapterSource, until: float) -> None:
        async with self._turns, self._shelf.name(source.name):
            try:
                brought = await within(
                    self._clock, max(0.0, until - self._clock.monotonic()), self._read(settled(source), "restore")
                )
                entry = await self._shelf.bring(brought)
            except TimeoutError:
                late = Unavailable(
                    f"adapter {source.name} was not read before the base had to serve",
                    advice="check the volume of its source; what is assigned is tried again, else load it again",
                )
                self._failed(source, late.body())
            except ModelswapError as error:
                self._failed(source, error.body())
            except Exception as error:  # noqa: BLE001 - a defect of ours; the base serves all the same
                log.exception("adapter %s", source.name)
                self._failed(source, defect(source.name, error).body())
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
