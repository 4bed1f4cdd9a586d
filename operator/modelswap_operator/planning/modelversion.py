"""The planner of a slot: a snapshot and the time in, the one next action out.

The rules are tried in order and the first that has something to do wins. Nothing is remembered between passes except
what the snapshot carries, so a crash between any two passes costs a repeated question, never a wrong decision.
"""

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta

from msgspec import structs

from modelswap_engine.protocol.adapters import AdapterChange, OnIncompatible
from modelswap_engine.protocol.assignment import AssignmentTarget
from modelswap_engine.protocol.holding import Hold
from modelswap_engine.protocol.messages import Fence, HoldRequest, SwapRequest, SwapStatus, VersionRef
from modelswap_engine.protocol.policy import Checks
from modelswap_operator.planning import adapter_steps, assignment, canary, failures, prefetch, staging, watching
from modelswap_operator.planning.actions import (
    Action,
    AskPlans,
    CancelOrder,
    CancelSwaps,
    HoldOrder,
    NoteAttempts,
    PlanOrder,
    RecordFailure,
    RenewHolds,
    SendAdapters,
    SendPrefetch,
    StartSwaps,
    SwapOrder,
    Wait,
)
from modelswap_operator.planning.adapters import Adapters
from modelswap_operator.planning.assess import Assessment, followed, highest_epoch, proved, running
from modelswap_operator.planning.operations import operation_id
from modelswap_operator.planning.progress import at_zero_from, deadline
from modelswap_operator.planning.rollout import choose, unavailable, wave
from modelswap_operator.planning.snapshot import PlanKey, PlanResult, Pod, Snapshot, Unreachable

Rule = Callable[[Assessment, datetime], Action | None]

POLL_SECONDS = 0.5
"""How often pods with an operation in flight are read."""

SETTLE_SECONDS = 2.0
"""How often pods are read that load, or have not proved yet what they loaded."""

SUPERSEDED, GIVEN_BACK = "superseded by a newer decision", "what it staged is given back for now"

PLANS_SHOWN = 5
"""How many different starting versions a suspended slot plans for."""


def plan(snapshot: Snapshot, now: datetime) -> Action:
    """Return the next action for a slot."""
    if highest_epoch(snapshot) > snapshot.epoch:
        return Wait(on="a newer operator decides")
    if snapshot.deleted:
        return assignment.release(snapshot) or Wait(on="the object is gone")
    if snapshot.spec is None:
        return Wait(on="the spec cannot be read")
    kept = structs.replace(snapshot.status, failures=failures.remembered(snapshot))
    a = Assessment(replace(snapshot, status=kept))
    if a.grouped is not None:
        return Wait(on="a pod is one of a group")
    adapters = Adapters(a)
    rules: tuple[Rule, ...] = (
        (_note, _record_plan_failure, _give_back, _ask)
        if a.spec.suspend
        else (
            _record,
            _note,
            _cancel,
            _assign,
            *_of_adapters(adapters),
            _start,
            _stage,
            _renew,
            prefetch.send,
            watching.look,
            lambda _, at: watching.look_at_adapter(adapters, at),
        )
    )
    return next((action for rule in rules if (action := rule(a, now))), None) or _wait(adapters, now)


def rest(action: Action, now: datetime) -> float | None:
    """Return the seconds until the next look after an action; None: not before something happens."""
    match action:
        case Wait():
            return (action.until - now).total_seconds() if action.until is not None else None
        case CancelSwaps() | SendAdapters() | RenewHolds() | SendPrefetch():
            return POLL_SECONDS  # a pod takes a moment to do it, and says the same until then
        case _:
            return 0.0


def _record(a: Assessment, now: datetime) -> Action | None:
    found = failures.new_failure(a, now)
    return RecordFailure(failure=found) if found is not None else None


def _record_plan_failure(a: Assessment, now: datetime) -> Action | None:
    found = failures.plan_failure(a, now)
    return RecordFailure(failure=found) if found is not None else None


def _note(a: Assessment, now: datetime) -> Action | None:
    found = failures.new_attempts(a)
    return NoteAttempts(attempts=found) if found else None


def _cancel(a: Assessment, now: datetime) -> Action | None:
    """Abort what is no longer wanted, while that can still be done without touching live weights."""
    return _end(a, now, lambda pod, operation: _why_not(a, pod, operation, now))


def _give_back(a: Assessment, now: datetime) -> Action | None:
    """Have pods drop what they hold staged, whatever else they do."""
    return _end(a, now, lambda pod, operation: GIVEN_BACK if operation.hold is not None else "")


