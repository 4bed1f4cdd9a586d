"""How a request gets in: through the gate, then into the update lock, out again exactly once on every path."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from modelswap_engine.protocol.errors import NotReady, VersionRequired
from modelswap_engine.protocol.messages import VersionRef
from modelswap_engine.swap.gate import Gate
from modelswap_engine.swap.lock import Reader, UpdateLock


class Admission:
    """A request that is inside.

    Attributes:
        live: the version that serves it; its instance stays at least until :meth:`submitted`.
    """

    def __init__(self, live: VersionRef, reader: Reader) -> None:
        self.live = live
        self._reader = reader

    def submitted(self) -> None:
        """Say that the engine has the prompt: from now on only a Drain waits for this request."""
        self._reader.submit()


class Admissions:
    """The way in.

    Args:
        gate: passed first.
        lock: entered next.
        live: tells the version that is live now.
    """

    def __init__(self, *, gate: Gate, lock: UpdateLock, live: Callable[[], VersionRef | None]) -> None:
        self._gate = gate
        self._lock = lock
        self._live = live

    @asynccontextmanager
    async def admit(self, *, require_version: str | None = None, request_id: str = "") -> AsyncIterator[Admission]:
        """Be inside while the context lasts.

        Args:
            require_version: a label or digest that must be the live one.
            request_id: how the request is called where holders are listed.

        Raises:
            Paused: the queue is full, or the wait was too long.
            NotReady: the engine is starting, stopping or quarantined.
            VersionRequired: another version is live.
        """
        reader = await self._pass(request_id)
        try:
            # Nothing is awaited between entering and this: version and reference are taken in one step, so an instance
            # that somebody was just let in to is never one that nobody holds.
            live = self._live()
            if live is None:
                raise NotReady("no version is live in this engine yet", details={"retryAfterSeconds": "1"})
            if require_version is not None and require_version not in (live.version, live.digest):
                raise VersionRequired(
                    f"version {require_version!r} was asked for, {live.version!r} ({live.digest}) is live",
                    advice="try again once the swap is done, or at another replica",
                    details={"live": live.version, "digest": live.digest},
                )
            reader.version = live.digest
            yield Admission(live, reader)
        finally:
            reader.leave()

    async def _pass(self, request_id: str) -> Reader:
        while True:
            await self._gate.enter()
            reader = await self._lock.enter(request_id)
            if self._gate.is_open:
                return reader
            reader.leave()  # it closed while this request stood between gate and lock: back into the queue
