"""A trainer's calls in the order in which other engines want them, made into one transaction of this engine.

Other engines change live weights with each call; here nothing is live before the end: of ``begin`` and ``end``, of a
pause and its ``continue``, or of a single call outside both. A part that fails ends the update, so that a trainer that
goes on regardless cannot make half of its weights live.
"""

import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from enum import StrEnum
from typing import Final

from modelswap_engine.backends.port import RequestPolicy
from modelswap_engine.protocol.errors import BadRequest, Busy, ModelswapError, NotFound, from_body
from modelswap_engine.protocol.messages import PauseRequest, ResumeRequest, SwapStatus
from modelswap_engine.protocol.policy import Traffic, TrafficMode
from modelswap_engine.protocol.updates import AbortUpdate, BeginUpdate, CommitUpdate
from modelswap_engine.swap.coordinator import Coordinator
from modelswap_engine.swap.lock import Scope

OWNER: Final = "trainer"
LEASE: Final = "trainer"
LEASE_SECONDS: Final = 600.0
DRAIN_SECONDS: Final = 600.0
ADMIT_SECONDS: Final = 30.0


class PauseMode(StrEnum):
    """What a pause does with requests in flight, and the commit at its end."""

    ABORT = "abort"
    RETRACT = "retract"
    IN_PLACE = "in_place"
    WAIT = "wait"


_TRAFFIC: Final = {
    PauseMode.ABORT: TrafficMode.ABORT,
    PauseMode.RETRACT: TrafficMode.RECOMPUTE,
    PauseMode.IN_PLACE: TrafficMode.FREEZE,
    PauseMode.WAIT: TrafficMode.DRAIN,
}


