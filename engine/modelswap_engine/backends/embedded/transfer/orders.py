"""Transfers of weights as the front has ranks make them: who is asked, and how one that hangs is called off."""

from collections.abc import Sequence

from modelswap_engine.backends.embedded import wire
from modelswap_engine.backends.embedded.group import WorkerGroup
from modelswap_engine.backends.embedded.process import CallOff
from modelswap_engine.backends.embedded.replicas import Replicas
from modelswap_engine.backends.transfer import (
    FillMemory,
    ReadTensor,
    SendBroadcast,
    TransferOrder,
    TransferReply,
    WriteFile,
)
from modelswap_engine.protocol.errors import Cancelled


class TransferOrders:
    """Weights in and out of the ranks of an engine."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas

    async def make(self, order: TransferOrder, *, timeout: float) -> list[TransferReply]:
        """Take weights in on every rank, or have one replica give them out, within so many seconds."""
        return await self.ask(order, self._concerned(order), timeout=timeout)

    def _concerned(self, order: TransferOrder) -> Sequence[WorkerGroup]:
        match order:
            case SendBroadcast():
                return self._replicas.groups[:1]  # whose first rank is in the group
            case WriteFile() | ReadTensor() | FillMemory():
                return self._replicas.serving()[:1] or self._replicas.groups[:1]
            case _:
                return self._replicas.groups

    async def ask(self, order: TransferOrder, groups: Sequence[WorkerGroup], *, timeout: float) -> list[TransferReply]:
        """Have the ranks of some replicas do it."""
        answers = await self._replicas.ask(
            lambda call: wire.TransferCall(call=call, order=order),
            wire.TransferAnswer,
            timeout=timeout,
            what="transferring weights",
            call_off=CallOff(
                order=lambda call: wire.CancelTransfer(call=call),
                error=Cancelled,
                advice="look whether the sender still runs, or allow more time",
            ),
            groups=groups,
        )
        return [answer.reply for answer in answers]
