"""What all parts of the coordinator share: what is live, what must be, why the engine is not ready, and one mutex.

Only the holder of the mutex talks to the engine or changes ``live``. Each visible change raises ``seq``, which is half
of the state's entity tag.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import InitVar, dataclass
from typing import Any, Final, Protocol

import msgspec

from modelswap_engine.backends.port import Backend
from modelswap_engine.limits import MemoryProbe
from modelswap_engine.protocol.assignment import Assignment
from modelswap_engine.protocol.engine_state import AuditState, CheckState, LoadFailure
from modelswap_engine.protocol.errors import Busy, ErrorBody, ModelswapError, NotReady, Unavailable
from modelswap_engine.protocol.messages import Coordinates, SwapStatus, VersionRef
from modelswap_engine.protocol.prefetch import PrefetchState
from modelswap_engine.protocol.states import SwapState
from modelswap_engine.signing.policy import Signatures
from modelswap_engine.sources.port import Resolved
from modelswap_engine.swap import machine
from modelswap_engine.swap.clock import Clock, Offload, within
from modelswap_engine.swap.companion import Companion
from modelswap_engine.swap.drift import Drift
from modelswap_engine.swap.engine import Engine
from modelswap_engine.swap.gate import Gate
from modelswap_engine.swap.journal import Journal
from modelswap_engine.swap.listener import Encode, VersionListener
from modelswap_engine.swap.lock import UpdateLock
from modelswap_engine.swap.memory import MemoryWatch
from modelswap_engine.swap.operations import Operation, Operations
from modelswap_engine.swap.records import Assigned, Outcome, Record, Registered, Served
from modelswap_engine.swap.settings import SwapSettings
from modelswap_engine.swap.tasks import Tasks
from modelswap_engine.swap.trainer.open_update import OpenUpdate
from modelswap_engine.swap.trainer.received import Received
from modelswap_engine.swap.versions import Version, VersionStore

log: Final = logging.getLogger("modelswap.swap")


class Resolver(Protocol):
    """Whatever finds checkpoints by URI; see :class:`sources.port.Source`."""

    async def resolve(self, uri: str, *, digest: str = "", credentials: str = "") -> Resolved:
        """Find and validate the checkpoint at a URI."""

    async def retain(self, digests: Collection[str]) -> None:
        """Say which versions are in use."""


@dataclass(kw_only=True, eq=False)
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

    backend: Backend
    sources: Resolver
    journal: Journal
    gate: Gate
    clock: Clock
    settings: SwapSettings
    listeners: Sequence[VersionListener]
    encode: Encode | None
    companion: Companion
    signatures: Signatures
    offload: Offload
    journal_offload: Offload
    probe: InitVar[MemoryProbe]

    def __post_init__(self, probe: MemoryProbe) -> None:
        settings = self.settings
        self.engine = Engine(backend=self.backend, clock=self.clock, settings=settings)
        self.memory = MemoryWatch(self.engine, probe=probe, offload=self.offload, limits=settings.growth)
        self.lock = UpdateLock(clock=self.clock)
        self.drift = Drift(self.gate)
        self.operations = Operations(remembered=lambda key: self.journal.state.outcome(key))
        self.store = VersionStore(settings.state_dir / "versions", offload=self.offload)
        self.tasks = Tasks()
        self.mutex = asyncio.Lock()
        self.poked = asyncio.Event()
        self.probed = asyncio.Event()
        self.live: Version | None = None
        self.previous: Version | None = None
        self.retiring: Version | None = None
        self.away = ""
        self.reason = ""
        self.message = ""
        self.load_failure: LoadFailure | None = None
        self.quarantined = False
        self.closing = False
        self.stopping = False
        self.update: OpenUpdate | None = None
        self.received: Received | None = None
        self.prefetched: list[PrefetchState] = []
        self.audit: AuditState | None = None
        self.audit_pending = False
        self.last_check: CheckState | None = None
        self.snapshot: dict[tuple[Coordinates, str], dict[int, str]] = {}
        self.completed = 0
        self.restarts = 0
        self.loaded_at = 0.0
        self.seq = 1
        self._previous_until: float | None = None
        self._owed: tuple[Record, ...] = ()
        self._reading: asyncio.Future[None] | None = None
        self.audited_at = self.clock.monotonic()
        self.reread: Callable[[], Assignment | None] = lambda: None
        self._recording = asyncio.Lock()
        self.gate.on_change(self.touch)
        self.companion.attach(self)

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
        await self.journal_offload(self.journal.append, *records)

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
        """Ask where the memory is; the holder of the mutex calls it."""
        await self.memory.refresh(completed=self.completed)

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
        self.drift.found(names, error.message)
        self.troubled("Drifted", error.message)

    def sound(self) -> None:
        """The live tensors have been proved to be what they must be."""
        self.drift.mended()
        if self.reason == "Drifted":
            self.healthy()

    def loaded(self) -> None:
        """A whole version was loaded: memory is as after a start, and every tensor was proved."""
        self.memory.loaded(completed=self.completed)
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
        self.drift.forget()  # what is not served any more is not repaired
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