def _end(a: Assessment, now: datetime, why: Callable[[Pod, SwapStatus], str]) -> Action | None:
    orders = []
    for pod in a.present:
        operation = running(pod)
        if operation is None or not operation.state.reversible or not (cause := why(pod, operation)):
            continue
        if a.external and operation.revision == 0:
            continue  # a trainer's
        revision = a.snapshot.assignment.revision if a.snapshot.assignment is not None else 0
        orders.append(CancelOrder(pod=pod, operation_id=operation.operation_id, revision=revision, why=cause))
    known = a.snapshot.memory.attempts
    due = (o for o in orders if o.pod.uid not in known or known[o.pod.uid].retry_at <= now)
    found = tuple(due)
    return CancelSwaps(orders=found) if found else None


def _why_not(a: Assessment, pod: Pod, operation: SwapStatus, now: datetime) -> str:
    """Return why an operation is to end; empty when it is wanted."""
    if not _wanted(a, pod, operation.target):
        return SUPERSEDED
    return GIVEN_BACK if operation.hold is not None and not staging.kept(a, pod, operation, now) else ""


def _wanted(a: Assessment, pod: Pod, target: VersionRef) -> bool:
    desired = a.desired(pod)
    if desired is not None:
        return target.digest in ("", desired.digest)
    if a.failure is None and a.target is None:
        return (target.version, target.uri) == (a.spec.version, a.spec.source.uri)
    if a.failure is None and a.target is not None and a.owned:
        return target.digest == a.target.digest  # in flight already; the assignment is about to say so
    return not a.owned


def _assign(a: Assessment, now: datetime) -> Action | None:
    return assignment.decide(a, now)


def _of_adapters(adapters: Adapters) -> tuple[Rule, ...]:
    """What is done for the adapters, with one look at all of them, before any pod starts a swap."""
    return (
        lambda a, now: adapter_steps.decide(adapters),
        adapter_steps.send,
        _ask,
        lambda a, now: adapter_steps.ask(adapters, now),
    )


def _ask(a: Assessment, now: datetime) -> Action | None:
    """Resolve the source through one pod; while suspended, plan from every version that is live somewhere."""
    if a.failure is not None or (a.target is not None and not a.spec.suspend):
        return None
    able = {p.name for p in a.present if staging.able(p)}

    def awaited(result: PlanResult) -> bool:
        # A node that is gone does not break its connections: without this, its pod would be waited for to the end.
        return (result.pending and result.pod in able) or (result.retry_at or now) > now

    if not a.spec.suspend and any(map(awaited, a.plans.values())):
        return None
    asked = {key.from_digest: result for key, result in a.plans.items()}
    orders: list[PlanOrder] = []
    refused = {result.pod for result in a.plans.values() if result.error is not None}
    for pod in sorted(a.counted, key=lambda p: (p.name in refused, running(p) is not None, not p.ready, p.name)):
        live = pod.state.live if pod.state is not None else None
        if live is None or live.digest in {o.key.from_digest for o in orders}:
            continue
        if live.digest == a.target_digest and a.target is not None:
            continue
        before = asked.get(live.digest)
        if before is not None and (before.plan is not None or awaited(before)):
            continue
        orders.append(_plan_order(a, pod, live.digest))
    limit = PLANS_SHOWN if a.spec.suspend else 1
    return AskPlans(orders=tuple(orders[:limit])) if orders else None


def _plan_order(a: Assessment, pod: Pod, from_digest: str) -> PlanOrder:
    source = a.spec.source
    return PlanOrder(
        pod=pod,
        key=PlanKey(a.spec.version, source.uri, source.digest, from_digest),
        request=a.spec.plan_request(),
    )


def _start(a: Assessment, now: datetime) -> Action | None:
    if a.held(now):
        return None
    pods = choose(
        (p for p in a.counted if _pending(a, p, now)),
        counted=a.counted,
        idle=a.snapshot.memory.idle,
        max_unavailable=a.spec.rollout.max_unavailable,
        at_once=wave(a),
    )
    return StartSwaps(orders=tuple(_swap_order(a, pod) for pod in pods)) if pods else None


def _pending(a: Assessment, pod: Pod, now: datetime) -> bool:
    """Say whether a pod is to be swapped and can be asked to."""
    desired, current, state = a.desired(pod), a.snapshot.assignment, pod.state
    if desired is None or current is None or state is None or state.live is None:
        return False
    if state.quarantined or (running(pod) is not None and staging.held(pod, desired.digest) is None):
        return False
    told = state.revision >= current.revision
    if a.external and followed(state, desired.digest):
        return False  # it came there; what a trainer made of it since is not ours to put right
    if state.live.digest == desired.digest and (told or (state.live.version == desired.version and not a.external)):
        return False  # there already; another label, or that a trainer may change it, is told once
    attempt = a.snapshot.memory.attempts.get(pod.uid)
    return attempt is None or attempt.revision != current.revision or attempt.retry_at <= now


