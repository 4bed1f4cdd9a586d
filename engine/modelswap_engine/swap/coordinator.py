"""The one door to the swap machinery: what HTTP, and nothing else, calls.

It checks who calls and on which state, starts work as tasks of its own (a caller that goes away cancels nothing), and
composes the one view of everything. How a swap goes is in ``transaction``, how things are put right in ``recovery``.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager

from modelswap_engine.backends.port import Backend
from modelswap_engine.backends.transfer import Transfers
from modelswap_engine.limits import MemoryProbe
from modelswap_engine.protocol.assignment import Assignment, EngineRestart
from modelswap_engine.protocol.engine_state import EngineState
from modelswap_engine.protocol.errors import (
    Busy,
    Cancelled,
    ModelswapError,
    NotFound,
    NotReady,
)
from modelswap_engine.protocol.looking import LookRequest, SourceLook
from modelswap_engine.protocol.messages import (
    CancelRequest,
    CheckRequest,
    CheckResult,
    HoldRequest,
    Plan,
    PlanRequest,
    ProceedRequest,
    ReleaseRequest,
    RollbackRequest,
    SwapRequest,
    SwapStatus,
    VersionRef,
)
from modelswap_engine.protocol.prefetch import PrefetchRequest, PrefetchState
from modelswap_engine.signing.policy import Signatures
from modelswap_engine.swap import checking, entry, proceeding, recovery, retention, shutdown, sourcing
from modelswap_engine.swap import fence as fences
from modelswap_engine.swap.admission import Admission, Admissions
from modelswap_engine.swap.clock import Clock, Offload, OneThread
from modelswap_engine.swap.companion import Alone, Companion
from modelswap_engine.swap.core import Core, Resolver
from modelswap_engine.swap.gate import Gate
from modelswap_engine.swap.journal import Journal
from modelswap_engine.swap.leases import Leases
from modelswap_engine.swap.listener import Encode, VersionListener
from modelswap_engine.swap.operations import Operation
from modelswap_engine.swap.planner import assess
from modelswap_engine.swap.prefetch import Prefetch
from modelswap_engine.swap.settings import SwapSettings
from modelswap_engine.swap.supervisor import Supervisor
from modelswap_engine.swap.trainer.exchange import Exchange
from modelswap_engine.swap.trainer.export import Export
from modelswap_engine.swap.trainer.kv import KvCache
from modelswap_engine.swap.trainer.parts import Parts
from modelswap_engine.swap.trainer.peers import Peers
from modelswap_engine.swap.trainer.updates import Updates
from modelswap_engine.swap.view import engine_state


class Coordinator:
    """Everything that changes or reads the running version.

    Args:
        backend: the engine.
        sources: finds checkpoints by URI.
        journal: what survives this process.
        gate: the door for new requests.
        clock: time.
        settings: bounds and places.
        listeners: whatever changes together with the weights.
        companion: whatever lives on the base and changes with it.
        memory: tells the container's limits.
        offload: runs calls that block on the disk.
        journal_offload: runs those of the journal, which wait for nothing else.
        encode: makes tokens of the prompts that a version is tried with; None when nobody can.
        transfers: the engine as a place that takes weights in and gives them out; None when it does not.
        signatures: who must vouch for versions; None asks for no more than they do themselves.

    Attributes:
        leases: new requests held, by whoever wants the engine quiet.
        updates: weight updates by a trainer: begin, commit, abort.
        parts: what fills them.
        export: weights that leave: to process groups, to folders.
        cache: cached keys and values, flushed without a change of weights.
    """

    def __init__(
        self,
        *,
        backend: Backend,
        sources: Resolver,
        journal: Journal,
        gate: Gate,
        clock: Clock,
        settings: SwapSettings,
        listeners: Sequence[VersionListener] = (),
        companion: Companion | None = None,
        memory: MemoryProbe | None = None,
        offload: Offload = asyncio.to_thread,
        journal_offload: Offload | None = None,
        transfers: Transfers | None = None,
        encode: Encode | None = None,
        signatures: Signatures | None = None,
    ) -> None:
        self._core = Core(
            backend=backend,
            sources=sources,
            journal=journal,
            gate=gate,
            clock=clock,
            settings=settings,
            listeners=listeners,
            encode=encode,
            companion=companion or Alone(),
            probe=memory or MemoryProbe(),
            offload=offload,
            journal_offload=journal_offload or OneThread("journal"),
            signatures=signatures or Signatures(),
        )
        self._admissions = Admissions(gate=gate, lock=self._core.lock, live=self._core.live_ref)
        self.leases = Leases(self._core)
        self.updates = Updates(self._core)
        exchange = Exchange(self._core, transfers=transfers)
        self.parts = Parts(self._core, updates=self.updates, exchange=exchange)
        self.export = Export(
            self._core, exchange=exchange, peers=Peers(settings.weight_peers), roots=settings.export_roots
        )
        self.cache = KvCache(self._core, exchange=exchange)
        self._prefetch = Prefetch(self._core)
        starting = NotReady("the engine is starting", advice="try another replica", details={"retryAfterSeconds": "1"})
        self._core.unpublish("Starting", starting.body())

    # Life

    async def start(
        self,
        template: VersionRef,
        assignment: Assignment | None,
        *,
        reread: Callable[[], Assignment | None] | None = None,
    ) -> None:
        """Start the engine and load what must be served; returns after the first attempt, whatever came of it.

        An attempt that fails is repeated in the background with growing pauses; the reason is in the state.

        Args:
            template: what the pod's template names; served when nothing was ever assigned.
            assignment: the assignment file as it is now.
            reread: reads that file again, before each attempt and when an unknown owner calls.
        """
        core = self._core
        core.reread = reread or (lambda: assignment)
        supervisor = Supervisor(core, template=template)
        failure = await recovery.guarded(core.backend.start)
        if failure is not None:
            core.unpublish("LoadFailed", failure.body())
        else:
            await supervisor.attempt()
        core.tasks.spawn(supervisor.run())

    async def drain(self, timeout: float) -> None:
        """Before the process ends: leave the endpoints, refuse new requests, wait for those in flight."""
        await shutdown.drain(self._core, timeout)

    async def stop(self) -> None:
        """End all tasks and the engine; what still runs ends with an error."""
        core = self._core
        shutdown.refuse(core)
        await core.tasks.end()
        await core.companion.stop()
        core.gate.shut()
        await core.backend.stop()
        core.journal.close()

    # Reading

    def state(self) -> EngineState:
        """Return the one view of everything."""
        return engine_state(self._core)

    def etag(self) -> str:
        """Return the entity tag of the state, quotes included."""
        return self._core.etag

    @property
    def live(self) -> VersionRef | None:
        """The version that serves."""
        return self._core.live_ref()

    def serves(self, digest: str) -> bool:
        """Say whether a request that was let in to this version can be handed to the engine."""
        return self._core.serves(digest)

    def ready(self) -> bool:
        """Say whether new requests should be routed here."""
        return self._core.ready

    @property
    def quarantined(self) -> bool:
        """True while neither version could be proved."""
        return self._core.quarantined

    @property
    def trusted(self) -> bool:
        """True unless live tensors are known not to be those of the live version: then no answer may go on."""
        return not self._core.quarantined and not self._core.drift.names

    @property
    def stuck(self) -> bool:
        """True when only a new process helps: quarantined, and nobody is loading a whole version."""
        return self._core.quarantined and self._core.operations.current is None and not self._core.stopping

    async def restart_allowed(self, *, otherwise: bool = True) -> bool:
        """Say whether this pod may be restarted when only that helps: the object's word, else ``otherwise``."""
        try:
            found = await self._core.assignment()
        except ModelswapError:  # the file cannot be read: a probe must have an answer all the same
            return otherwise
        if found is None or found.engine_restart is None:
            return otherwise
        return found.engine_restart is EngineRestart.ALLOWED

    @property
    def closing(self) -> bool:
        """True while connections should be closed after their answer."""
        return self._core.closing or self._core.quarantined or self._core.stopping

    def probe_seen(self) -> None:
        """The readiness probe was answered "not ready": endpoints will follow."""
        self._core.probed.set()

    def worker_lost(self) -> None:
        """Somebody noticed that a rank died; it is looked after at once instead of at the next poll."""
        self._core.poked.set()

    def operation(self, operation_id: str) -> SwapStatus:
        """Return the status of an operation.

        Raises:
            NotFound: no such operation.
        """
        return self._core.operations.status(operation_id)

    def watch(self, operation_id: str) -> AsyncIterator[SwapStatus]:
        """Yield the status of an operation now and at each change, until it has ended.

        Raises:
            NotFound: no such operation.
        """
        return self._core.operations.watch(operation_id)

    async def plan(self, request: PlanRequest) -> Plan:
        """Say what a swap would do; nothing is touched.

        Raises:
            NotReady: nothing is live.
            ModelswapError: the source does not hold a readable checkpoint.
        """
        core = self._core
        if not core.mutex.locked():
            async with core.mutex:
                await recovery.guarded(core.refresh_memory)
        async with assess(core, request) as assessment:
            return assessment.decision.plan

    async def look(self, request: LookRequest) -> SourceLook:
        """Look whether the source of the live version still holds it; see :func:`sourcing.look`."""
        return await sourcing.look(self._core, request.target)

    def admission(
        self, *, require_version: str | None = None, request_id: str = ""
    ) -> AbstractAsyncContextManager[Admission]:
        """Let a request in; see :meth:`Admissions.admit`."""
        return self._admissions.admit(require_version=require_version, request_id=request_id)

    # Changing

    async def swap(self, request: SwapRequest, *, if_match: str | None = None) -> SwapStatus:
        """Accept a swap and return its first status; the same operation id gets the same operation.

        Raises:
            Fenced: the caller is not entitled, or decided on another state.
            Busy: another operation is in progress.
        """
        core = self._core
        again = entry.known(core, request.operation_id, request.fence)
        if again is not None:
            return again
        await entry.check_owner(core, request.fence, request.target)
        return await entry.accept(core, request, if_match=if_match)

    async def rollback(self, request: RollbackRequest, *, if_match: str | None = None) -> SwapStatus:
        """Accept a swap to the retained previous version.

        Raises:
            NotFound: none is retained.
            Fenced, Busy: as for :meth:`swap`.
        """
        core = self._core
        again = entry.known(core, request.operation_id, request.fence)
        if again is not None:
            return again
        if core.previous is None:
            raise NotFound("no previous version is retained", advice="swap to the wanted version by its source")
        wanted = SwapRequest(
            operation_id=request.operation_id,
            fence=request.fence,
            target=core.previous.ref,
            traffic=request.traffic,
            adapters=request.adapters,
        )
        return await self.swap(wanted, if_match=if_match)

    async def cancel(self, operation_id: str, request: CancelRequest) -> SwapStatus:
        """Abort an operation while its old version has never left; one that has ended is returned as it is.

        Raises:
            NotFound: no such operation.
            Busy: it is past that point.
            Fenced: the caller is not entitled.
        """
        core = self._core
        fences.check_pod(request.fence, core.settings.pod_uid)
        fences.check_control(request.fence, core.journal.state.accepted)
        found = core.operations.find(operation_id)
        if not isinstance(found, Operation) or found.done:
            return core.operations.status(operation_id)
        if not found.reversible:
            raise Busy(
                f"operation {operation_id!r} is {found.status.state} and can no longer be dropped",
                advice="wait for its end, then roll back",
            )
        found.interrupt(Cancelled("the swap was cancelled by a call"))
        return found.status

    async def hold(self, operation_id: str, request: HoldRequest) -> SwapStatus:
        """Begin the lease of a swap that waits anew; see :func:`proceeding.renew`."""
        return proceeding.renew(self._core, operation_id, request)

    async def proceed(self, operation_id: str, request: ProceedRequest) -> SwapStatus:
        """Let a swap that waits go on; see :func:`proceeding.proceed`."""
        return await proceeding.proceed(self._core, operation_id, request)

    def prefetch(self, request: PrefetchRequest) -> list[PrefetchState]:
        """Fetch versions ahead of their time; see :class:`Prefetch`."""
        return self._prefetch.ask(request)

    async def check(self, request: CheckRequest) -> CheckResult:
        """Look at the live tensors because somebody asked; see :func:`checking.look`."""
        return await checking.look(self._core, request)

    async def release(self, request: ReleaseRequest) -> EngineState:
        """Give up the retained previous version.

        Raises:
            Fenced: the caller is not entitled.
            Busy: an operation is in progress.
            NotFound: none is retained.
        """
        core = self._core
        fences.check_pod(request.fence, core.settings.pod_uid)
        fences.check_control(request.fence, core.journal.state.accepted)
        await retention.give_up(core)
        return self.state()
