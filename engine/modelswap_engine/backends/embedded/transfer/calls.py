"""One rank's transfers: weights that come in or go out, one at a time in a thread of their own.

They wait for somebody outside (a trainer, another engine), so they must not stand in the way of control calls; each can
be called off. Like a rank, this answers and never raises.
"""

import queue
import threading
from collections.abc import Callable

from modelswap_engine.backends.embedded import wire
from modelswap_engine.backends.embedded.rank import Rank
from modelswap_engine.backends.embedded.transfer.rank_transfers import RankTransfers
from modelswap_engine.backends.transfer import TransferReply
from modelswap_engine.protocol.errors import ErrorBody
from modelswap_engine.weights.pace import Pace


class Transfers:
    """The queue of transfers.

    Args:
        rank: whose weights they are.
        transfers: carries them out.
        send: takes the answers.
        describe: turns an exception into its wire form.
    """

    def __init__(
        self,
        rank: Rank,
        transfers: RankTransfers,
        *,
        send: Callable[[wire.Event], None],
        describe: Callable[[Exception], ErrorBody],
    ) -> None:
        self._rank = rank
        self._transfers = transfers
        self._send = send
        self._describe = describe
        self._orders: queue.SimpleQueue[tuple[wire.TransferCall, Pace]] = queue.SimpleQueue()
        self._running: dict[int, Pace] = {}
        threading.Thread(target=self._run, name="transfer", daemon=True).start()

    def submit(self, call: wire.TransferCall) -> None:
        """Take an order; returns at once."""
        pace = self._running[call.call] = Pace()
        self._orders.put((call, pace))

    def cancel(self, number: int) -> None:
        """Call an order off, whether it runs or waits."""
        pace = self._running.get(number)
        if pace is not None:
            pace.cancel()

    def _run(self) -> None:
        while True:
            call, pace = self._orders.get()
            try:
                reply = self._transfers.carry_out(call.order, pace=pace)
            except Exception as error:  # noqa: BLE001  # a rank answers, whatever happens
                reply = TransferReply(rank=self._rank.number, boot_id=self._rank.boot_id, error=self._describe(error))
            del self._running[call.call]
            self._send(wire.TransferAnswer(call=call.call, reply=reply))
