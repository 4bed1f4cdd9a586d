"""Weight updates by a trainer: opened by lease, filled from any number of sources, committed as one swap.

However many parts arrive, nothing of them is live before the commit, and the commit is the transaction of every swap:
planned, staged in whole fusion groups, proved, rolled back where it fails. So an update that is aborted, breaks off or
runs out of its lease has nothing to restore. What fills it is in :mod:`.parts`.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from modelswap_engine.checkpoint.header import MAX_HEADER_BYTES
from modelswap_engine.protocol.assignment import WeightsPolicy
from modelswap_engine.protocol.engine_state import UpdateState
from modelswap_engine.protocol.errors import (
    Busy,
    Cancelled,
    DigestMismatch,
    ForeignOwner,
    ModelswapError,
    NotFound,
    NotReady,
    SignatureMissing,
    WeightsManaged,
    WorkerLost,
)
from modelswap_engine.protocol.messages import SwapRequest, SwapStatus, VersionRef
from modelswap_engine.protocol.updates import AbortUpdate, BeginUpdate, CommitUpdate
from modelswap_engine.swap import entry, recovery
from modelswap_engine.swap.core import Core, log
from modelswap_engine.swap.operations import Operation
from modelswap_engine.swap.trainer.open_update import OpenUpdate

_PATIENCE_SECONDS: Final = 0.1
_LARGEST_FACTOR: Final = 4


class Updates:
    """The update that is open, if one is.

    Args:
        core: the shared state.
    """

    def __init__(self, core: Core) -> None:
        self._core = core

    async def permit(self) -> None:
        """Check that weights may change here without an order of the operator.

        Raises:
            WeightsManaged: they may not.
        """
        accepted = self._core.journal.state.accepted
        found = await self._core.assignment()
        assigned = found is not None and found.stable is not None and not found.released
        if not assigned and not (accepted is not None and accepted.owned):
            return
        if found is not None and found.weights is WeightsPolicy.EXTERNAL:
            return
        raise WeightsManaged(
            "the weights of this pod are decided by its ModelVersion",
            advice="set spec.weights: External in the ModelVersion to let a trainer change them",
        )

    async def begin(self, request: BeginUpdate) -> UpdateState:
        """Open an update; the same id again renews its lease.

        Raises:
            WeightsManaged: an object decides the weights of this pod.
            SignatureMissing: this engine takes signed versions only.
            ForeignOwner: somebody else has opened an update with this id.
            Busy: another update or a swap is in progress, or the id was used before.
            NotReady: nothing is live, or the engine is stopping.
        """
        await self.permit()
        core, current = self._core, self._core.update
        if core.signatures.wanted(core.live.ref.verification if core.live is not None else None):
            raise SignatureMissing(
                "only signed versions are taken here, and weights that are sent have no signature",
                advice="publish them as a signed version, or let trainers change engines that need none",
            )
        if current is not None and current.id == request.update_id:
            _check_owner(current, request.owner)
            self._renew(current)
            return self._state(current)
        if core.stopping or core.live is None:
            raise NotReady("no version is live in this engine", advice="read the state for the reason")
        if current is not None:
            raise Busy(f"weight update {current.id!r} is open", advice="wait for its commit, or abort it")
        if core.operations.current is not None:
            raise Busy(f"operation {core.operations.current.id!r} is in progress", advice="wait for its end")
        if core.operations.find(request.update_id) is not None:
            raise Busy(f"the id {request.update_id!r} was used before", advice="choose a new id for each update")
        update = OpenUpdate(request=request, below=core.live, base=core.live.ref, restarts=core.restarts)
        core.update = update
        self._renew(update)
        core.tasks.spawn(self._expire(update))
        return self._state(update)

    def state(self, update_id: str) -> UpdateState:
        """Return what has arrived.

        Raises:
            NotFound: no such update is open.
        """
        return self._state(self._find(update_id))

    def largest_part(self, update_id: str) -> int:
        """Return how many bytes one part may have: the whole model, before a loader has made its tensors smaller.

        Raises:
            NotFound: no such update is open.
        """
        self._find(update_id)
        return self.largest_body()

    def largest_body(self) -> int:
        """Return the same, whether an update is open or not.

        Raises:
            NotReady: nothing is live.
        """
        live = self._core.live
        if live is None:
            raise NotReady("no version is live in this engine", advice="read the state for the reason")
        return _LARGEST_FACTOR * live.manifest.total_bytes + MAX_HEADER_BYTES

    async def abort(self, update_id: str, request: AbortUpdate) -> None:
        """Drop an update and whatever of it is under way.

        Raises:
            NotFound: no such update is open.
            ForeignOwner: it is somebody else's.
        """
        update = self._find(update_id)
        _check_owner(update, request.owner)
        await self._core.tasks.see_through(self._drop(update, Cancelled(f"update {update_id!r} was aborted by a call")))

    async def commit(self, update_id: str, request: CommitUpdate) -> SwapStatus:
        """Make what arrived live in one swap and return how that ended; one that was committed before answers again.

        Raises:
            NotFound: no such update.
            ForeignOwner: it is somebody else's.
            DigestMismatch: the result is not the pinned one; the update is dropped.
            WorkerLost: what had arrived was lost; the update is dropped.
        """
        operations = self._core.operations
        if operations.find(update_id) is None:
            async with self.turn(update_id, request.owner) as update:
                await self._core.tasks.see_through(self._start(update, request))
        async for _ in operations.watch(update_id):
            pass
        return operations.status(update_id)

    async def _start(self, update: OpenUpdate, request: CommitUpdate) -> None:
        core, result = self._core, update.result(offload=self._core.offload)
        digest: str = await core.offload(lambda: result.manifest.digest)
        if request.digest and request.digest != digest:
            error = DigestMismatch(
                f"what arrived makes {digest}, pinned is {request.digest}",
                advice="send the tensors of the pinned version",
                details={"expected": request.digest, "actual": digest},
            )
            await self._drop(update, error)
            raise error
        # A whole version from disk and nothing else has a place of its own.
        uri = result.uri if update.hashes else update.below.ref.uri
        order = SwapRequest(
            operation_id=update.id,
            target=VersionRef(version=update.label(request.version, digest), uri=uri, digest=digest),
            traffic=update.request.traffic,
            loading=update.request.loading,
        )
        operation = entry.begin(core, order)
        core.update, core.received = None, result
        update.end(Cancelled(f"update {update.id!r} is being committed"))
        core.tasks.spawn(self._run(operation, order))

    async def _run(self, operation: Operation, order: SwapRequest) -> None:
        try:
            await entry.run(self._core, operation, order)
        finally:
            self._core.received = None

    @asynccontextmanager
    async def turn(self, update_id: str, owner: str) -> AsyncIterator[OpenUpdate]:
        """One call about an update at a time, on what it was begun on; its lease starts again afterwards.

        Raises:
            NotFound: no such update is open.
            ForeignOwner: it is somebody else's.
            WorkerLost: the engine was loaded anew; the update is dropped.
            Cancelled: it ended while this call waited.
        """
        core, update = self._core, self._find(update_id)
        _check_owner(update, owner)
        async with update.lock:
            if update.gone.done():
                update.gone.result()
            if core.restarts != update.restarts or core.live is None or core.live.digest != update.base.digest:
                lost = WorkerLost("the engine lost what it had received", advice="begin the update again")
                await core.tasks.see_through(self._drop(update, lost))
                raise lost
            try:
                yield update
            finally:
                self._renew(update)

    async def _drop(self, update: OpenUpdate, error: ModelswapError) -> None:
        core = self._core
        if core.update is not update:
            return
        update.end(error)
        core.update = None
        core.touch()

        async def release() -> None:
            core.preempt()
            async with core.mutex:
                await core.engine.release(update.id, previous=False)

        failure = await recovery.guarded(release)
        if failure is not None:
            log.warning("what update %s had received was not released: %s", update.id, failure.message)

    async def _expire(self, update: OpenUpdate) -> None:
        """End the update when its lease is over; a call that is under way is bounded by itself and renews it."""
        clock = self._core.clock
        while not update.gone.done() and (update.lock.locked() or update.deadline > clock.monotonic()):
            await clock.sleep(max(update.deadline - clock.monotonic(), _PATIENCE_SECONDS))
        seconds = update.request.seconds
        await self._drop(update, Cancelled(f"update {update.id!r} ended: no call came for {seconds:g} s"))

    def _renew(self, update: OpenUpdate) -> None:
        update.deadline = self._core.clock.monotonic() + update.request.seconds
        self._core.touch()

    def _find(self, update_id: str) -> OpenUpdate:
        update = self._core.update
        if update is None or update.id != update_id:
            raise NotFound(f"no weight update {update_id[:200]!r} is open", advice="begin one, or read the state")
        return update

    def _state(self, update: OpenUpdate) -> UpdateState:
        return update.state(self._core.clock.monotonic())


def _check_owner(update: OpenUpdate, owner: str) -> None:
    if owner != update.request.owner:
        raise ForeignOwner(
            f"weight update {update.id!r} belongs to {update.request.owner!r}, the call comes from {owner!r}",
            advice="name the owner that began it",
            details={"owner": update.request.owner},
        )
