"""Where adapters physically are: brought into the engine's memory, put into slots, taken out, dropped.

The registry decides and records at once; the engine follows. One placement at a time, so that two never choose the same
slot; bringing adapters in and the requests of others wait for none.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

from modelswap_engine.backends.adapters import AdapterHost
from modelswap_engine.backends.port import Reply
from modelswap_engine.lora.entries import Entry
from modelswap_engine.lora.reading import Read
from modelswap_engine.lora.registry import Placement, Registry
from modelswap_engine.protocol.errors import ModelswapError, NotReady, SlotsBusy, from_body
from modelswap_engine.swap.clock import Clock, within

log: Final = logging.getLogger("modelswap.lora")


class Shelf:
    """The adapters of one engine.

    Args:
        host: the engine.
        registry: what is decided.
        clock: time.
        acquire_seconds: how long a request may wait for a slot.
    """

    def __init__(self, host: AdapterHost, registry: Registry, *, clock: Clock, acquire_seconds: float) -> None:
        self._host = host
        self._registry = registry
        self._clock = clock
        self._acquire_seconds = acquire_seconds
        self._placing = asyncio.Lock()
        self._names: dict[str, list[asyncio.Lock]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.loads = 0
        self.evictions = 0

    @asynccontextmanager
    async def name(self, name: str) -> AsyncIterator[None]:
        """Be the only one who brings in or drops contents of a name; nobody holds this while requests end."""
        turns = self._names.setdefault(name, [])
        lock = turns[0] if turns else asyncio.Lock()
        turns.append(lock)
        try:
            async with lock:
                yield
        finally:
            turns.pop()
            if not turns:
                del self._names[name]

    async def bring(self, read: Read) -> Entry:
        """Have the engine hold an adapter, claimed; the caller holds its name.

        Raises:
            ModelswapError: it cannot be had; no claim is left.
        """
        registry, content = self._registry, read.content
        new = registry.find(content.id) is None
        entry = registry.stage(content)
        losses = registry.losses
        try:
            if new or not entry.present:
                settled(await self._host.load_adapter(read.order))
                if registry.losses != losses:
                    raise NotReady("the engine lost its memory while the adapter was read", advice="load it again")
                registry.restored(entry)
                self.loads += 1
        except BaseException:
            registry.unstage(entry, content)
            self.sweep(entry)
            raise
        return entry

    async def ready(self, entry: Entry) -> None:
        """Return when an adapter that the caller has acquired is in a slot.

        Raises:
            NotReady: its bytes were lost and could not be read again.
            SlotsBusy: no slot became free in time.
            WorkerLost: the engine is gone.
        """
        if entry.slot is not None:
            return
        try:
            await within(self._clock, self._acquire_seconds, self._until_placed(entry))
        except TimeoutError:
            raise SlotsBusy(
                f"adapter {entry.content.name}: no slot became free within {self._acquire_seconds:g} s",
                advice="try again, or start the engine with more slots",
                details={"retryAfterSeconds": "1"},
            ) from None

    async def _until_placed(self, entry: Entry) -> None:
        while not await self.place(entry):
            await self._registry.changed()

    async def place(self, entry: Entry) -> bool:
        """Put an adapter into a slot if there is one for it now; says whether it is in one."""
        async with self._placing:
            if entry.slot is None:
                if not entry.present:
                    raise _lost(entry)
                placement = self._registry.placement(entry)
                if placement is None:
                    return False
                await self._put(entry, placement)
            return True

    async def _put(self, entry: Entry, placement: Placement) -> None:
        # Whoever is asked for from here on sees that it has no slot, and waits for its turn to get one.
        leaving = [other.slot for other in placement.evict]
        for other in placement.evict:
            self._registry.displace(other)
            self.evictions += 1
        for slot in leaving:
            if slot is not None and slot != placement.slot:
                settled(await self._host.clear_slot(slot))
        settled(await self._host.place_adapter(entry.id, placement.slot))
        self._registry.place(entry, placement.slot)

    def release(self, entry: Entry) -> None:
        """Give a reference back; the last one of a content that no name leads to takes it away."""
        self._registry.release(entry)
        self.sweep(entry)

    def sweep(self, entry: Entry) -> None:
        """Drop a content in the background when nobody can want it any more."""
        if entry.droppable:
            self._spawn(self._drop(entry))

    async def _drop(self, entry: Entry) -> None:
        async with self.name(entry.content.name):
            if not entry.droppable or self._registry.find(entry.id) is not entry:
                return
            try:
                if entry.present:
                    settled(await self._host.drop_adapter(entry.id))
            except ModelswapError as error:  # the engine is gone, and with it what it held
                log.warning("adapter %s: %s", entry.id, error.message)
            self._registry.forget(entry)

    async def drained(self, entry: Entry, seconds: float) -> bool:
        """Wait until a content is gone; when it takes too long, say so and leave the rest to its last request."""
        self.sweep(entry)
        try:
            await within(self._clock, seconds, self._gone(entry))
        except TimeoutError:
            self._registry.abandon(entry)
            return False
        return True

    def drain(self, entry: Entry, seconds: float) -> None:
        """Do :meth:`drained` in the background."""
        self._spawn(self._drained(entry, seconds))

    async def _drained(self, entry: Entry, seconds: float) -> None:
        if not await self.drained(entry, seconds):
            log.warning("adapter %s: %d requests still use it after %g s", entry.id, entry.references, seconds)

    async def _gone(self, entry: Entry) -> None:
        while self._registry.find(entry.id) is entry and not entry.registered:
            await self._registry.changed()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """End what goes on in the background."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def settled(replies: Sequence[Reply]) -> None:
    """Raise the first error of the ranks.

    Raises:
        ModelswapError: a rank did not do what it was asked.
    """
    for reply in replies:
        if reply.error is not None:
            raise from_body(reply.error)


def _lost(entry: Entry) -> NotReady:
    why = entry.error.message if entry.error is not None else "it is being read again"
    return NotReady(
        f"adapter {entry.content.name} is registered, but its bytes were lost with a worker: {why}",
        advice="try again, or load the adapter again",
        details={"retryAfterSeconds": "5"},
    )
