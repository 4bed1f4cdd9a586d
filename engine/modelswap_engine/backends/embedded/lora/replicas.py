"""Adapters on all replicas: each change reaches those that serve, and one that was started anew gets what they have.

What a replica cannot get (its source is gone) keeps it from nothing else: requests for that adapter go to the others.
Knows no registry: what is to be loaded and where it is placed was decided before.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, Protocol, TypeVar

from modelswap_engine.backends.adapters import LoadAdapter
from modelswap_engine.backends.embedded import wire
from modelswap_engine.backends.embedded.group import WorkerGroup
from modelswap_engine.backends.embedded.process import CallOff
from modelswap_engine.backends.port import Reply
from modelswap_engine.protocol.errors import ModelswapError, SourceUnreadable, WorkerLost

_log: Final = logging.getLogger("modelswap.lora")

K = TypeVar("K")
V = TypeVar("V")
_Build = Callable[[int], wire.Order]


class Ask(Protocol):
    """Asks every rank of some replicas, and returns their replies."""

    async def __call__(
        self,
        build: _Build,
        what: str,
        *,
        timeout: float | None = None,
        call_off: CallOff | None = None,
        groups: Sequence[WorkerGroup] | None = None,
    ) -> list[Reply]:
        """Raise WorkerLost where one of these ranks is gone."""


class ReplicatedAdapters:
    """The adapters of one engine.

    Args:
        groups: its replicas.
        ask: reaches them.
        load_seconds: how long loading one may take.
    """

    def __init__(self, groups: Sequence[WorkerGroup], *, ask: Ask, load_seconds: float) -> None:
        self._groups = groups
        self._ask = ask
        self._load_seconds = load_seconds
        self._orders: dict[str, LoadAdapter] = {}
        self._slots: dict[int, str] = {}

    def forget(self) -> None:
        """Every replica is loaded anew, and holds nothing."""
        self._orders.clear()
        self._slots.clear()

    async def load(self, order: LoadAdapter) -> list[Reply]:
        """Have every replica that serves hold an adapter, or none of them."""
        known = self._orders.get(order.adapter_id)
        self._orders[order.adapter_id] = order  # before the first wait: whoever is caught up meanwhile gets it, too
        try:
            replies = await self._all(lambda group: self._load(group, order), self._serving())
        except BaseException:
            _put_back(self._orders, order.adapter_id, known)
            raise
        if not _done(replies):
            _put_back(self._orders, order.adapter_id, known)
            holding = [group for group in self._serving() if order.adapter_id in group.adapters]
            if known is None and holding:
                await self._all(lambda group: self._drop(group, order.adapter_id), holding)
        return replies

    async def place(self, adapter_id: str, slot: int) -> list[Reply]:
        """Put a loaded adapter into a slot of every replica that holds it; the slot of any other is emptied."""
        before = self._slots.get(slot)
        self._slots[slot] = adapter_id
        serving = self._serving()
        holding = [group for group in serving if adapter_id in group.adapters]
        try:
            replies = await self._all(lambda group: self._place(group, adapter_id, slot), holding or serving)
        except BaseException:
            _put_back(self._slots, slot, before)
            raise
        if not _done(replies):
            _put_back(self._slots, slot, before)
            return replies
        without = [group for group in serving if group not in holding and slot in group.slots]
        if holding and without:
            await self._all(lambda group: self._clear(group, slot), without)
        return replies

    async def clear_slot(self, slot: int) -> list[Reply]:
        """Empty a slot."""
        self._slots.pop(slot, None)
        return await self._all(lambda group: self._clear(group, slot), self._serving())

    async def drop(self, adapter_id: str) -> list[Reply]:
        """Forget an adapter, in its slot too."""
        self._orders.pop(adapter_id, None)
        for slot in [slot for slot, held in self._slots.items() if held == adapter_id]:
            del self._slots[slot]
        return await self._all(lambda group: self._drop(group, adapter_id), self._serving())

    async def catch_up(self, group: WorkerGroup) -> None:
        """Bring a replica that was loaded anew to what the others have; nothing is awaited after the last look.

        Raises:
            WorkerLost: it is gone again.
        """
        failed: set[tuple[str, int | None]] = set()
        while (step := self._next(group, failed)) is not None:
            adapter_id, slot = step
            order = self._orders.get(adapter_id)
            try:
                if slot is not None:
                    replies = await (self._place(group, adapter_id, slot) if adapter_id else self._clear(group, slot))
                else:
                    replies = await (self._load(group, order) if order else self._drop(group, adapter_id))
            except WorkerLost:
                raise
            except ModelswapError as error:
                message = error.message
            else:
                message = next((reply.error.message for reply in replies if reply.error is not None), "")
            if message:
                failed.add(step)
                _log.warning("replica %d does without adapter %s: %s", group.replica, adapter_id, message)

    def _next(self, group: WorkerGroup, failed: set[tuple[str, int | None]]) -> tuple[str, int | None] | None:
        """Return what a replica lacks or has too much: an adapter, or one in a slot ("" for nothing in it)."""
        steps: list[tuple[str, int | None]] = [(name, None) for name in self._orders.keys() ^ group.adapters]
        for slot in self._slots.keys() | group.slots.keys():
            wanted = self._slots.get(slot, "")
            if group.slots.get(slot, "") != wanted and (not wanted or wanted in group.adapters):
                steps.append((wanted, slot))
        return next((step for step in steps if step not in failed), None)

    def _serving(self) -> list[WorkerGroup]:
        """Return the replicas that serve; all of them where none does, whose answer then says why."""
        return [group for group in self._groups if group.serving and group.alive] or list(self._groups)

    async def _all(
        self, act: Callable[[WorkerGroup], Coroutine[Any, Any, list[Reply]]], groups: Sequence[WorkerGroup]
    ) -> list[Reply]:
        """Do the same on several replicas; the loss of some is no failure while others answer."""
        outcomes = await asyncio.gather(*map(act, groups), return_exceptions=True)
        replies = [reply for outcome in outcomes if isinstance(outcome, list) for reply in outcome]
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        for error in errors:
            if not (isinstance(error, WorkerLost) and replies):
                raise error
        return replies

    async def _load(self, group: WorkerGroup, order: LoadAdapter) -> list[Reply]:
        replies = await self._ask(
            lambda call: wire.LoadAdapterCall(call=call, order=order),
            "loading an adapter",
            timeout=self._load_seconds,
            call_off=CallOff(
                order=lambda call: wire.CancelAdapter(call=call),
                error=SourceUnreadable,
                advice="the source hangs or is slow; check its volume",
            ),
            groups=[group],
        )
        if _done(replies):
            group.adapters.add(order.adapter_id)
        return replies

    async def _place(self, group: WorkerGroup, adapter_id: str, slot: int) -> list[Reply]:
        replies = await self._ask(
            lambda call: wire.PlaceAdapterCall(call=call, adapter_id=adapter_id, slot=slot),
            "placing an adapter",
            groups=[group],
        )
        if _done(replies):
            group.slots[slot] = adapter_id
        return replies

    async def _clear(self, group: WorkerGroup, slot: int) -> list[Reply]:
        group.slots.pop(slot, None)
        return await self._ask(lambda call: wire.ClearSlotCall(call=call, slot=slot), "emptying a slot", groups=[group])

    async def _drop(self, group: WorkerGroup, adapter_id: str) -> list[Reply]:
        group.adapters.discard(adapter_id)
        for slot in [slot for slot, held in group.slots.items() if held == adapter_id]:
            del group.slots[slot]
        return await self._ask(
            lambda call: wire.DropAdapterCall(call=call, adapter_id=adapter_id), "dropping an adapter", groups=[group]
        )


def _put_back(values: dict[K, V], key: K, before: V | None) -> None:
    if before is None:
        values.pop(key, None)
    else:
        values[key] = before


def _done(replies: Sequence[Reply]) -> bool:
    return all(reply.error is None for reply in replies)
