"""What all parts of the coordinator share: what is live, what must be, why the engine is not ready, and one mutex.

Only the holder of the mutex talks to the engine or changes ``live``. Each visible change raises ``seq``, which is half
of the state's entity tag.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec

from modelswap_engine.backends.port import Backend
from modelswap_engine.limits import Memory, MemoryProbe
from modelswap_engine.protocol.assignment import Assignment
from modelswap_engine.protocol.engine_state import AuditState, CheckState, MemoryState
from modelswap_engine.protocol.errors import Busy, ErrorBody, ModelswapError, NotReady, Unavailable
from modelswap_engine.protocol.messages import Coordinates, SwapStatus, VersionRef
from modelswap_engine.protocol.prefetch import PrefetchState
from modelswap_engine.protocol.states import SwapState
from modelswap_engine.signing.policy import Signatures
from modelswap_engine.sources.port import Resolved
from modelswap_engine.swap import machine
from modelswap_engine.swap.clock import Clock, Offload, within
from modelswap_engine.swap.companion import Companion
from modelswap_engine.swap.engine import Engine
from modelswap_engine.swap.gate import Gate
from modelswap_engine.swap.growth import Growth, observe
from modelswap_engine.swap.journal import Journal
from modelswap_engine.swap.listener import Encode, VersionListener
from modelswap_engine.swap.lock import UpdateLock
from modelswap_engine.swap.open_update import OpenUpdate
from modelswap_engine.swap.operations import Operation, Operations
from modelswap_engine.swap.received import Received
from modelswap_engine.swap.records import Assigned, Outcome, Record, Registered, Served
from modelswap_engine.swap.settings import SwapSettings
from modelswap_engine.swap.versions import Version, VersionStore

log: Final = logging.getLogger("modelswap.swap")


class Resolver(Protocol):
    """Whatever finds checkpoints by URI; see :class:`sources.port.Source`."""

    async def resolve(self, uri: str, *, digest: str = "", credentials: str = "") -> Resolved:
        """Find and validate the checkpoint at a URI."""

    async def retain(self, digests: Collection[str]) -> None:
        """Say which versions are in use."""


_DRIFT_HOLD: Final = "drift"
_DRIFT_PATIENCE: Final = 60.0


@dataclass
class Drift:
    """Live tensors that are not what the live version says, by checkpoint name; none while all is well.

    ``attempts`` to repair them were made so far, ``begun`` of them and of earlier ones; ``repaired`` counts the times
    that they were right again.
    """

    names: tuple[str, ...] = ()
    message: str = ""
    attempts: int = 0
    begun: int = 0
    repaired: int = 0


class Core:
    """The shared state.

    Attributes:
        live: the version that serves; None until one has been proved, and in quarantine.
        previous: the retained previous version.
        away: why replicas that were lost could not be loaded again, "" when none is or it was not tried yet.
        drift: what a check found to be wrong with the live tensors; nobody is answered while there is any.
        retiring: the version whose instance ends what it began, beside the live one.
        reason: why the engine is not ready, "" when it is; ``message`` says it in words.
        update: the weight update that is open, if one is; ``received`` is the version it makes while that is committed.
        quarantined: True when neither version could be proved; only a whole load ends it.
        closing: True while the endpoints are being left.
        stopping: True once the process was told to end.
        reread: reads the assignment file.
        loaded_at: when a whole version was last loaded, in the clock's seconds.
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
        listeners: Sequence[VersionListener],
        encode: Encode | None,
        companion: Companion,
        memory: MemoryProbe,
        offload: Offload,
        journal_offload: Offload,
        signatures: Signatures,
    ) -> None:
        self.backend = backend
        self.sources = sources
        self.journal = journal
        self.gate = gate
        self.clock = clock
        self.settings = settings
        self.listeners = tuple(listeners)
        self.encode = encode
        self.companion = companion
        self.signatures = signatures
        self.engine = Engine(backend=backend, clock=clock, settings=settings)
        self.lock = UpdateLock(clock=clock)
        self.operations = Operations(remembered=lambda key: journal.state.outcome(key))
        self.store = VersionStore(settings.state_dir / "versions", offload=offload)
        self.mutex = asyncio.Lock()
        self.live: Version | None = None
        self.previous: Version | None = None
        self.away = ""
        self.drift = Drift()
        self.growth = Growth()
        self.retiring: Version | None = None
        self.reason = ""
        self.message = ""
        self.quarantined = False
        self.closing = False
        self.stopping = False
        self.memory = MemoryState()
        self.audit: AuditState | None = None
        self.last_check: CheckState | None = None
        self.snapshot: dict[tuple[Coordinates, str], dict[int, str]] = {}
        self.audit_pending = False
        self.update: OpenUpdate | None = None
        self.received: Received | None = None
        self.prefetched: list[PrefetchState] = []
        self.audited_at = clock.monotonic()
        self.completed = 0
        self._previous_until: float | None = None
        self._loaded_after = 0
        self.restarts = 0
        self.loaded_at = 0.0
        self.seq = 1
        self.poked = asyncio.Event()
        self.probed = asyncio.Event()
        self._probe = memory
        self.offload = offload
        self.reread: Callable[[], Assignment | None] = lambda: None
        self._journal_offload = journal_offload
        self._recording = asyncio.Lock()
        self._owed: tuple[Record, ...] = ()
        self._reading: asyncio.Future[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        gate.on_change(self.touch)
        companion.attach(self)

    @property
    def ready(self) -> bool:
        """True when new requests should be routed here; a pause of milliseconds does not change it."""
        serves = self.live is not None and not self.reason and not self.drift.names
        return serves and not self.stopping and self.engine.able

    @property
    def etag(self) -> str:
        """The entity tag of the state, quotes included."""
        return f'"{self.settings.boot_id}.{self.seq}"'

    @property
    def epoch(self) -> int:
        """The highest lease epoch of a leader that was obeyed here."""
        accepted = self.journal.state.accepted
        return accepted.epoch if accepted is not None else 0

    @property
    def registrations(self) -> Mapping[str, Registered]:
        """What the journal remembers of adapters, by name."""
        return self.journal.state.adapters

    @property
    def assigned(self) -> Assigned | None:
        """The assignment of adapters that the journal remembers."""
        return self.journal.state.assigned

    async def assignment(self) -> Assignment | None:
        """Read the assignment file; None where there is none.

        Raises:
            BadRequest: it cannot be read.
        """
        found: Assignment | None = await self.offload(self.reread)
        return found

    def touch(self) -> None:
        """Something visible changed."""
        self.seq += 1

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run work of our own: it outlives whoever asked for it."""
        task = self._start(work)
        task.add_done_callback(_report)

    async def see_through(self, work: Coroutine[Any, Any, None]) -> None:
        """Wait for work of our own, which goes on when the caller goes away."""
        await asyncio.shield(self._start(work))

    async def end_tasks(self) -> None:
        """Cancel all work of our own and wait for it."""
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @contextmanager
    def preemptible(self) -> Iterator[asyncio.Future[None]]:
        """Mark a long reading of live tensors: the future gets an exception when somebody needs the engine."""
        self._reading = asyncio.get_running_loop().create_future()
        try:
            yield self._reading
        finally:
            self._reading = None

    def preempt(self) -> None:
        """A swap or a recovery waits for the mutex: whoever only reads must give way."""
        if self._reading is not None and not self._reading.done():
            self._reading.set_exception(Busy("a swap or a recovery came first", advice="try again when it has ended"))
            self._reading.exception()  # looked at: nobody may be waiting, and that is fine

    async def record(self, *records: Record) -> None:
        """Write to the journal, after what could not be written earlier, without blocking the event loop.

        Raises:
            Unavailable: the disk does not take it.
        """
        async with self._recording:  # in the order of the calls
            owed = (*self._owed, *records)
            if not owed:
                return
            seconds = self.settings.journal_seconds
            try:
                await within(self.clock, seconds, self._append(owed))
            except TimeoutError:
                raise Unavailable(
                    f"the journal was not written within {seconds:g} s",
                    advice="look at the volume of the state directory",
                ) from None
            self._owed = ()

    async def _append(self, records: tuple[Record, ...]) -> None:
        await self._journal_offload(self.journal.append, *records)

    async def record_owed(self, *records: Record) -> None:
        """Write what has happened already: where that fails, it is tried again before anything else is written."""
        try:
            await self.record(*records)
        except ModelswapError as failure:
            if records:
                log.error("what happened is not in the journal yet: %s", failure.message)
            self._owed += records

    async def bounded(
        self, what: str, work: Coroutine[Any, Any, Any], seconds: float, *, unless: asyncio.Future[None] | None = None
    ) -> Any:
        """Return the result of work, or a typed error when it takes too long."""
        try:
            return await within(self.clock, seconds, work, unless=unless)
        except TimeoutError:
            raise NotReady(f"{what} did not answer within {seconds:g} s", advice="it is tried again") from None

    async def refresh_memory(self) -> None:
        """Ask the engine and the container where the memory is; the holder of the mutex calls it."""
        await self._bound_memory(await self.engine.memory())
        swaps = self.completed - self._loaded_after
        self.growth = observe(self.growth, self.memory, swaps=swaps, limits=self.settings.growth)

    async def refresh_limits(self) -> None:
        """Ask the container alone: the engine is dead and holds nothing."""
        await self._bound_memory(MemoryState())

    async def room(self) -> int:
        """Ask the container alone how many bytes may still be used; -1 when nothing bounds it."""
        bound: Memory = await self.offload(self._probe.read)
        return bound.available

    async def _bound_memory(self, memory: MemoryState) -> None:
        bound: Memory = await self.offload(self._probe.read)
        known = [figure for figure in (memory.available_bytes, bound.available) if figure >= 0]
        limits = [figure for figure in (memory.limit_bytes, bound.limit) if figure >= 0]
        self.memory = msgspec.structs.replace(
            memory, available_bytes=min(known, default=-1), limit_bytes=min(limits, default=-1)
        )

    def troubled(self, reason: str, message: str) -> None:
        """Say why the engine is not ready."""
        self.reason, self.message = reason, message
        self.touch()

    def healthy(self) -> None:
        """Say that nothing keeps the engine from being ready, but for live tensors that are known to be wrong."""
        if self.drift.names:
            self.troubled("Drifted", self.drift.message)
        elif self.reason:
            self.troubled("", "")

    def drifted(self, names: Iterable[str], error: ErrorBody) -> None:
        """Live tensors are not what they must be: nobody is let in, or answered, until they are repaired."""
        if not self.drift.names:
            self.poked.set()
        self.drift.names, self.drift.message = tuple(names), error.message
        self.gate.close(_DRIFT_HOLD, allowance=_DRIFT_PATIENCE)
        self.troubled("Drifted", error.message)

    def sound(self) -> None:
        """The live tensors have been proved to be what they must be."""
        self.drift.repaired += bool(self.drift.names)
        self._forget_drift()
        if self.reason == "Drifted":
            self.healthy()

    def _forget_drift(self) -> None:
        self.drift.names, self.drift.message, self.drift.attempts = (), "", 0
        self.gate.open(_DRIFT_HOLD)

    def loaded(self) -> None:
        """A whole version was loaded: memory is as after a start, and every tensor was proved."""
        self.growth, self._loaded_after = Growth(), self.completed
        self.sound()

    @property
    def previous_seconds_left(self) -> float | None:
        """How long the retained version will be kept; None when there is none, or no bound."""
        if self.previous is None or self._previous_until is None:
            return None
        return max(0.0, self._previous_until - self.clock.monotonic())

    def publish(self, version: Version, *, previous: Version | None) -> None:
        """Make a proved version the live one; instant, and never in the middle of anything."""
        if previous is not self.previous:
            seconds = self.settings.previous_seconds
            self._previous_until = self.clock.monotonic() + seconds if seconds > 0 else None
        self.live, self.previous = version, previous
        for listener in self.listeners:
            listener.activate(version.ref)
        self.companion.activate(version.digest)
        self.touch()

    def accept(self) -> None:
        """Let requests in again; a process that is ending goes on refusing them."""
        if not self.stopping:
            self.gate.accept()

    def unpublish(self, reason: str, error: ErrorBody, *, quarantine: bool = False) -> None:
        """No version can be served: everybody is refused until a whole version has been loaded."""
        self.live = self.previous = None
        self.quarantined = self.quarantined or quarantine
        self._forget_drift()  # what is not served any more is not repaired
        self.troubled(reason, error.message)
        refusal = NotReady(
            f"this engine cannot serve: {error.message}",
            advice="try another replica",
            details={"retryAfterSeconds": "5"},
        )
        self.gate.refuse(refusal.body())

    async def forget(self, *digests: str) -> None:
        """Drop what was prepared for versions, as far as they are neither live nor retained."""
        for digest in set(digests) - self.held():
            for listener in self.listeners:
                listener.discard(digest)
        await self.store.prune(self.held())
        await self.retain()

    async def retain(self) -> None:
        """Tell the sources which versions are in use: live, retained, about to be either, or fetched ahead."""
        ahead = {found.digest for found in self.prefetched if found.digest}
        await self.sources.retain(self.held() | self.store.pinned() | ahead)

    def serves(self, digest: str) -> bool:
        """Say whether a request that was let in to this version can be handed to the engine."""
        return any(version is not None and version.digest == digest for version in (self.live, self.retiring))

    def held(self) -> set[str]:
        """Return the digests of the live and the retained version."""
        return {version.digest for version in (self.live, self.previous) if version is not None}

    async def finish(self, operation: Operation, state: SwapState, *, error: ErrorBody | None = None) -> None:
        """End an operation: first in the journal, so that its answer stays the same, then for those who watch.

        The outcome comes last: a crash that keeps only the first record must not end the doubt without saying what
        is served.
        """
        status = machine.end(
            operation.status,
            state,
            at=self.clock.timestamp(),
            error=error,
            total_seconds=self.clock.monotonic() - operation.started,
        )
        records: tuple[Record, ...] = (Outcome(status=status),)
        if state.succeeded and self.live is not None:
            self.completed += operation is not self.operations.own
            # A version that was sent cannot be loaded again: a restart goes back to the last one that can.
            records = (Served(version=self.live.ref), *records) if self.live.lasts else records
            accepted = self.journal.state.accepted
            if accepted is not None and accepted.operation_id == operation.id:
                records = (*records, msgspec.structs.replace(accepted, done=True))
        await self.record_owed(*records)
        operation.show(status)

    def current_status(self) -> SwapStatus | None:
        """Return the latest operation, of this process or before it."""
        shown = self.operations.current or self.operations.latest
        if shown is not None:
            return shown.shown()
        return self.journal.state.outcomes[-1] if self.journal.state.outcomes else None

    def live_ref(self) -> VersionRef | None:
        """Return the version that serves."""
        return self.live.ref if self.live is not None else None

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.error("a background task failed", exc_info=task.exception())
