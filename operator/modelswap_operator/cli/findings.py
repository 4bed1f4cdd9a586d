"""Why a slot is not Ready: rules over what was seen. Pure; each finding names an object, a cause and a next step."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from modelswap_engine.protocol.assignment import Assignment
from modelswap_operator.api.labels import SLOT_LABEL, assignment_name
from modelswap_operator.api.reasons import ConditionType, Reason
from modelswap_operator.cli.engines import control_port
from modelswap_operator.cli.slots import Slot


class Level(StrEnum):
    """How bad it is: ``PROBLEM`` needs a person, ``NOTE`` explains, ``UNKNOWN`` could not be looked at."""

    PROBLEM = "problem"
    NOTE = "note"
    UNKNOWN = "unknown"
    GOOD = "ok"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was seen, and what to do about it."""

    level: Level
    text: str
    next: str = ""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What was seen of a slot.

    Attributes:
        pods: its pods, as the API server shows them.
        adapters: its LoRAAdapters, likewise.
        operators: pods of operators anywhere; None where they may not be listed.
        assignment: what pods must serve; None while nothing is published.
        readiness: what ``/readyz`` of a pod that is not ready says, by pod name.
        unseen: what could not be looked at, and why.
    """

    slot: Slot
    pods: Sequence[dict[str, Any]] = ()
    adapters: Sequence[dict[str, Any]] = ()
    operators: Sequence[dict[str, Any]] | None = ()
    assignment: Assignment | None = None
    readiness: Mapping[str, str] = field(default_factory=dict)
    unseen: Sequence[str] = ()


# What to do about what is said of a pod; docs/operations.md says more.
_POD_STEPS: Final = {
    "Quarantined": "the kubelet restarts it through its liveness probe; if it stays so: kubectl delete pod {pod}",
    "Unreachable": "network policy, a crashing container, or a node that is gone: kubectl describe pod {pod}",
    "Refused": "correct spec.source, or go back: kubectl modelswap rollback {slot}",
    "NotReady": "it is loading, or has not proved what it loaded: kubectl modelswap status {slot} --watch",
    "Retrying": "an attempt failed in a way that may heal; it is tried again by itself",
}


def findings(facts: Facts) -> list[Finding]:
    """Return what is wrong, worst first; one ``GOOD`` when nothing is."""
    rules: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
        _operator,
        _verdict,
        _source,
        _sources_of_adapters,
        _pods,
        _containers,
        _said_of_pods,
        _assignment,
        _readiness,
    )
    found = [finding for rule in rules for finding in rule(facts)]
    found += [Finding(level=Level.UNKNOWN, text=text) for text in facts.unseen]
    order = list(Level)
    found.sort(key=lambda finding: order.index(finding.level))
    if not any(f.level in (Level.PROBLEM, Level.NOTE) for f in found) and facts.slot.ready:
        found.insert(0, Finding(level=Level.GOOD, text=f"{facts.slot.name} is Ready: {facts.slot.message}"))
    return found


def _operator(facts: Facts) -> Iterator[Finding]:
    slot = facts.slot
    if facts.operators is not None and not facts.operators:
        yield Finding(
            level=Level.PROBLEM,
            text="no pod of an operator was found in the cluster",
            next="helm install modelswap charts/modelswap --namespace modelswap-system --create-namespace",
        )
        return
    running = [pod for pod in facts.operators or () if _is_ready(pod)]
    if facts.operators and not running:
        names = ", ".join(f"{p['metadata']['namespace']}/{p['metadata']['name']}" for p in facts.operators)
        yield Finding(
            level=Level.PROBLEM,
            text=f"no operator is ready ({names})",
            next="its log's last lines say why; /readyz says what it waits for",
        )
    if slot.status.observed_generation < 0 and slot.condition(ConditionType.READY) is None and running:
        yield Finding(
            level=Level.PROBLEM,
            text=f"an operator runs, and has said nothing about {slot.namespace}/{slot.name}",
            next=f"does it watch namespace {slot.namespace}? (watch.namespaces of its chart)",
        )


def _verdict(facts: Facts) -> Iterator[Finding]:
    slot = facts.slot
    stalled = slot.stalled
    if stalled is not None:
        yield Finding(
            level=Level.PROBLEM,
            text=f"Stalled, {stalled.reason}: {stalled.message}",
            next=f"change the spec, or go back: kubectl modelswap rollback {slot.name}",
        )
    elif slot.spec.suspend:
        yield Finding(
            level=Level.NOTE,
            text="spec.suspend is true: the operator publishes a plan and does nothing else",
            next="set spec.suspend: false",
        )
    elif not slot.ready:
        yield Finding(level=Level.NOTE, text=f"not Ready: {slot.message}")


def _source(facts: Facts) -> Iterator[Finding]:
    drifted = facts.slot.condition(ConditionType.SOURCE_DRIFTED)
    if drifted is not None:
        yield Finding(level=Level.PROBLEM, text=f"{drifted.reason}: {drifted.message}")


def _sources_of_adapters(facts: Facts) -> Iterator[Finding]:
    for adapter in facts.adapters:
        meta = adapter["metadata"]
        for said in adapter.get("status", {}).get("conditions", []):
            current = said.get("observedGeneration") == meta.get("generation")
            if (said["type"], said["status"], current) == (ConditionType.SOURCE_DRIFTED, "True", True):
                yield Finding(
                    level=Level.PROBLEM,
                    text=f"LoRAAdapter {meta['name']}, {said['reason']}: {said['message']}",
                    next="put the old content back, or name the new one by another uri or a digest in spec.sources",
                )


def _pods(facts: Facts) -> Iterator[Finding]:
    name = facts.slot.name
    if not facts.pods:
        ready = facts.slot.condition(ConditionType.READY)
        at_zero = ready is not None and ready.reason == Reason.SCALED_TO_ZERO
        yield Finding(
            level=Level.NOTE if at_zero else Level.PROBLEM,
            text=f"no pod in namespace {facts.slot.namespace} has the label {SLOT_LABEL}={name}",
            next=f"install the engine chart with --set slot={name}, or scale its Deployment up",
        )
    for pod in facts.pods:
        if control_port(pod) is None:
            yield Finding(
                level=Level.PROBLEM,
                text=f"pod {pod['metadata']['name']} has the slot's label and no port named modelswap or modelswap-tls",
                next="take the label off it, or start it from the engine chart",
            )


def _containers(facts: Facts) -> Iterator[Finding]:
    for pod in facts.pods:
        name, status = pod["metadata"]["name"], pod.get("status", {})
        for container in [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]:
            waiting = container.get("state", {}).get("waiting", {})
            if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
                yield Finding(
                    level=Level.PROBLEM,
                    text=f"pod {name}, container {container['name']}: {waiting['reason']} {waiting.get('message', '')}",
                    next=f"kubectl logs {name} -c {container['name']} --previous",
                )
            ended = container.get("lastState", {}).get("terminated", {})
            if ended.get("reason") == "OOMKilled":
                yield Finding(
                    level=Level.PROBLEM,
                    text=f"pod {name}, container {container['name']} was killed for want of memory "
                    f"({ended.get('finishedAt', '?')})",
                    next="raise resources.limits.memory; docs/operations.md, Memory, says what a pod needs",
                )
        for condition in status.get("conditions", []):
            if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
                yield Finding(level=Level.PROBLEM, text=f"pod {name} is not scheduled: {condition.get('message', '')}")


def _said_of_pods(facts: Facts) -> Iterator[Finding]:
    for pod in facts.slot.status.pods:
        step = _POD_STEPS.get(pod.state)
        if step is None:
            continue
        level = Level.PROBLEM if pod.state in ("Quarantined", "Unreachable", "Refused") else Level.NOTE
        said = f": {pod.message}" if pod.message else ""
        yield Finding(
            level=level,
            text=f"pod {pod.name} is {pod.state}{said}",
            next=step.format(pod=pod.name, slot=facts.slot.name),
        )


def _assignment(facts: Facts) -> Iterator[Finding]:
    slot, found = facts.slot, facts.assignment
    name = assignment_name(slot.name)
    if found is None:
        if slot.status.versions:
            yield Finding(
                level=Level.NOTE, text=f"configmap {name} is not there: restarted pods serve their template's model"
            )
        return
    if found.owner_uid and found.owner_uid != slot.uid and not found.released:
        yield Finding(
            level=Level.PROBLEM,
            text=f"configmap {name} belongs to another life of {slot.name} (owner {found.owner_uid}, not {slot.uid})",
            next="was the object restored or created anew? The operator takes a released assignment over by itself",
        )


def _readiness(facts: Facts) -> Iterator[Finding]:
    for name, said in facts.readiness.items():
        yield Finding(level=Level.NOTE, text=f"pod {name} is not ready; it says: {said}")


def _is_ready(pod: dict[str, Any]) -> bool:
    conditions = pod.get("status", {}).get("conditions", [])
    return any(c.get("type") == "Ready" and c.get("status") == "True" for c in conditions)
