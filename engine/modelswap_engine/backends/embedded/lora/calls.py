"""The calls about adapters inside the worker: each answers, none waits for a swap, a hash or another adapter's source.

Slots change at once. Reading happens in a thread for each adapter, which gives way to decoding; a source that hangs
keeps its thread and nothing else.
"""

import threading
from collections.abc import Callable
from typing import Final

from modelswap_engine.backends.embedded import wire
from modelswap_engine.backends.embedded.rank import Rank
from modelswap_engine.backends.port import Reply
from modelswap_engine.protocol.errors import Busy, ErrorBody
from modelswap_engine.weights.pace import Pace, lower_priority

MOST_AT_ONCE: Final = 8


class AdapterCalls:
    """Runs the calls.

    Args:
        rank: does what they ask.
        send: takes the answers, from any thread.
        error_body: makes of an exception what travels.
    """

    def __init__(
        self,
        rank: Rank,
        *,
        send: Callable[[wire.Event], None],
        error_body: Callable[[Exception], ErrorBody],
    ) -> None:
        self._rank = rank
        self._send = send
        self._error_body = error_body
        self._reading: dict[int, Pace] = {}

    def take(self, order: wire.AdapterCall) -> None:
        """Take one call; returns at once."""
        if not isinstance(order, wire.LoadAdapterCall):
            self._answer(order, self._act(order))
        elif len(self._reading) >= MOST_AT_ONCE:
            busy = Busy(f"{len(self._reading)} adapters are being read already", advice="try again shortly")
            self._answer(order, lambda: _raise(busy))
        else:
            pace = self._reading[order.call] = self._rank.background()
            threading.Thread(target=self._read, args=(order, pace), name="adapter", daemon=True).start()

    def cancel(self, call: int) -> None:
        """Stop the reading that a call asked for."""
        pace = self._reading.get(call)
        if pace is not None:
            pace.cancel()

    def _read(self, order: wire.LoadAdapterCall, pace: Pace) -> None:
        lower_priority(self._rank.settings.stage_niceness)
        try:
            self._answer(order, lambda: self._rank.load_adapter(order.order, pace=pace))
        finally:
            del self._reading[order.call]

    def _act(self, order: wire.PlaceAdapterCall | wire.ClearSlotCall | wire.DropAdapterCall) -> Callable[[], Reply]:
        rank = self._rank
        match order:
            case wire.PlaceAdapterCall(adapter_id=adapter_id, slot=slot):
                return lambda: rank.place_adapter(adapter_id, slot)
            case wire.ClearSlotCall(slot=slot):
                return lambda: rank.clear_slot(slot)
            case wire.DropAdapterCall(adapter_id=adapter_id):
                return lambda: rank.drop_adapter(adapter_id)

    def _answer(self, order: wire.AdapterCall, act: Callable[[], Reply]) -> None:
        try:
            reply = act()
        except Exception as error:  # noqa: BLE001  # a rank answers, whatever happens
            rank = self._rank
            reply = Reply(operation_id="", rank=rank.number, boot_id=rank.boot_id, error=self._error_body(error))
        self._send(wire.Answer(call=order.call, reply=reply))


def _raise(error: Exception) -> Reply:
    raise error