def _swap_order(a: Assessment, pod: Pod) -> SwapOrder:
    desired = a.desired(pod)
    if desired is None:
        raise ValueError(f"pod {pod.name}: nothing to swap to")
    order, there = _order(a, pod, desired), staging.held(pod, desired.digest)
    if there is None:
        return order
    return replace(order, request=structs.replace(order.request, operation_id=there.operation_id), goes_on=True)


def _order(a: Assessment, pod: Pod, wanted: AssignmentTarget, hold: Hold | None = None) -> SwapOrder:
    current, state = a.snapshot.assignment, pod.state
    if current is None or state is None:
        raise ValueError(f"pod {pod.name}: nobody can be asked")
    fence = Fence(pod_uid=pod.uid, owner_uid=a.snapshot.uid, epoch=a.snapshot.epoch, revision=current.revision)
    idle = a.snapshot.memory.idle
    peers = sum(not unavailable(p, idle) and p.uid != pod.uid for p in a.present)
    forward = wanted.digest == a.target_digest
    request = SwapRequest(
        operation_id=operation_id(owner_uid=a.snapshot.uid, revision=current.revision, pod_uid=pod.uid, state=state),
        fence=fence,
        target=VersionRef(
            version=wanted.version,
            uri=wanted.uri,
            digest=wanted.digest,
            credentials=wanted.credentials,
            verification=wanted.verification,
        ),
        traffic=a.spec.traffic.to_wire(peers_ready=peers),
        loading=a.spec.loading.to_wire(),
        # On the way back nothing is tried: the version was good, and what it would be compared with is not. Nor does
        # an adapter stand in the way.
        adapters=AdapterChange(on_incompatible=a.spec.adapters.on_incompatible if forward else OnIncompatible.UNLOAD),
        checks=a.spec.checks.to_wire() if forward else Checks(),
        hold=hold,
    )
    return SwapOrder(pod=pod, request=request, if_match=f'"{state.boot_id}.{state.seq}"')


def _stage(a: Assessment, now: datetime) -> Action | None:
    """Have pods stage what none of them serves yet."""
    if a.candidate is None or a.held(now):
        return None
    target, hold = a.candidate, staging.hold(a.spec)
    orders = tuple(_order(a, pod, target, hold) for pod in staging.next_wave(a, now))
    return StartSwaps(orders=orders) if orders else None


def _renew(a: Assessment, now: datetime) -> Action | None:
    orders = []
    for pod in staging.to_renew(a):
        operation, current = running(pod), a.snapshot.assignment
        if operation is None or current is None:
            continue
        fence = Fence(pod_uid=pod.uid, owner_uid=a.snapshot.uid, epoch=a.snapshot.epoch, revision=current.revision)
        request = HoldRequest(fence=fence, seconds=staging.LEASE_SECONDS)
        orders.append(HoldOrder(pod=pod, operation_id=operation.operation_id, request=request))
    return RenewHolds(orders=tuple(orders)) if orders else None


def _wait(adapters: Adapters, now: datetime) -> Wait:
    """Say when there may be something to do without anything happening first."""
    a = adapters.a
    times = [p.engine.retry_at for p in a.present if isinstance(p.engine, Unreachable)]
    times += [t.retry_at for t in a.snapshot.memory.attempts.values() if t.retry_at > now]
    times += [r.retry_at for r in a.plans.values() if r.retry_at is not None and r.retry_at > now]
    waits = {p.uid: staging.renewal(p) for p in a.present}
    times += [now + timedelta(seconds=seconds) for seconds in waits.values() if seconds is not None]
    if any(running(p) and waits[p.uid] is None for p in a.present):
        times.append(now + timedelta(seconds=POLL_SECONDS))
    times += prefetch.times(a, now)
    if any(_settling(p) for p in a.present) or prefetch.under_way(a):
        times.append(now + timedelta(seconds=SETTLE_SECONDS))
    shown = canary.soak(a, now)
    if shown is not None:
        poll = now + timedelta(seconds=canary.POLL_SECONDS)
        times.append(min(poll, shown.ends) if shown.ends is not None and shown.ends > now else poll)
    times += adapter_steps.times(adapters, now)
    held, ends, zero = a.held(now), deadline(a), at_zero_from(a)
    if zero is not None:
        times.append(zero)
    if held is not None and held.until is not None:
        times.append(held.until)
    if held is None and ends is not None and ends > now:
        times.append(ends)
    return Wait(until=min(times, default=None))


def _settling(pod: Pod) -> bool:
    """Say whether a reachable pod is about to change without being asked: loading, or proving what it loaded."""
    state = pod.state
    if state is None or state.quarantined:
        return False
    return state.live is None or not proved(state, state.live.digest)
