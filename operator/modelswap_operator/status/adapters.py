"""The status of each LoRAAdapter of a slot (docs/adapters.md, kstatus). Pure.

An adapter counts as loaded in a pod when that pod's engine says so under its present boot id, by the content's digest,
on a base that every rank has proved, and when the pod follows a decision since which it is assigned without a break.
Everything else is not loaded, whatever was said before.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from types import MappingProxyType

from modelswap_engine.protocol.assignment import AssignedAdapter
from modelswap_engine.protocol.errors import ErrorBody
from modelswap_operator.api.loraadapter import ALL_PODS, AdapterPodStatus, AdapterTarget, LoRAAdapterStatus
from modelswap_operator.api.reasons import TEXTS, ConditionType, Reason
from modelswap_operator.planning.adapter_services import ServiceOutcome
from modelswap_operator.planning.adapter_steps import told
from modelswap_operator.planning.adapters import Adapters, Wish, is_of, serving, too_old
from modelswap_operator.planning.assess import Assessment, proved
from modelswap_operator.planning.errors import is_final, text
from modelswap_operator.planning.snapshot import Adapter, Pod, Snapshot, Unreachable
from modelswap_operator.status.conditions import Verdict, conditions, cut
from modelswap_operator.status.facts import adapter_drifted

LISTED = 50
_ORDER = ("Refused", "NoSource", "Unsupported", "Unreachable", "Retrying", "NotReady", "Loading", "Waiting", "Loaded")


@dataclass(frozen=True, kw_only=True)
class _Row:
    kind: str
    status: AdapterPodStatus
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class _Verdict:
    ready: bool | None
    reason: str
    message: str
    reconciling: str = ""
    stalled: bool = False

    @property
    def decided(self) -> bool:
        return not self.reconciling


def adapter_statuses(
    snapshot: Snapshot, now: datetime, services: Mapping[str, ServiceOutcome] = MappingProxyType({})
) -> Iterator[tuple[Adapter, LoRAAdapterStatus]]:
    """Yield what to write about each adapter of the slot; ``services`` is what became of those that have one."""
    if snapshot.deleted:
        for adapter in snapshot.adapters:
            message = f"there is no ModelVersion {snapshot.slot} in this namespace; the adapter is loaded once there is"
            missing = _Verdict(
                ready=False, reason=Reason.SLOT_NOT_FOUND, message=message, reconciling=Reason.SLOT_NOT_FOUND
            )
            yield adapter, _status(adapter, missing, now=now)
        return
    if snapshot.spec is None:
        return  # which of them are served is not known before the slot can be read
    adapters = Adapters(Assessment(snapshot))
    for wish in adapters.wishes:
        rows = _rows(adapters, wish, wish.item) if wish.item is not None else []
        target = _target(adapters.a, wish)
        name = wish.item.name if wish.item is not None else ""
        yield (
            wish.adapter,
            _status(
                wish.adapter,
                _routed(_verdict(adapters, wish, rows), services.get(wish.adapter.name)),
                rows=rows,
                wanted=_wanted(wish, rows),
                target=target,
                drifted=adapter_drifted(adapters.a, name, wish.adapter.status, target),
                service=services.get(wish.adapter.name),
                now=now,
            ),
        )


def _status(
    adapter: Adapter,
    verdict: _Verdict,
    *,
    now: datetime,
    rows: list[_Row] | None = None,
    wanted: int = 0,
    target: AdapterTarget | None = None,
    drifted: Verdict | None = None,
    service: ServiceOutcome | None = None,
) -> LoRAAdapterStatus:
    before, listed = adapter.status, sorted(rows or [], key=lambda r: (_ORDER.index(r.kind), r.status.name))
    suspended = adapter.spec is not None and adapter.spec.suspend
    verdicts = (
        Verdict(ConditionType.READY, verdict.ready, verdict.reason, verdict.message),
        Verdict(ConditionType.RECONCILING, bool(verdict.reconciling), verdict.reconciling, verdict.message),
        Verdict(ConditionType.STALLED, verdict.stalled, verdict.reason, verdict.message),
        Verdict(ConditionType.SUSPENDED, suspended, Reason.SUSPENDED, "spec.suspend is true: pods stay as they are"),
        *([drifted] if drifted is not None else []),
    )
    return LoRAAdapterStatus(
        observed_generation=adapter.generation if verdict.decided else before.observed_generation,
        last_handled_request_at=adapter.requested_at or before.last_handled_request_at,
        target=target,
        loaded_pods=sum(row.kind == "Loaded" for row in listed),
        wanted_pods=wanted,
        service=service.name if service is not None else before.service,
        pods=tuple(row.status for row in listed[:LISTED]),
        conditions=conditions(verdicts, observed=before.conditions, generation=adapter.generation, now=now),
    )


def _target(a: Assessment, wish: Wish) -> AdapterTarget | None:
    digest = a.target.digest if a.target is not None else a.stable_digest
    source = wish.item.source_for(digest) if wish.item is not None else None
    if source is None:
        return None
    return AdapterTarget(uri=source.uri, digest=source.digest, base_digest=source.base_digest)


# Pods


def _rows(adapters: Adapters, wish: Wish, item: AssignedAdapter) -> list[_Row]:
    a = adapters.a
    staying = (pod for pod in a.counted if item.meant_for(pod.uid) and pod.uid not in wish.leaving)
    rows = [_row(adapters, pod, item) for pod in staying]
    number = wish.adapter.spec.placement.pods if wish.adapter.spec is not None else ALL_PODS
    if number == ALL_PODS or len(rows) < int(number):  # those that are too old are missed
        rows += [_row(adapters, p, item) for p in a.counted if not item.meant_for(p.uid) and adapters.too_old(p)]
    return rows


def _row(adapters: Adapters, pod: Pod, item: AssignedAdapter) -> _Row:
    kind, reason, message, digest = _describe(adapters, pod, item)
    return _Row(
        kind=kind,
        reason=reason,
        status=AdapterPodStatus(
            name=pod.name,
            uid=pod.uid,
            boot_id=cut(pod.state.boot_id, 64) if pod.state is not None else "",
            digest=digest,
            state=kind,
            message=cut(message, 1024),
        ),
    )


def _describe(adapters: Adapters, pod: Pod, item: AssignedAdapter) -> tuple[str, str, str, str]:
    """Return (kind, reason, message, digest that serves under the name) of a pod."""
    a = adapters.a
    if isinstance(pod.engine, Unreachable):
        return "Unreachable", pod.engine.reason, f"{pod.engine.reason}: {pod.engine.message}", ""
    state = pod.state
    if state is None or state.live is None or not proved(state, state.live.digest):
        return "NotReady", Reason.ENGINE_NOT_READY, TEXTS[Reason.ENGINE_NOT_READY], ""
    if state.adapters is None or not state.adapters.slots:
        why = state.adapters.reason if state.adapters is not None else ""
        return "Unsupported", Reason.ADAPTERS_UNSUPPORTED, why or TEXTS[Reason.ADAPTERS_UNSUPPORTED], ""
    served = serving(state, item.name)
    digest, source = served.digest if served is not None else "", item.source_for(state.live.digest)
    if source is None:
        return (*_without_source(a, item, state.live.digest), digest)
    if adapters.too_old(pod) and not is_of(served, source):
        return "Unsupported", Reason.ENGINE_PROTOCOL, too_old(pod), digest
    assigned = told(a, pod)
    problem = next((p for p in assigned.problems if p.name == item.name), None) if assigned is not None else None
    if problem is not None and problem.error is not None:
        return (*_trouble(problem.error), digest)
    if is_of(served, source) and adapters.settled(pod, item):
        return "Loaded", "", "", digest
    failed = a.snapshot.memory.untold.get(pod.uid)
    if failed is not None and assigned is None:
        return (*_trouble(failed.error), digest)
    return "Loading", Reason.LOADING_ADAPTER, "", digest


def _trouble(error: ErrorBody) -> tuple[str, str, str]:
    return "Refused" if is_final(error) else "Retrying", error.code, f"{error.code}: {text(error)}"


def _without_source(a: Assessment, item: AssignedAdapter, base: str) -> tuple[str, str, str]:
    """A pod on a base that the adapter has nothing for: it waits for the base to change, or nothing will come of it."""
    if a.target is not None and a.target.digest != base and item.source_for(a.target.digest) is not None:
        return "Waiting", Reason.LOADING_ADAPTER, f"the pod serves base {base} still; it comes with the new one"
    return "NoSource", Reason.NO_SOURCE_FOR_BASE, f"no entry of spec.sources fits base {base}"


# Verdicts


def _verdict(adapters: Adapters, wish: Wish, rows: list[_Row]) -> _Verdict:
    """Return where an adapter stands against its spec."""
    a, loaded = adapters.a, sum(row.kind == "Loaded" for row in rows)
    figure = f"{loaded}/{_wanted(wish, rows)} pods serve it"
    if wish.reason is Reason.SUSPENDED or (a.spec.suspend and not (rows and loaded == _wanted(wish, rows))):
        who = "the adapter" if wish.reason is Reason.SUSPENDED else f"ModelVersion {a.snapshot.slot}"
        return _Verdict(ready=None, reason=Reason.SUSPENDED, message=f"{who} is suspended: {figure}")
    if wish.reason is not None:
        message = f"{TEXTS[wish.reason]}: {wish.message}"
        return _Verdict(ready=False, reason=wish.reason, message=message, stalled=True)
    return _lookup(adapters, wish, figure) or _in_pods(a, rows, figure) or _whole(a, wish, rows, figure)


def _routed(verdict: _Verdict, service: ServiceOutcome | None) -> _Verdict:
    """Return a verdict that also says what is wrong with the Service; a person is needed for either."""
    if service is None or not service.reason or verdict.stalled:
        return verdict
    message = f"{verdict.message}; {service.message}"
    return _Verdict(ready=False, reason=service.reason, message=message, stalled=True)


def _lookup(adapters: Adapters, wish: Wish, figure: str) -> _Verdict | None:
    """Sources whose content nobody knows yet; what is assigned under the name meanwhile is the old content."""
    spec = wish.adapter.spec
    if spec is None or not wish.unresolved:
        return None
    figure = f"{figure} as it is assigned now"
    for source in wish.unresolved:
        found = adapters.resolution(spec, source)
        if found is not None and found.error is not None:
            final = is_final(found.error)
            return _Verdict(
                ready=False,
                reason=found.error.code,
                message=f"{figure}; {source.uri} as pod {found.pod} sees it: {text(found.error)}",
                reconciling="" if final else Reason.PROGRESSING_WITH_RETRY,
                stalled=final,
            )
    if not adapters.a.counted:
        return _no_pods(adapters.a)
    if all(adapters.too_old(pod) for pod in adapters.a.counted):
        message = f"{figure}; {too_old(adapters.a.counted[0])}"
        return _Verdict(ready=False, reason=Reason.ENGINE_PROTOCOL, message=message, stalled=True)
    return _Verdict(
        ready=None,
        reason=Reason.PROGRESSING,
        message=f"{figure}; looking up {wish.unresolved[0].uri}",
        reconciling=Reason.RESOLVING,
    )


def _in_pods(a: Assessment, rows: list[_Row], figure: str) -> _Verdict | None:
    """Return what keeps a pod that must serve it from doing so, None when all of them do."""
    if not rows:
        return _no_pods(a)
    worst = min(rows, key=lambda row: (_ORDER.index(row.kind), row.status.name))
    story = f"{figure}; pod {worst.status.name}: {worst.status.message}" if worst.status.message else figure
    match worst.kind:
        case "Loaded":
            return None
        case "Refused" | "NoSource" | "Unsupported":
            return _Verdict(ready=False, reason=worst.reason, message=story, stalled=True)
        case "Loading" | "Waiting":
            return _Verdict(ready=None, reason=Reason.PROGRESSING, message=story, reconciling=Reason.LOADING_ADAPTER)
        case _:
            retrying = Reason.PROGRESSING_WITH_RETRY
            ready = False if worst.kind == "Retrying" else None
            return _Verdict(ready=ready, reason=worst.reason, message=story, reconciling=retrying)


def _whole(a: Assessment, wish: Wish, rows: list[_Row], figure: str) -> _Verdict:
    """Every pod that is there serves it; Ready says that it is on as many as its placement asks for."""
    missing = _wanted(wish, rows) - len(rows)
    if not missing:
        return _Verdict(ready=True, reason=Reason.SUCCEEDED, message=figure)
    there = f"{len(a.counted)} that {'was' if len(a.counted) == 1 else 'were'} ever ready"
    story = f"{figure}: placement.pods asks for {len(rows) + missing}, and the slot has {there}"
    return _Verdict(ready=None, reason=Reason.PROGRESSING, message=story, reconciling=Reason.WAITING_FOR_PODS)


def _wanted(wish: Wish, rows: list[_Row]) -> int:
    """On how many pods it is to be: those that are there, or the number that its placement names."""
    number = wish.adapter.spec.placement.pods if wish.adapter.spec is not None else ALL_PODS
    return len(rows) if number == ALL_PODS or wish.item is None else int(number)


def _no_pods(a: Assessment) -> _Verdict:
    if a.scaled_to_zero:
        return _Verdict(ready=True, reason=Reason.SCALED_TO_ZERO, message="the slot has no pods; new ones load it")
    reason = Reason.WAITING_FOR_PODS
    return _Verdict(ready=None, reason=reason, message=TEXTS[reason], reconciling=reason)
