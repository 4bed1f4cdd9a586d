"""A slot in one process and in no time: pods that obey, fail and die, under the real planner and status.

A stand-in for the cluster, for tests of decisions only; the pods are those of `sim_pod`. It keeps what the API server
would keep (object, status, assignment); the operator's memory can be lost at any moment (`kill_operator`).
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from modelswap_engine.protocol.assignment import Assignment
from modelswap_engine.protocol.errors import ErrorBody, ModelswapError, SignatureMissing
from modelswap_engine.protocol.messages import Plan, ProceedRequest, VersionRef
from modelswap_engine.protocol.prefetch import PrefetchPhase, PrefetchState
from modelswap_operator.api.modelversion import (
    Canary,
    ModelVersionSpec,
    ModelVersionStatus,
    OnFailure,
    Rollout,
    Source,
)
from modelswap_operator.effects.engine_client import EngineTimeout
from modelswap_operator.planning.actions import (
    Action,
    AdapterOrder,
    AskAdapters,
    AskPlans,
    CancelSwaps,
    FailedAttempt,
    LookAtSource,
    NoteAttempts,
    PrefetchOrder,
    RecordFailure,
    RenewHolds,
    SendAdapters,
    SendPrefetch,
    StartSwaps,
    SwapOrder,
    UntoldPod,
    Wait,
    WriteAssignment,
)
from modelswap_operator.planning.assess import Assessment
from modelswap_operator.planning.changes import ChangePolicy
from modelswap_operator.planning.modelversion import plan
from modelswap_operator.planning.progress import expired
from modelswap_operator.planning.snapshot import Adapter, Asked, Ledger, Pod, Snapshot, Unreachable
from modelswap_operator.runtime.memory import SlotMemory
from modelswap_operator.status.summarize import summarize
from tests.support.sim_adapters import SimAdapters
from tests.support.sim_pod import CATALOG, GOOD, Release, SimPod

START = datetime(2026, 1, 1, tzinfo=UTC)


class World:
    """The cluster, seen by one slot's planner."""

    def __init__(
        self,
        *,
        pods: int = 2,
        serving: str | None = "1.0",
        version: str = "1.0",
        max_unavailable: int | str = 1,
        on_failure: OnFailure = OnFailure.ROLLBACK,
        canary: Canary | None = None,
        pinned: bool = False,
        protocol: int = 1,
    ) -> None:
        self.protocol = protocol
        self.now = START
        self.uid = "owner-1"
        self.generation = 1
        self.deleted = False
        self.requested_at = ""
        self.epoch = 1
        self.pinned = pinned
        self.spec = ModelVersionSpec(
            served_model_name="m",
            version=version,
            source=self._source(version),
            rollout=Rollout(max_unavailable=max_unavailable, on_failure=on_failure, canary=canary or Canary()),
        )
        self.status = ModelVersionStatus()
        self.status_writes = 0
        self.asked = Asked()
        self.policy = ChangePolicy()
        self.not_now: ErrorBody | None = None
        self.unsigned: set[str] = set()
        self.origin: dict[str, str] = {}
        self.hanging: set[str] = set()
        self.moved: dict[str, str | ErrorBody] = {}
        self.written: dict[str, int] = {}
        self.assignment: Assignment | None = None
        self.ledger = Ledger()
        self.memory = SlotMemory()
        self.ever_ready: set[str] = set()
        self.adapters: tuple[Adapter, ...] = ()
        self.contents: dict[str, str | ErrorBody] | None = None
        self.plan_lines: tuple[str, ...] = ()
        self.log: list[Action] = []
        self.revisions: list[int] = []
        self._made = 0
        self.pods: list[SimPod] = []
        for _ in range(pods):
            self.add_pod(CATALOG[serving] if serving else None)

    def _source(self, version: str) -> Source:
        release = CATALOG[version]
        return Source(uri=release.uri, digest=release.digest if self.pinned else "")

    # What users and fate do

    def bump(self, version: str, **changes: Any) -> None:
        """Edit the spec; an edit that changes nothing is none."""
        spec = msgspec.structs.replace(self.spec, version=version, source=self._source(version), **changes)
        if spec != self.spec:
            self.spec = spec
            self.generation += 1

    def edit(self, **changes: Any) -> None:
        self.bump(self.spec.version, **changes)

    def add_pod(self, serving: Release | None = None, *, ready: bool = True) -> SimPod:
        self._made += 1
        pod = SimPod(name=f"pod-{self._made}", uid=f"uid-{self._made}", live=serving, ready=ready, ever_ready=ready)
        pod.protocol = self.protocol
        if self.assignment is not None and self.assignment.stable is not None and serving is None:
            stable = CATALOG[self.assignment.stable.version]
            pod.live = stable if stable in GOOD.values() else None
            pod.ready = pod.ever_ready = ready and pod.live is not None  # what it cannot load keeps it down
        if self.contents is not None:
            pod.adapters = SimAdapters(pod_uid=pod.uid, contents=self.contents)
            pod.adapters.restart(self.assignment, pod.live.digest if pod.live is not None else "")
        self.pods.append(pod)
        return pod

    def kill_operator(self) -> None:
        """Everything that was only in the process is gone; the next one has a higher epoch."""
        self.memory = SlotMemory()
        self.ever_ready = set()
        self.epoch += 1

    @property
    def clock(self) -> float:
        """Seconds since the beginning, by which leases end."""
        return (self.now - START).total_seconds()

    # What the operator does

    def snapshot(self) -> Snapshot:
        for pod in self.pods:
            pod.age(self.clock)
        self.ever_ready |= {p.uid for p in self.pods if p.ready}
        shown = {p.uid for p in self.status.pods if p.state != "Starting"}
        pods = tuple(
            Pod(
                name=p.name,
                uid=p.uid,
                ip="127.0.0.1",
                port=8001,
                ready=p.ready,
                group=p.group,
                ever_ready=p.uid in self.ever_ready | shown,
                engine=p.state() if p.reachable else self._silent(p),
            )
            for p in self.pods
        )
        base = Snapshot(
            namespace="default",
            slot="slot",
            epoch=self.epoch,
            uid=self.uid,
            generation=self.generation,
            deleted=self.deleted,
            requested_at=self.requested_at,
            spec=None if self.deleted else self.spec,
            status=self.status,
            pods=pods,
            adapters=self.adapters,
            assignment=self.assignment,
            ledger=self.ledger,
            asked=self.asked,
            policy=self.policy,
        )
        return self.memory.take_in(base, self.now)

    def _silent(self, pod: SimPod) -> Unreachable:
        pod.silences += 1
        return Unreachable(
            reason="EngineUnreachable",
            message="no connection",
            since=self.now,
            attempts=pod.silences,
            retry_at=self.now + timedelta(seconds=1),
        )

    def run_pass(self) -> Action:
        """One pass, as the operator makes it."""
        snapshot = self.snapshot()
        action = plan(snapshot, self.now)
        self.log.append(action)
        self._perform(snapshot, action)
        if not snapshot.deleted:
            after = summarize(snapshot, action, self.now)
            self.status_writes += after != self.status
            self.status = after
        return action

    def _perform(self, snapshot: Snapshot, action: Action) -> None:
        match action:
            case WriteAssignment():
                self.revisions.append(action.assignment.revision)
                self.assignment, self.ledger = action.assignment, action.ledger
            case StartSwaps():
                self.memory.sent(action.orders)
                for order in action.orders:
                    self._note(snapshot, self._call(order))
            case RenewHolds():
                for renewed in action.orders:
                    sim = self._sim(renewed.pod.uid)
                    if sim.reachable:
                        sim.renew(renewed.operation_id, renewed.request, self.clock)
            case SendPrefetch():
                unreached = [o for o in action.orders if not self._sim(o.pod.uid).reachable]
                for ahead in action.orders:
                    if ahead not in unreached:
                        targets = ahead.request.targets
                        self._sim(ahead.pod.uid).prefetch = [
                            PrefetchState(target=target, phase=PrefetchPhase.FETCHED) for target in targets
                        ]
                self.memory.asked_ahead(action.orders, [_unreached(order) for order in unreached], now=self.now)
            case CancelSwaps():
                for item in action.orders:
                    self._sim(item.pod.uid).cancel(item.operation_id)
            case NoteAttempts():
                self._note(snapshot, action.attempts)
            case AskPlans():
                for asked in action.orders:
                    self.memory.asked(asked)
                    sim = self._sim(asked.pod.uid)
                    if sim.goes_silent or asked.request.target.uri in self.hanging:
                        sim.reachable, sim.goes_silent = not sim.goes_silent, False
                        continue
                    answer = self._refused(asked.request.target) or self._answer(
                        asked.key.version, asked.key.from_digest
                    )
                    self.memory.answered(asked, answer, now=self.now, random=0.5)
            case LookAtSource():
                self.memory.looking(action)
                sim = self._sim(action.pod.uid)
                found = (
                    self._adapters(action.pod).look(action.request)
                    if action.adapter
                    else sim.look(action.request, self.moved, self.written)
                )
                self.memory.looked(action, found, now=self.now, random=0.5)
            case SendAdapters():
                untold = [failed for order in action.orders if (failed := self._tell(order))]
                self.memory.adapters.tell(action.orders, untold, now=self.now, random=0.5)
            case AskAdapters():
                for question in action.orders:
                    self.memory.adapters.looking_up(question)
                    hanging = [key for key in question.keys if key.uri in self.hanging]
                    if not hanging or len(question.keys) > 1:  # several are given up soon
                        told = self._adapters(question.pod).resolve(question.request.sources, late=self.hanging)
                        self.memory.adapters.looked_up(question, told, now=self.now, random=0.5)
            case RecordFailure() | Wait():
                pass

    def _tell(self, order: AdapterOrder) -> UntoldPod | None:
        try:
            self._adapters(order.pod).assign(order.request)
        except ModelswapError as error:
            return UntoldPod(pod=order.pod, revision=order.request.fence.revision, error=error.body())
        return None

    def _adapters(self, pod: Pod) -> SimAdapters:
        found = self._sim(pod.uid).adapters
        assert found is not None
        return found

    def _note(self, snapshot: Snapshot, attempts: tuple[FailedAttempt, ...]) -> None:
        slow = snapshot.spec is not None and expired(Assessment(snapshot), self.now)
        self.memory.note(attempts, now=self.now, random=0.5, slow=slow)

    def _call(self, order: SwapOrder) -> tuple[FailedAttempt, ...]:
        pod, request = order.pod, order.request
        sim = self._sim(pod.uid)
        try:
            if order.goes_on:
                sim.proceed(request.operation_id, ProceedRequest(fence=request.fence))
            else:
                sim.swap(request, self.clock)
            if sim.goes_silent:
                sim.goes_silent = sim.reachable = False
                raise EngineTimeout(f"pod {pod.name} did not answer")
        except ModelswapError as error:
            failed = FailedAttempt(
                pod=pod,
                operation_id=request.operation_id,
                revision=request.fence.revision,
                digest=request.target.digest,
                error=error.body(),
            )
            return (failed,)
        return ()

    def _refused(self, target: VersionRef) -> ErrorBody | None:
        asked = target.verification is not None and target.verification.required
        unsigned = SignatureMissing(f"{target.uri} has no signature", advice="sign it")
        return unsigned.body() if asked and target.version in self.unsigned else None

    def _answer(self, version: str, from_digest: str) -> Plan:
        release = CATALOG[version]
        error = release.refused or self.not_now
        refusals = [error] if error is not None else []
        return Plan(
            from_digest=from_digest,
            to_digest=release.digest,
            refusals=refusals,
            changed_tensors=3,
            total_tensors=10,
            changed_bytes=300,
            total_bytes=1000,
            groups=2,
            bytes_to_fetch=250,
            memory_needed=300,
            adapters=list(self.plan_lines),
            provenance=self.origin,
            signed_by="key release.pub" if self.origin else "",
        )

    def _sim(self, uid: str) -> SimPod:
        return next(p for p in self.pods if p.uid == uid)

    def write_again(self, uri: str) -> None:
        """Upload the same bytes again: other files to each pod that resolved them before."""
        self.written[uri] = self.written.get(uri, 0) + 1
        for pod in self.pods:
            pod.outdated |= pod.live is not None and pod.live.uri == uri

    # Time

    def tick(self) -> None:
        for pod in self.pods:
            pod.tick()
            if pod.live is None:
                pod.load(self.assignment)
        self.now += timedelta(milliseconds=500)

    def settle(self, limit: int = 400) -> None:
        """Let passes and steps alternate until nothing is left to do; fails when that never happens."""
        for _ in range(limit):
            action = self.run_pass()
            if not isinstance(action, Wait):
                continue
            if any((p.busy and not p.held) or p.loading or p.live is None for p in self.pods):
                self.tick()
                continue
            if action.until is None:
                return
            self.now = max(action.until, self.now)
        raise AssertionError(f"never settled; last actions: {[type(a).__name__ for a in self.log[-8:]]}")

    # What tests ask

    def condition(self, kind: str) -> tuple[str, str] | None:
        return next(((c.status, c.reason) for c in self.status.conditions if c.type == kind), None)

    def serving(self) -> list[str]:
        return [p.live.version if p.live else "" for p in self.pods]

    def actions(self, kind: type[Any]) -> list[Any]:
        return [a for a in self.log if isinstance(a, kind)]


def _unreached(order: PrefetchOrder) -> FailedAttempt:
    error = ErrorBody(code="EngineTimeout", message="no answer", retryable=True)
    return FailedAttempt(pod=order.pod, operation_id="", revision=0, digest="", error=error)
