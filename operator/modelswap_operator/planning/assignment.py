"""The decision: what the assignment must say next (docs/architecture.md), or None when it says so already.

Pods follow the assignment; this module never looks at how they do that. Revisions only rise: each is one more than
anything that anybody has been seen to hold, also across re-creation of the object.
"""

from collections.abc import Collection
from datetime import datetime

from modelswap_engine.protocol.assignment import (
    Assignment,
    AssignmentCandidate,
    AssignmentTarget,
    EngineRestart,
    WeightsPolicy,
)
from modelswap_engine.protocol.updates import RECEIVED
from modelswap_operator.planning import adapters, canary, staging
from modelswap_operator.planning.actions import WriteAssignment
from modelswap_operator.planning.assess import Assessment
from modelswap_operator.planning.snapshot import Ledger, Pod, Snapshot, Unreachable

PATIENCE_ATTEMPTS = 3
"""How often a candidate that serves traffic may be unreachable for us before another pod goes first.

One that is down keeps its place: it may be down because of the version, and must not hand that on.
"""


def next_revision(snapshot: Snapshot) -> int:
    """Return a revision above everything seen in the assignment, the pods and the status."""
    seen = [snapshot.assignment.revision] if snapshot.assignment is not None else [0]
    for pod in snapshot.pods:
        if pod.state is not None:
            seen += [pod.state.revision, pod.state.assignment_revision]
    for known in (snapshot.status.target, snapshot.status.stable):
        if known is not None:
            seen.append(known.revision)
    return 1 + max(seen)


def release(snapshot: Snapshot) -> WriteAssignment | None:
    """After deletion: pods keep serving, and the next owner may take over."""
    current = snapshot.assignment
    if current is None or current.released:
        return None
    return _write(snapshot, stable=current.stable, why="the ModelVersion was deleted", released=True)


def decide(a: Assessment, now: datetime) -> WriteAssignment | None:
    """Return the assignment to publish next."""
    return _versions(a, now) or _recovery(a)


def _recovery(a: Assessment) -> WriteAssignment | None:
    """Pass on what may be done to a quarantined pod, whatever is the matter with the versions."""
    current, wanted = a.snapshot.assignment, a.spec.recovery.engine_restart
    if current is None or not a.owned or (current.engine_restart or EngineRestart.ALLOWED) is wanted:
        return None
    return _write(
        a.snapshot,
        stable=current.stable,
        candidate=current.candidate,
        previous=a.snapshot.ledger.previous,
        why=f"recovery.engineRestart is {wanted}",
    )


def _versions(a: Assessment, now: datetime) -> WriteAssignment | None:
    if a.failure is not None:
        return _after_failure(a)
    if not a.owned:
        return _take_over(a)
    if a.target is None:
        return _withdraw_outdated(a)
    if a.stable_digest != a.target.digest and a.held(now):
        return _withdraw_outdated(a)
    if a.stable_digest != a.target.digest and (why := _proof(a, now)):
        return _stable(a, a.target, why=f"{why}: it is the stable version now")
    decided = a.snapshot.ledger.generation == a.snapshot.generation and not _overtaken(a)
    if a.stable_digest == a.target.digest:
        if decided and _settled(a, a.target):
            return None
        return _stable(a, a.target, why=f"{a.target.version} is the stable version")
    if adapters.blocker(adapters.Adapters(a)) is not None:
        return _withdraw_outdated(a)
    return _candidate(a, a.target, decided=decided)


def _proof(a: Assessment, now: datetime) -> str:
    """Return what makes the target the stable version; empty while that has not been shown."""
    if not canary.required(a):
        return f"pod {a.on_target[0].name} proved {a.spec.version}" if a.on_target else ""
    shown = canary.passed(a, now)
    if shown is None:
        return ""
    seconds = a.spec.rollout.canary.soak_seconds
    answers = f"{shown.requests} requests answered, {shown.errors} of them failed"
    return f"canary pods {shown.who} served {a.spec.version} for {seconds} s, {answers}"


def _overtaken(a: Assessment) -> bool:
    """A pod accepted a higher revision under the same epoch (a lost ConfigMap, the break-glass path)."""
    revision = a.snapshot.assignment.revision if a.snapshot.assignment is not None else 0
    states = (p.state for p in a.present if p.state is not None)
    return any(s.epoch == a.snapshot.epoch and s.revision > revision for s in states)


def _settled(a: Assessment, target: AssignmentTarget) -> bool:
    current = a.snapshot.assignment
    return current is not None and current.candidate is None and current.stable == target


def _take_over(a: Assessment) -> WriteAssignment | None:
    """First decision of this object: adopt what is stable, or what the pods serve, before anything changes."""
    current = a.snapshot.assignment
    stable = current.stable if current is not None else None
    if stable is None:
        live = (p.state.live for p in a.counted if p.state is not None and p.state.live is not None)
        # What a trainer sent to one pod cannot be loaded by any other.
        found = next((ref for ref in live if ref.digest and ref.uri and not ref.uri.startswith(RECEIVED)), None)
        stable = (
            AssignmentTarget(
                version=found.version,
                uri=found.uri,
                digest=found.digest,
                credentials=found.credentials,
                verification=found.verification,
            )
            if found
            else None
        )
    if a.target is not None and stable is not None and stable.digest == a.target.digest:
        stable = a.target
    if stable is None or (current is None and a.target is None):
        return None
    return _write(a.snapshot, stable=stable, why=f"{stable.version or stable.digest} is adopted as the stable version")


