"""Which of the things that pods report are new failures, and of which kind.

A content failure (the version itself is refused) is recorded in status and never tried again until the spec changes.
So is a rollout that got stuck half-way and is taken back. Everything else is an attempt that is repeated later.
"""

from collections.abc import Iterator
from datetime import datetime
from typing import Final

from modelswap_engine.protocol.assignment import AssignmentTarget
from modelswap_engine.protocol.errors import DigestMismatch, ErrorBody, SignatureInvalid, SignatureMissing
from modelswap_engine.protocol.messages import SwapStatus
from modelswap_operator.api.labels import ABORT, REQUESTED_AT
from modelswap_operator.api.modelversion import Failure, OnFailure
from modelswap_operator.api.reasons import TEXTS, Reason
from modelswap_operator.api.times import stamp
from modelswap_operator.planning import canary
from modelswap_operator.planning.actions import FailedAttempt
from modelswap_operator.planning.assess import Assessment, trusting
from modelswap_operator.planning.errors import is_content, text
from modelswap_operator.planning.operations import covers
from modelswap_operator.planning.progress import deadline
from modelswap_operator.planning.snapshot import Pod, Snapshot
from modelswap_operator.planning.staging import given_up

UNKNOWN = ErrorBody(code="EngineFailed", message="the swap ended without success and without a reason", retryable=True)


def new_failure(a: Assessment, now: datetime) -> Failure | None:
    """Return a content failure that status does not hold yet."""
    return (
        _abort(a, now)
        or plan_failure(a, now)
        or _swap_failure(a, now)
        or _candidate_failure(a, now)
        or _canary_failure(a, now)
        or _deadline_failure(a, now)
    )


def _abort(a: Assessment, now: datetime) -> Failure | None:
    """Return a failure when a person gives up this generation's rollout; one that has ended cannot be."""
    generation = str(a.snapshot.generation)
    if a.snapshot.asked.abort != generation or a.failure is not None or a.done or a.completed_before:
        return None
    message = f"{a.spec.version} was given up by the annotation {ABORT}: {generation}; another spec tries again"
    return _of_target(a, Reason.ABORTED, message, now=now)


def plan_failure(a: Assessment, now: datetime) -> Failure | None:
    """Return why pods refuse the wanted source, when that is new."""
    if a.failure is not None:
        return None
    if (old := _cannot_verify(a, now)) is not None:
        return old
    for result in a.plans.values():
        refusals = [result.error] if result.error is not None else []
        digest = a.spec.source.digest
        if result.plan is not None:
            refusals = list(result.plan.refusals)
            digest = digest or result.plan.to_digest
        for error in refusals:
            if is_content(error):
                return _failure(a, error, digest=digest, pod=result.pod, now=now)
    return None


def _cannot_verify(a: Assessment, now: datetime) -> Failure | None:
    """Return a failure when a pod would take the version without the signature that is asked for."""
    wanted = a.target.verification if a.target is not None else a.spec.verification.to_wire()
    if wanted is None:
        return None
    for pod in a.counted:
        if trusting(pod) and not a.there(pod, a.target_digest):
            message = (
                f"the sidecar of pod {pod.name} is too old to verify signatures: upgrade the engine image, then ask "
                f"again ({REQUESTED_AT})"
            )
            return _of_target(a, Reason.ENGINE_PROTOCOL, message, now=now)
    return None


def _swap_failure(a: Assessment, now: datetime) -> Failure | None:
    for pod in a.counted:
        wanted = a.desired(pod) or a.candidate  # which the pods that are not named stage
        if wanted is None:
            continue
        for digest, error in _reports(a, pod, wanted):
            if is_content(error) and a.failed(digest) is None:
                return _failure(a, _moved(error), digest=digest, pod=pod.name, now=now)
    return None


def _moved(error: ErrorBody) -> ErrorBody:
    """Name what a mismatch means once a pod has resolved the source: it was another content then."""
    if error.code != DigestMismatch.code:
        return error
    advice = "publish each version under a name of its own, and put the old content back or change the spec"
    return ErrorBody(
        code=Reason.SOURCE_DRIFTED, message=f"{TEXTS[Reason.SOURCE_DRIFTED]}: {error.message}", advice=advice
    )


def _candidate_failure(a: Assessment, now: datetime) -> Failure | None:
    """Return a failure when the first pod restarted into the version and cannot serve.

    A restarted container loads what it is assigned, so a version that cannot be loaded keeps the pod down until it is
    withdrawn; no operation says so then.
    """
    current = a.snapshot.assignment
    candidate = current.candidate if current is not None and a.owned else None
    if candidate is None or a.failure is not None or candidate.digest != a.target_digest:
        return None
    ends = deadline(a)
    for pod in (p for p in a.counted if p.uid in candidate.pod_uids):
        state = pod.state
        error = None
        if state is not None and state.live is None and state.reason == Reason.LOAD_FAILED:
            error = ErrorBody(code=Reason.LOAD_FAILED, message=state.message, advice=TEXTS[Reason.LOAD_FAILED])
        elif ends is not None and now >= ends and not pod.ready and (state is None or state.live is None):
            error = ErrorBody(code=Reason.CANDIDATE_LOST, message=TEXTS[Reason.CANDIDATE_LOST])
        if error is not None:
            return _failure(a, error, digest=candidate.digest, pod=pod.name, now=now)
    return None


