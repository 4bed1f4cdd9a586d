"""Operations as callers see them: one status per operation id, watchable, interruptible while that is possible."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import msgspec

from modelswap_engine.protocol.errors import ModelswapError, NotFound
from modelswap_engine.protocol.messages import SwapStatus
from modelswap_engine.protocol.states import SwapState
from modelswap_engine.swap import machine
from modelswap_engine.swap.holding import Holding

KEPT: Final = 64


class Operation:
    """One operation of this process.

    Attributes:
        status: the present one.
        started: the clock's reading when it was accepted.
        decided: True once it is certain how it ends; only writing that down is left.
        holding: the lease by which it waits once it has staged; None for one that does not wait.
        interrupted: gets an exception when the operation must give up; see :meth:`interrupt`.
    """

    def __init__(
        self, status: SwapStatus, *, started: float, on_change: Callable[[], None], holding: Holding | None = None
    ) -> None:
        self.status = status
        self.started = started
        self.holding = holding
        self.decided = False
        self.interrupted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._on_change = on_change
        self._watchers: list[asyncio.Queue[SwapStatus]] = []

    @property
    def id(self) -> str:
        """The operation id."""
        return self.status.operation_id

    @property
    def done(self) -> bool:
        """True when it will not move again."""
        return self.status.state.terminal

    @property
    def reversible(self) -> bool:
        """True while it can still be made to give up."""
        return self.status.state.reversible and not self.decided

    def show(self, status: SwapStatus) -> None:
        """Make this the present status."""
        self.status = status
        for watcher in self._watchers:
            watcher.put_nowait(status)
        self._on_change()

    def shown(self) -> SwapStatus:
        """Return the present status with what is left of its lease at this moment."""
        if self.done or self.holding is None or self.status.hold is None:
            return self.status
        return msgspec.structs.replace(self.status, hold=self.holding.state(held=self.status.hold.held))

    def advance(self, state: SwapState, **facts: Any) -> None:
        """Go one legal step further."""
        self.show(machine.advance(self.status, state, **facts))

    def note(self, **facts: Any) -> None:
        """Add facts without a step."""
        self.show(machine.note(self.status, **facts))

    def interrupt(self, error: ModelswapError) -> None:
        """Ask the operation to give up with this error; it does so while it is reversible."""
        if not self.interrupted.done():
            self.interrupted.set_exception(error)
            self.interrupted.exception()  # looked at: nobody may be waiting, and that is fine

    def check(self) -> None:
        """Give up here if that was asked for.

        Raises:
            ModelswapError: what :meth:`interrupt` was told.
        """
        if self.interrupted.done():
            self.interrupted.result()

    async def watch(self) -> AsyncIterator[SwapStatus]:
        """Yield the present status, then each further one, the terminal one last."""
        queue: asyncio.Queue[SwapStatus] = asyncio.Queue()
        queue.put_nowait(self.status)
        self._watchers.append(queue)
        try:
            while True:
                status = await queue.get()
                yield status
                if status.state.terminal:
                    return
        finally:
            self._watchers.remove(queue)


class Operations:
    """The operations of this process by id, the oldest finished ones forgotten, and those the journal remembers."""

    def __init__(self, *, remembered: Callable[[str], SwapStatus | None]) -> None:
        self._remembered = remembered
        self._known: dict[str, Operation] = {}
        self.latest: Operation | None = None
        self.own: Operation | None = None

    @property
    def current(self) -> Operation | None:
        """The operation that is not done."""
        return next((found for found in (self.own, self.latest) if found is not None and not found.done), None)

    def add(self, operation: Operation) -> None:
        """Make this the latest operation."""
        self.latest = operation
        self._remember(operation)

    def add_own(self, operation: Operation) -> None:
        """Begin an operation that nobody asked for; it is shown while it runs and does not replace the latest one.

        The last one asked for is what its caller looks for, and counts attempts by.
        """
        self.own = operation
        self._remember(operation)

    def _remember(self, operation: Operation) -> None:
        self._known[operation.id] = operation
        for key in [key for key, known in self._known.items() if known.done][: max(0, len(self._known) - KEPT)]:
            del self._known[key]

    def drop(self, operation: Operation) -> None:
        """Forget an operation that could not begin."""
        self._known.pop(operation.id, None)
        if self.latest is operation:
            self.latest = None

    def find(self, operation_id: str) -> Operation | SwapStatus | None:
        """Return what is known under this id: an operation of this process, or the outcome of an earlier one."""
        return self._known.get(operation_id) or self._remembered(operation_id)

    def status(self, operation_id: str) -> SwapStatus:
        """Return the status under this id.

        Raises:
            NotFound: no such operation.
        """
        found = self.find(operation_id)
        if found is None:
            raise NotFound(f"no operation {operation_id!r} is known here", advice="read the state for the latest one")
        return found.status if isinstance(found, Operation) else found

    def watch(self, operation_id: str) -> AsyncIterator[SwapStatus]:
        """Watch the operation with this id.

        Raises:
            NotFound: no such operation.
        """
        found = self.find(operation_id)
        return found.watch() if isinstance(found, Operation) else _one(self.status(operation_id))


async def _one(status: SwapStatus) -> AsyncIterator[SwapStatus]:
    yield status
