"""Whole versions into replicas: into all of them, or into those alone that were lost while the others serve on.

What is served is decided elsewhere; here a replica holds a version proven, or it serves nobody.
"""

import asyncio
import contextlib
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from modelswap_engine.backends.embedded import wire
from modelswap_engine.backends.embedded.group import WorkerGroup
from modelswap_engine.backends.embedded.lora.replicas import ReplicatedAdapters
from modelswap_engine.backends.embedded.process import CallOff
from modelswap_engine.backends.embedded.replicas import Replicas
from modelswap_engine.backends.embedded.settings import EmbeddedSettings
from modelswap_engine.backends.embedded.transfer.orders import TransferOrders
from modelswap_engine.backends.embedded.transfer.shared_memory import shared_memory
from modelswap_engine.backends.port import Load, Reply, TensorRange
from modelswap_engine.backends.transfer import FillMemory
from modelswap_engine.protocol.errors import PeerFailed, SourceNotFound, SourceUnreadable, from_body


class Loads:
    """Loads, and bringing back to rest what a failed operation left in different states.

    Args:
        replicas: whom it loads into.
        adapters: given to a replica that was loaded while others have them.
        transfers: by which a replica gives its weights to another.
        settings: bounds.

    Attributes:
        facts: what the model is that was loaded last, None while none is.
    """

    def __init__(
        self, replicas: Replicas, *, adapters: ReplicatedAdapters, transfers: TransferOrders, settings: EmbeddedSettings
    ) -> None:
        self._replicas = replicas
        self._adapters = adapters
        self._transfers = transfers
        self._settings = settings
        self.facts: wire.ModelFacts | None = None

    async def load(self, order: Load) -> list[Reply]:
        """See :meth:`modelswap_engine.backends.embedded.backend.EmbeddedBackend.load`."""
        kept = [group for group in self._replicas if order.keep_proven and self._replicas.holds(group, order.digest)]
        groups = [group for group in self._replicas if group not in kept]
        with contextlib.ExitStack() as memory:
            tensors = await self._brought(order.tensors, kept, memory)
            replies = await self._load(replace(order, tensors=tensors), groups, kept)
        return [*replies, *_held(kept, order)]

    async def _brought(
        self, tensors: tuple[TensorRange, ...], kept: Sequence[WorkerGroup], memory: contextlib.ExitStack
    ) -> tuple[TensorRange, ...]:
        """Return tensors with a place for each: those that only an engine has are written into memory by a replica."""
        absent = tuple(item for item in tensors if not item.path)
        if not absent:
            return tensors
        if not kept:
            raise SourceNotFound(
                f"tensor {absent[0].name} (and {len(absent) - 1} more) was sent to the engine, and is in no replica's "
                "memory any more",
                advice="send the weights again, or load a version at a source",
            )
        placed = memory.enter_context(shared_memory(absent))
        replies = await self._transfers.ask(FillMemory(tensors=placed), kept[:1], timeout=self._settings.load_timeout)
        errors = [from_body(reply.error) for reply in replies if reply.error is not None]
        if errors:
            raise next((error for error in errors if not isinstance(error, PeerFailed)), errors[0])
        by_name = {item.name: item for item in placed}
        return tuple(by_name.get(item.name, item) for item in tensors)

    async def _load(self, order: Load, groups: Sequence[WorkerGroup], kept: Sequence[WorkerGroup]) -> list[Reply]:
        self._replicas.doubt(groups)
        for group in groups:
            group.serving = False
            group.forget_adapters()
        if not kept:
            self.facts = None
            self._adapters.forget()
        await self._replicas.start(group for group in groups if not group.alive)
        answers = await self._replicas.ask(
            lambda call: wire.LoadCall(call=call, order=order),
            wire.Answer,
            timeout=self._settings.load_timeout,
            what="loading",
            call_off=CallOff(
                order=lambda call: wire.CancelCall(call=call),
                error=SourceUnreadable,
                advice="the source hangs or is slow; check its volume, or allow more time (load_timeout)",
                expendable=True,  # what loads serves nobody
            ),
            groups=groups,
        )
        replies = self._replicas.note([answer.reply for answer in answers])
        if all(answer.reply.error is None for answer in answers):
            self.facts = answers[0].facts if answers else self.facts
            for group in groups:
                await self._adapters.catch_up(group)
                group.serving = group.alive
        return replies

    async def settle(self, operation_id: str, digest: str) -> list[Reply]:
        """Bring what lives back to a version that it holds; replicas that cannot are ended, and answer nothing."""
        settled = await asyncio.gather(*(self._settle(group, operation_id, digest) for group in self._replicas))
        return [reply for replies in settled for reply in replies]

    async def _settle(self, group: WorkerGroup, operation_id: str, digest: str) -> list[Reply]:
        if not group.alive or not group.serving:
            return []
        outcomes = await group.ask(
            lambda call: wire.SettleCall(call=call, operation_id=operation_id),
            timeout=self._settings.call_timeout,
            what="coming to rest",
        )
        replies = [outcome.reply for outcome in outcomes if isinstance(outcome, wire.Answer)]
        if len(replies) == len(outcomes) and all(r.error is None and r.digest == digest for r in replies):
            return self._replicas.note(replies)
        if len(outcomes) > 1:
            group.kill("its ranks could not be brought back to one version")
        group.serving = False
        return []


def _held(groups: Iterable[WorkerGroup], order: Load) -> list[Reply]:
    return [
        Reply(operation_id=order.operation_id, rank=worker.rank, boot_id=worker.boot_id, digest=order.digest, kept=True)
        for group in groups
        for worker in group.workers
    ]
