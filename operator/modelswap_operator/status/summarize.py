"""The only place that turns a snapshot into a status (docs/reference/api.md, kstatus).

``status.observedGeneration`` follows the spec once it has been decided: done, stalled or suspended. Ready is Unknown
while the slot moves, False when an attempt failed or a person is needed.
"""

from dataclasses import replace
from datetime import datetime

import msgspec

from modelswap_operator.api.modelversion import Failure, ModelVersionStatus, RolloutStatus, TargetStatus
from modelswap_operator.api.reasons import TEXTS, ConditionType, Reason
from modelswap_operator.api.times import stamp
from modelswap_operator.planning import canary, staging
from modelswap_operator.planning.actions import Action, RecordFailure
from modelswap_operator.planning.assess import Assessment
from modelswap_operator.planning.failures import remembered
from modelswap_operator.planning.operations import attempt_number
from modelswap_operator.planning.snapshot import Snapshot
from modelswap_operator.status import facts, history, pods
from modelswap_operator.status.conditions import Verdict, conditions, cut
from modelswap_operator.status.outcome import Outcome, outcome
from modelswap_operator.status.prefetch import prefetched

FAILURES_KEPT = 20
STILL = (Reason.FROZEN, Reason.GROUPS_UNSUPPORTED)


def summarize(snapshot: Snapshot, action: Action, now: datetime) -> ModelVersionStatus:
    """Return the status to write after a pass that decided on ``action``."""
    before = snapshot.status
    if snapshot.spec is None:
        return _unreadable(snapshot, now)
    failures = _failures(snapshot, action)
    a = Assessment(replace(snapshot, status=msgspec.structs.replace(before, failures=failures)))
    result = outcome(a, now)
    verdicts = (*_main(result), facts.serving(a), facts.verified(a), facts.suspended(a), facts.drifted(a))
    return signed(
        snapshot,
        ModelVersionStatus(
            observed_generation=snapshot.generation if result.decided else before.observed_generation,
            last_handled_request_at=snapshot.requested_at or before.last_handled_request_at,
            target=_target(a),
            stable=history.stable(a),
            versions=pods.versions(a),
            rollout=_rollout(a, result, now),
            plan=history.plans(a),
            pods=pods.pod_list(a),
            pod_counts=pods.pod_counts(a),
            failures=failures,
            history=history.history(a, result=result.ended, now=now),
            prefetch=prefetched(a),
            conditions=conditions(verdicts, observed=before.conditions, generation=snapshot.generation, now=now),
        ),
    )


def signed(snapshot: Snapshot, status: ModelVersionStatus) -> ModelVersionStatus:
    """Return a status with the name of the operator whose it is: a new one's only when it has something new to say."""
    before = snapshot.status
    status = msgspec.structs.replace(status, operator=before.operator)
    return (
        status if status == before else msgspec.structs.replace(status, operator=snapshot.operator or before.operator)
    )


def _main(result: Outcome) -> tuple[Verdict, ...]:
    return (
        Verdict(ConditionType.READY, result.ready, result.reason, result.message),
        Verdict(ConditionType.RECONCILING, bool(result.reconciling), result.reconciling, result.message),
        Verdict(ConditionType.STALLED, result.stalled, result.reason, result.message),
    )


def _unreadable(snapshot: Snapshot, now: datetime) -> ModelVersionStatus:
    message = f"{TEXTS[Reason.INVALID_SPEC]}: {snapshot.spec_error}"
    verdicts = (
        Verdict(ConditionType.READY, False, Reason.INVALID_SPEC, message),
        Verdict(ConditionType.STALLED, True, Reason.INVALID_SPEC, message),
    )
    found = conditions(verdicts, observed=snapshot.status.conditions, generation=snapshot.generation, now=now)
    return msgspec.structs.replace(snapshot.status, observed_generation=snapshot.generation, conditions=found)


def _failures(snapshot: Snapshot, action: Action) -> tuple[Failure, ...]:
    known = remembered(snapshot)
    if not isinstance(action, RecordFailure):
        return known
    new = msgspec.structs.replace(action.failure, message=cut(action.failure.message))
    others = (f for f in known if (f.generation, f.digest) != (new.generation, new.digest))
    return (new, *others)[:FAILURES_KEPT]


def _target(a: Assessment) -> TargetStatus:
    current, before = a.snapshot.assignment, a.snapshot.status.target
    digest = a.target_digest
    named = (current.stable, current.candidate) if current is not None else ()
    if current is not None and any(ref is not None and ref.digest == digest != "" for ref in named):
        revision = current.revision
    else:
        revision = before.revision if before is not None and before.digest == digest else 0
    return TargetStatus(
        revision=revision,
        version=a.spec.version,
        digest=digest,
        resolved_uri=a.target.uri if a.target is not None else "",
    )


def _rollout(a: Assessment, result: Outcome, now: datetime) -> RolloutStatus:
    current, before = a.snapshot.assignment, a.snapshot.status.rollout
    operations = [p.state.operation for p in a.counted if p.state is not None]
    revision = current.revision if current is not None else 0
    attempts = [attempt_number(o) for o in operations if o is not None and o.revision == revision]
    progress = a.snapshot.memory.progress
    candidate = current.candidate if current is not None else None
    shown = before.last_progress_time if before is not None else ""
    soak = canary.soak(a, now)
    return RolloutStatus(
        state=result.state,
        attempt=max(attempts, default=0),
        candidate_pod_uids=tuple(candidate.pod_uids) if candidate is not None else (),
        staged_pods=len(staging.staged(a)),
        soak=soak.pods if soak is not None else (),
        # While changes are held back the clock is moved with each look, which is no news.
        last_progress_time=shown if progress is None or result.state in STILL else stamp(progress.at),
    )
