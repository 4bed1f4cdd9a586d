"""The door for new requests: open, closed with a bounded queue before it, or refusing.

It is closed while anybody holds it: a swap, a recovery, or a caller with a lease. It knows nothing of why. A lease has
a deadline and undoes itself, so that a caller that dies cannot keep a pod closed.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from modelswap_engine.protocol.errors import Busy, ErrorBody, ForeignOwner, Paused, from_body
from modelswap_engine.swap.clock import Clock, within

MAX_LEASES: Final = 16
_LONGEST_RETRY_SECONDS: Final = 10.0


@dataclass(frozen=True, kw_only=True)
class Lease:
    """A hold of somebody outside."""

    id: str
    owner: str
    deadline: float


class Gate:
    """A door with a bounded queue.

    Args:
        clock: measures ages and deadlines.
        max_queue: how many requests may wait; one more is answered ``Paused``.
        queue_seconds: how long one may wait; longer is answered ``Paused``.

    Attributes:
        closures: how often it went from open to closed.
        waits: how many requests have found it closed and had to wait.
    """

    def __init__(self, *, clock: Clock, max_queue: int = 1024, queue_seconds: float = 120.0) -> None:
        self._clock = clock
        self._max_queue = max_queue
        self._queue_seconds = queue_seconds
        self._holds: dict[str, float] = {}
        self._leases: dict[str, Lease] = {}
        self._timers: dict[str, asyncio.Task[None]] = {}
        self._waiting: dict[asyncio.Future[None], float] = {}
        self._refusal: ErrorBody | None = None
        self.closures = 0
        self.waits = 0
        self._changed: Callable[[], None] = lambda: None

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call this whenever the door or its holders change (not for each request that waits)."""
        self._changed = callback

    @property
    def is_open(self) -> bool:
        """True when a new request would pass at once."""
        return not self._holds and not self._leases and self._refusal is None

    @property
    def queued(self) -> int:
        """How many requests wait."""
        return len(self._waiting)

    @property
    def oldest_seconds(self) -> float:
        """How long the one that waits longest has waited; 0 when nobody does."""
        return self._clock.monotonic() - min(self._waiting.values()) if self._waiting else 0.0

    @property
    def holders(self) -> tuple[str, ...]:
        """Who holds the door shut from inside: operations and recoveries."""
        return tuple(self._holds)

    @property
    def leases(self) -> tuple[Lease, ...]:
        """Who holds it shut from outside, the one that ends last first."""
        return tuple(sorted(self._leases.values(), key=lambda lease: -lease.deadline))

    @property
    def lease(self) -> Lease | None:
        """The lease that ends last, if any."""
        return max(self._leases.values(), key=lambda lease: lease.deadline, default=None)

    def holds(self, lease_id: str) -> bool:
        """Say whether this lease is held."""
        return lease_id in self._leases

    def close(self, hold: str, *, allowance: float = 0.0) -> None:
        """Hold the door shut; ``allowance`` lets requests wait longer than usual when this may take that long."""
        self._closing()
        self._holds[hold] = allowance
        self._changed()

    def open(self, hold: str) -> None:
        """Let go; the door opens when nobody else holds it. Letting go twice does no harm."""
        if self._holds.pop(hold, None) is not None:
            self._settle()

    def refuse(self, error: ErrorBody) -> None:
        """Answer everybody, also those who wait, with this error until :meth:`accept`."""
        self._refusal = error
        self._settle()

    def accept(self) -> None:
        """Stop refusing."""
        if self._refusal is not None:
            self._refusal = None
            self._settle()

    def take_lease(self, lease_id: str, *, owner: str, seconds: float) -> None:
        """Hold the door shut until released or for so many seconds; the same id again moves the deadline.

        Raises:
            ForeignOwner: somebody else holds a lease with this id.
            Busy: too many leases are held.
        """
        self._check_owner(lease_id, owner)
        if lease_id not in self._leases and len(self._leases) >= MAX_LEASES:
            raise Busy(f"{MAX_LEASES} leases hold this engine already", advice="give one back, or wait for its end")
        self._closing()
        self._leases[lease_id] = Lease(id=lease_id, owner=owner, deadline=self._clock.monotonic() + seconds)
        self._stop_timer(lease_id)
        self._timers[lease_id] = asyncio.create_task(self._expire(lease_id, seconds))
        self._changed()

    def end_lease(self, lease_id: str, *, owner: str) -> None:
        """Give a lease back; an unknown one is nothing to do.

        Raises:
            ForeignOwner: it is somebody else's.
        """
        self._check_owner(lease_id, owner)
        self._stop_timer(lease_id)
        if self._leases.pop(lease_id, None) is not None:
            self._settle()

    async def enter(self) -> None:
        """Return when the door is open.

        Raises:
            Paused: the queue is full, or the wait was too long.
            ModelswapError: what :meth:`refuse` was told.
        """
        if self._passable():
            return
        if len(self._waiting) >= self._max_queue:
            raise Paused(
                f"new requests are held while the engine changes its weights, and {self._max_queue} wait already",
                advice="try again shortly, or at another replica",
                details=self._retry_after(),
            )
        self.waits += 1
        patience = max([self._queue_seconds, *self._holds.values()])
        try:
            await within(self._clock, patience, self._wait())
        except TimeoutError:
            raise Paused(
                f"new requests are held while the engine changes its weights; this one waited {patience:g} s",
                advice="try again shortly, or at another replica",
                details=self._retry_after(),
            ) from None

    def _retry_after(self) -> dict[str, str]:
        """Say when to come again: a swap is over soon; a lease may be long, but may be given back at any time."""
        lease = self.lease
        left = lease.deadline - self._clock.monotonic() if lease is not None and not self._holds else 1.0
        return {"retryAfterSeconds": f"{min(_LONGEST_RETRY_SECONDS, max(1.0, left)):.0f}"}

    async def _wait(self) -> None:
        since = self._clock.monotonic()
        waiter = asyncio.get_running_loop().create_future()
        self._waiting[waiter] = since
        try:
            while not self._passable():
                await waiter
                # It may have been closed again before this ran: queue up once more, keeping the age.
                del self._waiting[waiter]
                waiter = asyncio.get_running_loop().create_future()
                self._waiting[waiter] = since
        finally:
            self._waiting.pop(waiter, None)

    def _passable(self) -> bool:
        if self._refusal is not None:
            raise from_body(self._refusal)
        return self.is_open

    def _settle(self) -> None:
        if self.is_open or self._refusal is not None:
            for waiter in self._waiting:
                if not waiter.done():
                    waiter.set_result(None)
        self._changed()

    def _closing(self) -> None:
        self.closures += not self._holds and not self._leases

    def _check_owner(self, lease_id: str, owner: str) -> None:
        held = self._leases.get(lease_id)
        if held is not None and held.owner != owner:
            raise ForeignOwner(
                f"lease {lease_id!r} belongs to {held.owner!r}, the call comes from {owner!r}",
                advice="choose another lease id, or name its owner",
                details={"owner": held.owner},
            )

    def _stop_timer(self, lease_id: str) -> None:
        timer = self._timers.pop(lease_id, None)
        if timer is not None:
            timer.cancel()

    async def _expire(self, lease_id: str, seconds: float) -> None:
        await self._clock.sleep(seconds)
        self._timers.pop(lease_id, None)
        if self._leases.pop(lease_id, None) is not None:
            self._settle()

    def shut(self) -> None:
        """Stop the timers; the door itself stays as it is."""
        for lease_id in list(self._timers):
            self._stop_timer(lease_id)