class TrainerSession:
    """The one trainer that this engine serves at a time.

    Args:
        coordinator: carries everything out.
        new_id: makes an id that nobody has used.
    """

    def __init__(self, coordinator: Coordinator, *, new_id: Callable[[], str] = lambda: secrets.token_hex(8)) -> None:
        self._coordinator = coordinator
        self._new_id = new_id
        self._mode = PauseMode.WAIT
        self._update = ""
        self._begun = False
        self._version = ""

    @property
    def paused(self) -> bool:
        """True while new requests are held for the trainer; the lease may have run out."""
        return self._coordinator.leases.holds(LEASE)

    async def pause(self, mode: PauseMode) -> None:
        """Hold new requests; those in flight end now, end by themselves first, or go on until the commit.

        Raises:
            BadRequest: this engine has no such mode.
            ModelswapError: requests could not be ended; nothing is paused that was not before.
        """
        possible = self._coordinator.state().capabilities.traffic_modes
        if _TRAFFIC[mode] not in possible:
            raise BadRequest(f"pause mode {mode} is not possible with this engine", advice="use abort or retract")
        before = self.paused
        await self._coordinator.leases.take(PauseRequest(lease_id=LEASE, owner=OWNER, seconds=LEASE_SECONDS))
        try:
            if mode is PauseMode.ABORT:
                await self._abort_requests()
            if mode in (PauseMode.ABORT, PauseMode.WAIT):
                await self._coordinator.leases.quiet(DRAIN_SECONDS)
        except BaseException:
            if not before:  # the trainer was told that nothing is paused
                await self._coordinator.leases.give_back(ResumeRequest(lease_id=LEASE, owner=OWNER))
            raise
        self._mode = mode

    async def resume(self) -> SwapStatus | None:
        """Make live what came during the pause, then let requests in again.

        When that fails the old weights serve as before, the update is gone, and the pause goes on: the caller may
        resume once more, or send again.

        Raises:
            ModelswapError: why nothing of it is live.
        """
        status = None
        if self._open() and not self._begun:
            status = await self._commit()
        await self._coordinator.leases.give_back(ResumeRequest(lease_id=LEASE, owner=OWNER))
        return status

    async def begin(self) -> None:
        """Open an update that lasts until :meth:`end`.

        Raises:
            Busy: one is open already.
        """
        if self._open() and self._begun:
            raise Busy("an update is open already", advice="end it first")
        if not self._open():
            self._update, self._version = await self._begin(abort_all=False), ""
        self._begun = True

    async def end(self, *, version: str = "") -> SwapStatus:
        """Make live what came since :meth:`begin`.

        Raises:
            BadRequest: none is open.
            ModelswapError: why nothing of it is live.
        """
        if not (self._open() and self._begun):
            raise BadRequest("no weight update is open", advice="begin one; a part that failed has ended the last one")
        self._version = version or self._version
        return await self._commit()

    @asynccontextmanager
    async def part(self, *, version: str = "", abort_all: bool = False) -> AsyncIterator[str]:
        """Yield the update that a part belongs to; outside of begin and pause the part is an update of its own.

        Raises:
            ModelswapError: why the part, or its commit, failed; the update is gone.
        """
        alone = not self._open()
        if alone:
            self._update, self._begun, self._version = await self._begin(abort_all=abort_all), False, ""
        update = self._update
        try:
            yield update
        except BaseException:
            await self._abort(update)
            raise
        self._version = version or self._version
        if self.paused:
            await self._coordinator.leases.take(PauseRequest(lease_id=LEASE, owner=OWNER, seconds=LEASE_SECONDS))
        elif alone:
            await self._commit()

    async def rename(self, version: str, *, abort_all: bool = False) -> None:
        """Give the live weights another label; with an update open, or in a pause, at the end of that.

        Raises:
            ModelswapError: why it is not called so.
        """
        if abort_all:
            await self._abort_requests()
        if self._open():
            self._version = version
            return
        async with self.part(version=version):
            pass

    async def flush(self) -> None:
        """Forget cached keys and values.

        Raises:
            Busy: requests are running, and nobody has said that they may begin again.
        """
        again = self.paused and self._mode in (PauseMode.ABORT, PauseMode.RETRACT)
        await self._coordinator.cache.flush(RequestPolicy.RECOMPUTE if again else RequestPolicy.NONE_RUNNING)

    async def _abort_requests(self) -> None:
        """End requests; in a pause, which lets no more in, those still on their way to the engine get there first."""
        if self.paused:
            await self._coordinator.leases.quiet(ADMIT_SECONDS, scope=Scope.ADMITTING)
        await self._coordinator.cache.flush(RequestPolicy.ABORT)

    def _open(self) -> bool:
        """Say whether our update is still open; its lease may have run out."""
        state = self._coordinator.state().update
        if state is None or state.update_id != self._update:
            self._update, self._begun = "", False
        return bool(self._update)

    async def _begin(self, *, abort_all: bool) -> str:
        mode = TrafficMode.ABORT if abort_all else _TRAFFIC[self._mode] if self.paused else TrafficMode.DRAIN
        update = f"trainer-{self._new_id()}"
        traffic = Traffic(mode=mode, timeout_seconds=DRAIN_SECONDS)
        begin = BeginUpdate(update_id=update, owner=OWNER, seconds=LEASE_SECONDS, traffic=traffic)
        await self._coordinator.updates.begin(begin)
        return update

    async def _commit(self) -> SwapStatus:
        update, version = self._update, self._version
        self._update, self._begun, self._version = "", False, ""
        order = CommitUpdate(owner=OWNER, version=version)
        try:
            status = await self._coordinator.updates.commit(update, order)
        except ModelswapError:
            await self._abort(update)
            raise
        if status.error is not None:
            raise from_body(status.error)
        return status

    async def _abort(self, update: str) -> None:
        if self._update == update:
            self._update, self._begun, self._version = "", False, ""
        try:
            await self._coordinator.updates.abort(update, AbortUpdate(owner=OWNER))
        except NotFound:
            return  # it ended by itself
