"""Conditions that state facts, whatever the spec wants: Serving, WeightsVerified, Suspended, SourceDrifted."""

from collections.abc import Iterable

from modelswap_engine.protocol.looking import proven
from modelswap_operator.api.conditions import Condition, find
from modelswap_operator.api.loraadapter import AdapterTarget, LoRAAdapterStatus
from modelswap_operator.api.reasons import TEXTS, ConditionType, Reason
from modelswap_operator.planning.assess import Assessment, proved
from modelswap_operator.planning.snapshot import Unreachable, Watched
from modelswap_operator.status import pods
from modelswap_operator.status.conditions import Verdict


def serving(a: Assessment) -> Verdict:
    """Say whether pods answer requests, and with which versions."""
    kind = ConditionType.SERVING
    able = [p for p in a.counted if p.ready and p.state is not None and p.state.live is not None]
    able = [p for p in able if p.state is not None and not p.state.quarantined]
    if able:
        parts = [f"{_count(v.pods)} {v.version or v.digest}" for v in pods.versions(a)]
        return Verdict(kind, True, Reason.PODS_SERVE, ", ".join(parts) or TEXTS[Reason.PODS_SERVE])
    if not a.present:
        return Verdict(kind, False, Reason.NO_PODS, TEXTS[Reason.NO_PODS])
    if any(p.ready and isinstance(p.engine, Unreachable) for p in a.counted):
        return Verdict(kind, None, Reason.ENGINE_UNREACHABLE, "pods are Ready, but none of their engines can be asked")
    return Verdict(kind, False, Reason.NO_POD_SERVES, TEXTS[Reason.NO_POD_SERVES])


def verified(a: Assessment) -> Verdict:
    """Say whether every counted pod has proved, under its current boot id, what it serves."""
    kind = ConditionType.WEIGHTS_VERIFIED
    if not a.counted:
        return Verdict(kind, None, Reason.NO_PODS, "no pod to read back from")
    for pod in a.counted:
        state = pod.state
        if state is not None and state.audit is not None and state.audit.ok is False:
            names = ", ".join(state.audit.mismatched[:3]) or "unnamed tensors"
            message = f"pod {pod.name}: live tensors differ from the manifest ({names}); delete the pod"
            return Verdict(kind, False, Reason.NOT_PROVED, message)
    open_ = [p.name for p in a.counted if p.state is None or p.state.live is None]
    open_ += [
        p.name for p in a.counted if p.state and p.state.live is not None and not proved(p.state, p.state.live.digest)
    ]
    if open_:
        return Verdict(kind, None, Reason.NOT_PROVED, f"not read back from {len(open_)} pods, such as {open_[0]}")
    return Verdict(kind, True, Reason.PROVED, TEXTS[Reason.PROVED])


def suspended(a: Assessment) -> Verdict:
    """Say whether the operator keeps its hands off."""
    return Verdict(ConditionType.SUSPENDED, a.spec.suspend, Reason.SUSPENDED, TEXTS[Reason.SUSPENDED])


def drifted(a: Assessment) -> Verdict:
    """Say whether the source holds another content than what is pinned; Ready is about the pods, which serve that.

    An operator that has just started repeats what was said, until a pod has looked.
    """
    look, target, shown = a.snapshot.memory.watched, a.target, a.snapshot.status.target
    if look is None or target is None or (look.uri, look.digest) != (target.uri, target.digest):
        return _moved(False, "")
    advice = "publish what is there under a name of its own and set spec.source and spec.version"
    if look.found is not None:
        return _moved(look.found != "", _found(look, f"{target.digest} ({target.version})", advice))
    same = shown is not None and (shown.resolved_uri, shown.digest) == (target.uri, target.digest)
    return _repeated(a.snapshot.status.conditions, same=same)


def adapter_drifted(a: Assessment, name: str, before: LoRAAdapterStatus, target: AdapterTarget | None) -> Verdict:
    """Say the same of the source that an adapter is assigned from."""
    look, shown = a.snapshot.memory.watched_adapters.get(name), before.target
    if look is None or target is None or (look.uri, look.digest) != (target.uri, target.digest):
        return _moved(False, "")
    advice = "publish what is there under a name of its own and set spec.sources"
    if look.found is not None:
        return _moved(look.found != "", _found(look, look.digest, advice))
    same = shown is not None and (shown.uri, shown.digest) == (target.uri, target.digest)
    return _repeated(before.conditions, same=same)


def _moved(moved: bool, message: str) -> Verdict:
    return Verdict(ConditionType.SOURCE_DRIFTED, moved, Reason.SOURCE_DRIFTED, message)


def _repeated(conditions: Iterable[Condition], *, same: bool) -> Verdict:
    said = find(conditions, ConditionType.SOURCE_DRIFTED)
    return _moved(said is not None and same, said.message if said is not None else "")


def _found(look: Watched, what: str, advice: str) -> str:
    """Say what a source holds, and only what is known of it."""
    found = look.found or ""
    if proven(found):
        seen = f"{look.uri} holds {found} now and not {what} any more: pods serve on, and one that has to fetch that"
        seen = f"{seen} cannot; put it back"
    else:
        seen = (
            f"{look.uri} has {found} than those that {what} was read from; whether the tensors differ is not known "
            "until they are read. Pods serve on; one that has to fetch that cannot if they do. Let a pod with an empty "
            "volume read them, put the old files back"
        )
    return f"{seen}, or {advice}"


def _count(number: int) -> str:
    return "1 pod serves" if number == 1 else f"{number} pods serve"
