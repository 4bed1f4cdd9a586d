"""A pod and its engine as a value that obeys, fails and dies, without time and without a network.

A stand-in for tests of decisions only. Its fencing is the engine's own (`modelswap_engine.swap.fence`), the order of a
swap's states is the protocol's table. Refuses to know who decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec

from modelswap_engine.protocol.assignment import Assignment, AssignmentTarget
from modelswap_engine.protocol.engine_state import AnswerCount, EngineState, LoadFailure, RankState
from modelswap_engine.protocol.errors import ErrorBody, NotFound
from modelswap_engine.protocol.holding import HoldState
from modelswap_engine.protocol.looking import LookRequest, SourceLook
from modelswap_engine.protocol.messages import HoldRequest, ProceedRequest, SwapRequest, SwapStatus, VersionRef
from modelswap_engine.protocol.prefetch import PrefetchState
from modelswap_engine.protocol.states import TRANSITIONS, SwapState
from modelswap_engine.protocol.version import HOLDS_SINCE, LOOKS_SINCE
from modelswap_engine.swap import fence as fences
from tests.support.sim_adapters import SimAdapters

_PATH = (
    SwapState.PLANNED,
    SwapState.FETCHING,
    SwapState.STAGED,
    SwapState.PREPARED,
    SwapState.PAUSING,
    SwapState.COMMITTING,
    SwapState.COMMITTED,
    SwapState.VERIFIED,
    SwapState.SERVING,
)
assert all(b in TRANSITIONS[a] for a, b in pairwise(_PATH))


def digest(letter: str) -> str:
    return "sha256:" + letter * 64


@dataclass(frozen=True)
class Release:
    """A version that can be asked for. `refused` by the plan, or only by the swap (`refused_late`)."""

    version: str
    digest: str
    refused: ErrorBody | None = None
    refused_late: ErrorBody | None = None

    @property
    def uri(self) -> str:
        return f"file:///models/{self.version}"

    @property
    def target(self) -> AssignmentTarget:
        return AssignmentTarget(version=self.version, uri=self.uri, digest=self.digest)


GOOD = {
    "1.0": Release("1.0", digest("a")),
    "1.1": Release("1.1", digest("b")),
    "1.2": Release("1.2", digest("c")),
}
BAD = {
    "2.0": Release("2.0", digest("d"), refused=ErrorBody(code="DigestMismatch", message="other content")),
    "2.1": Release("2.1", digest("e"), refused_late=ErrorBody(code="ChecksFailed", message="not finite")),
}
CATALOG = GOOD | BAD
INCOMPATIBLE = ErrorBody(code="IncompatibleModel", message="another engine version here")


def _ref(target: AssignmentTarget | None) -> VersionRef:
    if target is None:
        return VersionRef()
    return VersionRef(version=target.version, uri=target.uri, digest=target.digest)


@dataclass(repr=False)
class SimPod:
    """One pod and its engine."""

    name: str
    uid: str
    live: Release | None
    ready: bool = True
    ever_ready: bool = True
    reachable: bool = True
    boot: int = 0
    seq: int = 0
    accepted: fences.Accepted | None = None
    operation: SwapStatus | None = None
    memory: dict[str, SwapStatus] = field(default_factory=dict)
    goes_silent: bool = False
    """It accepts the next swap or question, but its answer and what follows are lost on the way."""
    transient_faults: int = 0
    refuses: set[str] = field(default_factory=set)
    quarantined: bool = False
    reason: str = ""
    load_failure: LoadFailure | None = None
    silences: int = 0
    slow_to_stop: int = 0
    """So many cancels it acknowledges before it stops."""
    template: Release | None = None
    group: str = ""
    drifted: list[str] = field(default_factory=list)
    answers: dict[str, tuple[int, int]] | None = field(default_factory=dict)
    """Good and failed answers by digest since the process began; None: too old to count."""
    visits: int = 0
    """So many good answers between two looks at it."""
    adapters: SimAdapters | None = None
    protocol: int = 1
    """2: a swap can be asked to wait once it has staged."""
    lease: float = 0.0
    """Until when it waits, in seconds of the world's clock."""
    prefetch: list[PrefetchState] = field(default_factory=list)
    too_small: bool = False
    """There is no memory for a second version."""
    outdated: bool = False
    """The files that it resolved were written again since."""

    def __repr__(self) -> str:
        return self.name

    def state(self) -> EngineState:
        if self.visits and self.live is not None:
            self.answer(ok=self.visits)
        live = self.live
        proved = live.digest if live is not None and not self.quarantined else ""
        return EngineState(
            protocol_version=self.protocol,
            pod_uid=self.uid,
            boot_id=f"boot-{self.boot}",
            seq=self.seq,
            ready=self.ready,
            reason=self.reason,
            quarantined=self.quarantined,
            load_failure=self.load_failure if live is None else None,
            drifted=self.drifted,
            owner_uid=self.accepted.owner_uid if self.accepted else "",
            epoch=self.accepted.epoch if self.accepted else 0,
            revision=self.accepted.revision if self.accepted else 0,
            decided=self.accepted.target if self.accepted and self.accepted.done else None,
            live=VersionRef(version=live.version, uri=live.uri, digest=live.digest) if live and proved else None,
            operation=self.operation,
            answers=None
            if self.answers is None
            else [AnswerCount(digest=d, answered=ok, failed=bad) for d, (ok, bad) in self.answers.items()],
            ranks=[RankState(rank=0, boot_id=f"rank-{self.boot}", alive=True, digest=proved)],
            adapters=self.adapters.view(proved) if self.adapters is not None else None,
            prefetch=self.prefetch,
        )

    @property
    def busy(self) -> bool:
        return self.operation is not None and not self.operation.state.terminal

    @property
    def held(self) -> bool:
        """True while it waits to be told to go on, and has nothing else to do."""
        return self.busy and self.operation is not None and self.operation.hold is not None and self.operation.hold.held

    @property
    def disturbed(self) -> bool:
        """True while its operation may take it out of service."""
        return self.busy and self.operation is not None and self.operation.hold is None

    def age(self, now: float) -> None:
        """Show what is left of the lease, and end what waits when nothing is."""
        operation = self.operation
        if operation is None or operation.state.terminal or operation.hold is None:
            return
        left = max(0.0, self.lease - now)
        hold = msgspec.structs.replace(operation.hold, seconds_left=left)
        self.operation = msgspec.structs.replace(operation, hold=hold)
        if hold.held and not left:
            body = ErrorBody(code="HoldEnded", message="nobody renewed the lease", retryable=True)
            self._show(msgspec.structs.replace(self.operation, state=SwapState.ABORTED, error=body))

    def renew(self, operation_id: str, request: HoldRequest, now: float) -> None:
        """Renew the lease."""
        fences.check_pod(request.fence, self.uid)
        fences.check_control(request.fence, self.accepted)
        if self.operation is not None and self.operation.operation_id == operation_id:
            self.lease = now + request.seconds

    def proceed(self, operation_id: str, request: ProceedRequest) -> None:
        """Go on with what is staged."""
        fences.check_pod(request.fence, self.uid)
        operation = self.operation
        if operation is None or operation.operation_id != operation_id:
            raise NotFound(f"no operation {operation_id}")
        if operation.state.terminal or operation.hold is None:
            return
        fences.check_order(request.fence, self.accepted, target=operation.target)
        self.accepted = fences.accept(request.fence, self.accepted, operation_id=operation_id, target=operation.target)
        self._show(msgspec.structs.replace(operation, hold=None, revision=request.fence.revision))

    def swap(self, request: SwapRequest, now: float = 0.0) -> SwapStatus:
        known = self.memory.get(request.operation_id)
        if known is not None:
            return known
        fences.check_pod(request.fence, self.uid)
        fences.check_order(request.fence, self.accepted, target=request.target)
        assert request.hold is None or self.protocol >= HOLDS_SINCE, "an old sidecar would not wait"
        assert not self.busy, "the planner must not start a second operation on a pod"
        self.accepted = fences.accept(
            request.fence, self.accepted, operation_id=request.operation_id, target=request.target
        )
        status = SwapStatus(
            operation_id=request.operation_id,
            state=SwapState.PLANNED,
            revision=request.fence.revision,
            target=request.target,
            hold=HoldState(mark=request.hold.mark, seconds_left=request.hold.seconds) if request.hold else None,
        )
        self.lease = now + (request.hold.seconds if request.hold else 0.0)
        self._show(status)
        return status

    def look(
        self, request: LookRequest, moved: Mapping[str, str | ErrorBody], revisions: Mapping[str, int]
    ) -> SourceLook | ErrorBody:
        """Say what is at the place that the live version came from, by a table of what has changed there."""
        assert self.protocol >= LOOKS_SINCE, "an old sidecar does not know the route"
        assert self.live is not None
        assert (request.target.uri, request.target.digest) == (self.live.uri, self.live.digest)
        if not self.reachable:
            return ErrorBody(code="EngineTimeout", message="no answer", retryable=True)
        found = moved.get(request.target.uri, "") or ("other files (weights)" if self.outdated else "")
        revision = f"files-{revisions.get(request.target.uri, 0)}"
        return found if isinstance(found, ErrorBody) else SourceLook(found=found, revision=revision)

    def answer(self, *, ok: int = 0, failed: int = 0) -> None:
        """Clients ask for what is live."""
        assert self.answers is not None
        assert self.live is not None
        before = self.answers.get(self.live.digest, (0, 0))
        self.answers[self.live.digest] = (before[0] + ok, before[1] + failed)

    def train(self, letter: str) -> None:
        """A trainer changes the weights through the engine's own routes."""
        assert self.live is not None
        self.seq += 1
        self.live = Release(f"{self.live.version}+{letter}", digest(letter))
        status = SwapStatus(operation_id=f"trainer-{letter}-{self.seq}", state=SwapState.SERVING)
        self._show(msgspec.structs.replace(status, target=VersionRef(digest=digest(letter))))

    @property
    def loading(self) -> bool:
        """True while adapters are not as they were assigned."""
        return self.adapters is not None and self.live is not None and bool(self.adapters.open(self.live.digest))

    def tick(self) -> None:
        """Let the operation take one step, or end, and the adapters too."""
        if self.adapters is not None and self.live is not None:
            for _ in range(10):
                self.adapters.tick(self.live.digest)
        operation = self.operation
        if operation is None or operation.state.terminal:
            return
        release = CATALOG[operation.target.version]
        if release.digest == (self.live.digest if self.live else ""):
            self._arrive(release, operation)
            return
        error = release.refused or release.refused_late
        if release.version in self.refuses:
            error = INCOMPATIBLE
        if operation.state is SwapState.FETCHING and error is not None:
            self._show(msgspec.structs.replace(operation, state=SwapState.ABORTED, error=error))
            return
        if operation.state is SwapState.FETCHING and self.too_small:
            body = ErrorBody(
                code="InsufficientMemory", message="staging needs 9 MiB, 1 MiB may be used", retryable=True
            )
            self._show(msgspec.structs.replace(operation, state=SwapState.ABORTED, error=body))
            return
        if operation.state is SwapState.STAGED and operation.hold is not None:
            hold = msgspec.structs.replace(operation.hold, held=True)
            self._show(msgspec.structs.replace(operation, hold=hold))
            return
        if operation.state is SwapState.PAUSING and self.transient_faults:
            self.transient_faults -= 1
            body = ErrorBody(code="DrainTimeout", message="requests outlasted the drain", retryable=True)
            self._show(msgspec.structs.replace(operation, state=SwapState.ABORTED, error=body))
            return
        state = _PATH[_PATH.index(operation.state) + 1]
        if state is SwapState.SERVING:
            self._arrive(release, operation)
        else:
            self._show(msgspec.structs.replace(operation, state=state))

    def _arrive(self, release: Release, operation: SwapStatus) -> None:
        self.live, self.outdated = release, False
        if self.accepted is not None and self.accepted.operation_id == operation.operation_id:
            self.accepted = msgspec.structs.replace(self.accepted, done=True)
        self._show(msgspec.structs.replace(operation, state=SwapState.SERVING))

    def cancel(self, operation_id: str) -> None:
        if self.slow_to_stop:
            self.slow_to_stop -= 1
            return
        operation = self.operation
        if operation is None or operation.operation_id != operation_id or operation.state.terminal:
            return
        if operation.state.reversible:
            body = ErrorBody(code="Cancelled", message="cancelled by a call", retryable=True)
            self._show(msgspec.structs.replace(operation, state=SwapState.ABORTED, error=body))

    def restart(self) -> None:
        """The container restarts: what was in flight is gone, and what it is assigned is to be loaded."""
        self.boot += 1
        self.seq += 1
        self.operation = None
        self.answers = None if self.answers is None else {}
        self.quarantined = self.ready = self.outdated = False
        self.template = self.live or self.template
        self.live, self.reason = None, "Starting"

    def load(self, assignment: Assignment | None) -> None:
        """Try to load what is assigned, as the engine does at start and again until it succeeds."""
        target = assignment.target_for(self.uid) if assignment is not None else None
        if assignment is not None and target is assignment.candidate and self._refused_here(target):
            target = assignment.stable
        release = CATALOG[target.version] if target is not None else self.template
        self.seq += 1
        if release is None or release.refused or release.refused_late or release.version in self.refuses:
            self.reason = "LoadFailed"
            error = (release.refused or release.refused_late if release is not None else None) or INCOMPATIBLE
            self.load_failure = LoadFailure(target=_ref(target), error=error)
            return
        self.load_failure = None
        self.live, self.ready, self.ever_ready, self.reason = release, True, True, ""
        if self.adapters is not None:
            self.adapters.restart(assignment, release.digest)
        if assignment is not None and target is not None:
            self.accepted = fences.Accepted(
                owner_uid=assignment.owner_uid,
                epoch=assignment.epoch,
                revision=assignment.revision,
                target=_ref(target),
                done=True,
            )

    def _refused_here(self, target: AssignmentTarget | None) -> bool:
        """The journal's memory: the last decision was for this content, and the content was why it failed."""
        known = self.memory.get(self.accepted.operation_id) if self.accepted else None
        if known is None or known.error is None or target is None:
            return False
        return known.target.digest == target.digest and not known.error.retryable

    def _show(self, status: SwapStatus) -> None:
        self.seq += 1
        self.operation = status
        self.memory[status.operation_id] = status
