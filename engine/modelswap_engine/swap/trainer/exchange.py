"""The engine as a place that takes weights in and gives them out: bounded calls, and ranks that must agree."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, Final

from modelswap_engine.backends.transfer import ReceivedTensor, TransferOrder, TransferReply, Transfers
from modelswap_engine.protocol.errors import InsufficientMemory, Internal, UnsupportedChange, WorkerLost, from_body
from modelswap_engine.swap.clock import within
from modelswap_engine.swap.core import Core
from modelswap_engine.swap.engine import raise_first
from modelswap_engine.swap.settings import MIB
from modelswap_engine.swap.trainer.open_update import OpenUpdate

_SLACK_SECONDS: Final = 30.0


class Exchange:
    """Transfers of one engine.

    Args:
        core: the shared state.
        transfers: the engine's half; None when it has none.
    """

    def __init__(self, core: Core, *, transfers: Transfers | None) -> None:
        self._core = core
        self._transfers = transfers

    async def receive(
        self, order: TransferOrder, *, seconds: float, unless: asyncio.Future[None] | None = None
    ) -> tuple[ReceivedTensor, ...]:
        """Have every rank take tensors in, and return what all of them hold.

        Raises:
            Internal: the ranks have received different bytes.
            ModelswapError: see :meth:`carry_out`.
        """
        replies = await self.carry_out(order, seconds=seconds, unless=unless)
        if any(reply.received != replies[0].received for reply in replies):
            raise Internal("the ranks of this engine have received different tensors", advice="send them again")
        return replies[0].received

    async def carry_out(
        self, order: TransferOrder, *, seconds: float, unless: asyncio.Future[None] | None = None
    ) -> Sequence[TransferReply]:
        """Carry out an order on every rank; given up when ``unless`` says so.

        Raises:
            UnsupportedChange: this engine has no transfers.
            WorkerLost: a rank is gone, or did not answer in time.
            ModelswapError: what a rank says.
        """
        if self._transfers is None:
            raise UnsupportedChange("this engine takes no weights from outside", advice="swap to a version at a source")
        call: Coroutine[Any, Any, Sequence[TransferReply]] = self._transfers.transfer(order, timeout=seconds)
        try:
            replies = await within(self._core.clock, seconds + _SLACK_SECONDS, call, unless=unless)
        except TimeoutError:
            raise WorkerLost("the engine did not answer to a transfer", advice="it is restarted by itself") from None
        if not replies:
            raise WorkerLost("no rank answered to a transfer", advice="the engine restarts its workers by itself")
        raise_first([from_body(reply.error) for reply in replies if reply.error is not None])
        return replies

    async def make_room(self, update: OpenUpdate, size: int) -> None:
        """Refuse what the ranks cannot hold beside the live version; the retained one goes first.

        Each rank receives the whole of every tensor, of a model that is split too.

        Raises:
            InsufficientMemory: it does not fit.
        """
        core = self._core
        size *= core.engine.processes
        core.preempt()
        async with core.mutex:
            await core.refresh_memory()
            if core.memory.state.available_bytes < 0:
                return
            free = max(0, core.memory.state.available_bytes - core.settings.memory_reserve)
            usable = free + core.memory.state.previous_bytes
            if size > usable:
                raise InsufficientMemory(
                    f"receiving needs {size / MIB:.1f} MiB, {usable / MIB:.1f} MiB may be used",
                    advice="raise the container's memory limit or give the KV cache less",
                    details={"neededMiB": f"{size / MIB:.1f}", "availableMiB": f"{usable / MIB:.1f}"},
                )
            if size > free:
                core.previous = None
                await core.engine.release(f"room for {update.id}", previous=True)
