"""What is said of each pod, those that need attention first."""

from collections import Counter

from modelswap_operator.api.modelversion import PodCounts, PodStatus, VersionCount
from modelswap_operator.api.reasons import TEXTS, Reason
from modelswap_operator.planning.assess import Assessment, proved, running
from modelswap_operator.planning.errors import is_content, text
from modelswap_operator.planning.snapshot import Pod, Unreachable
from modelswap_operator.planning.staging import held
from modelswap_operator.status.conditions import cut

LISTED = 50
DAMAGED = "Drifted"
"""State of a pod whose live tensors are not what their version says."""
VERSIONS_LISTED = 20
_ORDER = ("Quarantined", "Refused", "Unreachable", "Retrying", "NotReady", "Swapping", "Waiting", "Starting", "Serving")


def pod_list(a: Assessment) -> tuple[PodStatus, ...]:
    """Return the pods of the slot, worst first, cut to what the schema admits."""
    rows = [_row(a, pod) for pod in a.present]
    rows.sort(key=lambda row: (_ORDER.index(row[0]), row[1].name))
    return tuple(status for _, status in rows[:LISTED])


def pod_counts(a: Assessment) -> PodCounts:
    """Return how many pods there are, by what they count as."""
    total, counted = len(a.snapshot.pods), len(a.counted)
    return PodCounts(total=total, counted=counted, ready=len(a.on_target), excluded=total - counted)


def versions(a: Assessment) -> tuple[VersionCount, ...]:
    """Return what counted pods have proved to serve, most pods first."""
    found: Counter[tuple[str, str]] = Counter()
    for pod in a.counted:
        live = pod.state.live if pod.state is not None else None
        if live is not None and proved(pod.state, live.digest):
            found[(live.version, live.digest)] += 1
    ordered = sorted(found.items(), key=lambda item: (-item[1], item[0]))[:VERSIONS_LISTED]
    return tuple(VersionCount(version=cut(v, 63), digest=d, pods=n) for (v, d), n in ordered)


def _row(a: Assessment, pod: Pod) -> tuple[str, PodStatus]:
    kind, state, message = describe(a, pod)
    engine = pod.state
    live = engine.live if engine is not None else None
    return kind, PodStatus(
        name=pod.name,
        uid=pod.uid,
        boot_id=cut(engine.boot_id, 64) if engine is not None else "",
        version=cut(live.version, 63) if live is not None else "",
        digest=live.digest if live is not None else "",
        state=cut(state, 32),
        message=cut(message, 1024),
    )


def describe(a: Assessment, pod: Pod) -> tuple[str, str, str]:
    """Return (kind for the order, state as shown, message) of a pod."""
    if not pod.ever_ready:  # whatever it does: status says of each pod whether it counts, also to the next process
        return "Starting", "Starting", pod.state.message if pod.state is not None else ""
    if isinstance(pod.engine, Unreachable):
        return "Unreachable", "Unreachable", f"{pod.engine.reason}: {pod.engine.message}"
    state = pod.state
    if state is None:
        return "NotReady", "NotReady", TEXTS[Reason.NO_POD_IP]
    if state.quarantined:
        return "Quarantined", "Quarantined", state.message or TEXTS[Reason.QUARANTINED]
    operation = running(pod)
    if operation is not None and operation.hold is not None:
        there = held(pod, operation.target.digest) is not None
        return "Waiting", "Staged" if there else "Staging", f"{operation.target.version}, beside what it serves"
    if operation is not None:
        return "Swapping", operation.state.value, f"to {operation.target.version}"
    if state.drifted:
        names = ", ".join(state.drifted[:3])
        return "NotReady", DAMAGED, f"{len(state.drifted)} live tensors are damaged and loaded again ({names})"
    if state.live is None:
        return "NotReady", "NotReady", state.message or TEXTS[Reason.ENGINE_NOT_READY]
    return _idle(a, pod)


def _idle(a: Assessment, pod: Pod) -> tuple[str, str, str]:
    """Describe a pod that serves and does nothing else."""
    state = pod.state
    if state is None or state.live is None:
        raise ValueError(f"pod {pod.name} serves nothing")
    digest = state.live.digest
    current = a.snapshot.assignment
    attempt = a.snapshot.memory.attempts.get(pod.uid)
    if attempt is not None and current is not None and attempt.revision == current.revision:
        if is_content(attempt.error):
            return "Refused", "Refused", f"{attempt.error.code}: {text(attempt.error)}"
        if digest != attempt.digest:
            return "Retrying", "Retrying", f"{attempt.error.code}: {text(attempt.error)}"
    last = state.operation
    failed = last is not None and last.error is not None and last.target.digest != digest
    if last is not None and last.error is not None and failed and a.failed(last.target.digest) is not None:
        return "Refused", "Refused", f"{last.error.code}: {text(last.error)}"
    if not proved(state, digest):
        return "NotReady", "NotReady", "not every rank has proved the version under its boot id"
    if not pod.ready:
        return "NotReady", "NotReady", state.message
    if a.external and a.target is not None and digest != a.target.digest and a.there(pod, a.target.digest):
        return "Serving", "Serving", f"{state.live.version or digest}: a trainer's change of {a.target.version}"
    if a.target is not None and digest != a.target.digest:
        return "Waiting", "Waiting", f"serves {state.live.version or digest}"
    return "Serving", "Serving", ""