def _candidate(a: Assessment, target: AssignmentTarget, *, decided: bool) -> WriteAssignment | None:
    current = a.snapshot.assignment
    candidate = current.candidate if current is not None else None
    there = candidate is not None and candidate.digest == target.digest
    named = candidate.pod_uids if candidate is not None and there else []
    ahead = not named and bool(staging.missing(a))
    first = () if ahead else _first(a, named)
    if not first and not ahead:
        return _withdraw_outdated(a)
    if decided and there and {p.uid for p in first} == set(named):
        return None
    names = ", ".join(p.name for p in first)
    first_to = f"{names} {'are' if len(first) > 1 else 'is'} the first to serve {target.version}"
    return _write(
        a.snapshot,
        stable=current.stable if current is not None else None,
        candidate=AssignmentCandidate(
            version=target.version,
            uri=target.uri,
            digest=target.digest,
            credentials=target.credentials,
            verification=target.verification,
            pod_uids=[p.uid for p in first],
        ),
        previous=a.snapshot.ledger.previous,
        why=f"pods stage {target.version} before the first one serves it" if ahead else first_to,
    )


def _withdraw_outdated(a: Assessment) -> WriteAssignment | None:
    """Take back a candidate that the spec has moved on from: a pod that restarts must not load it any more."""
    current = a.snapshot.assignment
    candidate = current.candidate if current is not None else None
    if current is None or candidate is None:
        return None
    if (candidate.version, candidate.uri) == (a.spec.version, a.spec.source.uri):
        return None
    why = f"{candidate.version} is not wanted any more"
    return _write(a.snapshot, stable=current.stable, previous=a.snapshot.ledger.previous, why=why)


def _given_up(a: Assessment, pod: Pod) -> bool:
    """Say whether another pod goes first; one that has begun to soak is waited for."""
    if canary.soaked(a, pod):
        return False
    return pod.ready and isinstance(pod.engine, Unreachable) and pod.engine.attempts >= PATIENCE_ATTEMPTS


def _first(a: Assessment, named: Collection[str]) -> tuple[Pod, ...]:
    """The pods that go first: those that were named and are not gone, then those that can be asked.

    One that serves the version already is taken before one that does not, one that is ready before one that is not.
    """

    def order(pod: Pod) -> tuple[bool, bool, str]:
        return not a.there(pod, a.target_digest), not pod.ready, pod.name

    kept = sorted((p for p in a.counted if p.uid in named and not _given_up(a, p)), key=order)
    able = [p for p in a.counted if p.state is not None and p.state.live is not None and not p.state.quarantined]
    others = sorted((p for p in able if p.uid not in named), key=order)
    return (*kept, *others)[: canary.size(a)]


def _after_failure(a: Assessment) -> WriteAssignment | None:
    """Withdraw the failed version; what had become stable goes back to what was stable before.

    With Halt the pods that run stay as they are, but one that restarts must not load what is known to fail.
    """
    current, back = a.snapshot.assignment, a.snapshot.ledger.previous
    if current is None or not a.owned:
        return None
    cause = f"{a.spec.version} failed ({a.failure.reason if a.failure is not None else ''})"
    if a.stable_digest == a.target_digest != "":
        if a.halted or a.completed_before or back is None or back.digest == a.target_digest:
            return None
        return _write(a.snapshot, stable=back, why=f"{cause}: {back.version} is stable again")
    if current.candidate is None:
        return None
    return _write(a.snapshot, stable=current.stable, previous=back, why=f"{cause}: it is withdrawn")


def _stable(a: Assessment, target: AssignmentTarget, *, why: str) -> WriteAssignment:
    current = a.snapshot.assignment
    before = current.stable if current is not None else None
    moved = before is not None and before.digest != target.digest
    return _write(a.snapshot, stable=target, previous=before if moved else a.snapshot.ledger.previous, why=why)


def _write(
    snapshot: Snapshot,
    *,
    stable: AssignmentTarget | None,
    why: str,
    candidate: AssignmentCandidate | None = None,
    previous: AssignmentTarget | None = None,
    released: bool = False,
) -> WriteAssignment:
    current = snapshot.assignment
    owner = current.owner_uid if released and current is not None else snapshot.uid
    assignment = Assignment(
        owner_uid=owner,
        epoch=snapshot.epoch,
        revision=next_revision(snapshot),
        stable=stable,
        candidate=candidate,
        adapters=current.adapters if current is not None else [],
        adapters_revision=_adapters_revision(current, owner),
        released=released,
        weights=snapshot.spec.weights if snapshot.spec is not None else WeightsPolicy.MANAGED,
        engine_restart=snapshot.spec.recovery.engine_restart if snapshot.spec is not None else None,
    )
    ledger = Ledger(generation=snapshot.generation, previous=previous, adapters=snapshot.ledger.adapters)
    return WriteAssignment(assignment=assignment, ledger=ledger, why=why)


def _adapters_revision(current: Assignment | None, owner: str) -> int:
    """Return the count of the adapters' decisions; that they are another owner's now is one, too."""
    if current is None or not current.adapters_revision:
        return 0
    return current.adapters_revision + (current.owner_uid != owner)