def _canary_failure(a: Assessment, now: datetime) -> Failure | None:
    """Return a failure when the canary pods have shown that the version is not to be spread."""
    cause = canary.refusal(a, now)
    message = f"{a.spec.version} failed on its canary: {cause}"
    return _of_target(a, Reason.CANARY_FAILED, message, now=now) if cause else None


def _deadline_failure(a: Assessment, now: datetime) -> Failure | None:
    """Return a failure when pods have moved and the others have not followed in time: those that moved go back.

    Where no pod has moved, or a rollout had been finished before, there is nothing to take back: it is tried on.
    """
    ends = deadline(a)
    if ends is None or now < ends or a.spec.rollout.on_failure is not OnFailure.ROLLBACK or a.completed_before:
        return None
    if not _spreading(a) and canary.soak(a, now) is None:
        return None
    waiting = canary.story(a, now)
    message = (
        f"{len(a.on_target)}/{len(a.counted)} pods came to {a.spec.version}, then no progress for "
        f"{a.spec.rollout.progress_deadline_seconds} s{'; ' if waiting else ''}{waiting}"
    )
    return _of_target(a, Reason.PROGRESS_DEADLINE_EXCEEDED, message, now=now)


def _spreading(a: Assessment) -> bool:
    """Say whether the target has become stable and there is a version to go back to."""
    if not a.owned or a.target is None or a.stable_digest != a.target.digest:
        return False
    back = a.snapshot.ledger.previous
    return back is not None and back.digest != a.target.digest and a.failed(back.digest) is None


def _of_target(a: Assessment, reason: Reason, message: str, *, now: datetime) -> Failure:
    digest = a.target_digest
    return Failure(generation=a.snapshot.generation, digest=digest, reason=reason, message=message, time=stamp(now))


def _reports(a: Assessment, pod: Pod, wanted: AssignmentTarget) -> Iterator[tuple[str, ErrorBody]]:
    """What a pod, or the call to it, said about the version wanted of it at the current revision."""
    operation = _ended_badly(a, pod)
    if operation is not None and operation.target.digest == wanted.digest:
        yield wanted.digest, operation.error or UNKNOWN
    attempt = a.snapshot.memory.attempts.get(pod.uid)
    revision = a.snapshot.assignment.revision if a.snapshot.assignment is not None else 0
    if attempt is not None and attempt.revision == revision and attempt.digest == wanted.digest:
        yield wanted.digest, attempt.error


def _ended_badly(a: Assessment, pod: Pod) -> SwapStatus | None:
    """Return the pod's last operation when it failed under the current revision."""
    operation = pod.state.operation if pod.state is not None else None
    current = a.snapshot.assignment
    if operation is None or current is None or operation.revision != current.revision:
        return None
    return operation if operation.state.terminal and not operation.state.succeeded else None


TAKEN_BACK: Final = frozenset({Reason.PROGRESS_DEADLINE_EXCEEDED, Reason.CANARY_FAILED, Reason.CANDIDATE_LOST})
"""The operator's own verdicts on how a rollout went."""
ASKABLE: Final = TAKEN_BACK | {Reason.ENGINE_PROTOCOL, SignatureMissing.code, SignatureInvalid.code}
"""What is forgotten when somebody asks to try again: what may be otherwise by now, with the same spec."""


def remembered(snapshot: Snapshot) -> tuple[Failure, ...]:
    """Return the failures that still count: what the content was refused for always does."""
    known = snapshot.status.failures
    if not snapshot.asked_again:
        return known
    mine = snapshot.generation
    return tuple(f for f in known if f.generation != mine or f.reason not in ASKABLE)


def new_attempts(a: Assessment) -> tuple[FailedAttempt, ...]:
    """Return operations that ended without success for a cause that may heal, and were not noted yet."""
    found = []
    for pod in a.counted:
        operation = _ended_badly(a, pod)
        noted = a.snapshot.memory.attempts.get(pod.uid)
        if operation is None or (noted is not None and covers(noted.operation_id, operation.operation_id)):
            continue
        if given_up(operation):
            continue
        error = operation.error or UNKNOWN
        if not is_content(error):
            found.append(
                FailedAttempt(
                    pod=pod,
                    operation_id=operation.operation_id,
                    revision=operation.revision,
                    digest=operation.target.digest,
                    error=error,
                )
            )
    return tuple(found)


def _failure(a: Assessment, error: ErrorBody, *, digest: str, pod: str, now: datetime) -> Failure:
    return Failure(
        generation=a.snapshot.generation,
        digest=digest,
        reason=error.code,
        message=f"{a.spec.version} refused by pod {pod}: {text(error)}",
        time=stamp(now),
    )
