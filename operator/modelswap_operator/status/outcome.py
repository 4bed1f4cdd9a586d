"""Where the slot stands against its spec, as one value: what Ready, Reconciling and Stalled say, and what ended."""

from dataclasses import dataclass
from datetime import datetime

from modelswap_operator.api.labels import SLOT_LABEL
from modelswap_operator.api.modelversion import Failure, OnFailure
from modelswap_operator.api.reasons import TEXTS, Reason
from modelswap_operator.planning import canary, staging
from modelswap_operator.planning.adapters import Adapters, blocker
from modelswap_operator.planning.assess import Assessment, running
from modelswap_operator.planning.assignment import decide
from modelswap_operator.planning.errors import is_content, text
from modelswap_operator.planning.progress import deadline, expired
from modelswap_operator.planning.snapshot import Pod, Unreachable
from modelswap_operator.status import pods

CALM = ("Serving", "Waiting", "Starting", "Staging", "Staged")
"""States of pods that serve, or are not expected to yet."""
COMPLETE, ROLLING_BACK, ROLLED_BACK = "Complete", "RollingBack", "RolledBack"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The verdict.

    Attributes:
        ready: True, False or None for Unknown.
        reconciling: reason while the operator works on it; None when it does not.
        stalled: True when it takes a person or another spec.
        decided: nothing more will come of this generation by itself (done, stalled, suspended).
        state: for ``status.rollout.state``.
        ended: result for the history; empty while the rollout goes on.
    """

    ready: bool | None
    reason: str
    message: str
    reconciling: str = ""
    stalled: bool = False
    decided: bool = False
    state: str = "Progressing"
    ended: str = ""


def outcome(a: Assessment, now: datetime) -> Outcome:
    """Return the verdict on a slot."""
    if a.grouped is not None:
        return _grouped(a.grouped)
    if a.failure is not None:
        return _failed(a, a.failure, now)
    if a.done:
        message = f"{len(a.counted)}/{len(a.counted)} pods serve {a.spec.version}{_trained(a)}"
        return Outcome(
            ready=True, reason=Reason.SUCCEEDED, message=message, decided=True, state=COMPLETE, ended="Succeeded"
        )
    if a.scaled_to_zero and a.decided:
        return _at_zero(a)
    if a.spec.suspend:
        return _suspended(a)
    held = a.held(now)
    if held is not None:
        message = f"{_figure(a)}; {held.message}"
        reason = Reason.FROZEN
        return Outcome(ready=None, reason=reason, message=message, reconciling=reason, state=reason)
    blocked = _blocked(a)
    if blocked is not None:
        return blocked
    if a.scaled_to_zero:
        return _at_zero(a)
    ends = deadline(a)
    if ends is not None and now >= ends:
        return _overdue(a, now)
    return _retrying(a) or _soaking(a, now) or _progressing(a)


def _grouped(pod: Pod) -> Outcome:
    """A part of a group must not change without the others, and this release cannot change them as one."""
    reason = Reason.GROUPS_UNSUPPORTED
    message = (
        f"pod {pod.name} is one of a group ({pod.group}), and single pods only can be changed: "
        f"take the label {SLOT_LABEL} off its pods; they serve on as they are"
    )
    return Outcome(ready=False, reason=reason, message=message, stalled=True, decided=True, state=reason)


def _at_zero(a: Assessment) -> Outcome:
    """Nothing serves and nothing is wrong; the label is named, for whoever expects pods to have it."""
    reason, stable = Reason.SCALED_TO_ZERO, a.snapshot.assignment.stable if a.snapshot.assignment is not None else None
    message = f"no pod has the label {SLOT_LABEL}: {a.snapshot.slot}; those that come start on "
    if a.decided or stable is None:
        message += a.spec.version
    else:
        message += f"{stable.version or stable.digest} from {stable.uri} and are taken to {a.spec.version} from there"
    return Outcome(ready=True, reason=reason, message=message, decided=True, state=reason)


def _trained(a: Assessment) -> str:
    """Return how many of them serve what a trainer made of it."""
    states = [p.state for p in a.on_target]
    count = sum(s is not None and s.live is not None and s.live.digest != a.target_digest for s in states)
    return f", {count} of them as a trainer changed it (weights: External)" if count else ""


def _failed(a: Assessment, failure: Failure, now: datetime) -> Outcome:
    """The version was refused: on the way back, or settled with a person to act."""
    halted = a.spec.rollout.on_failure is OnFailure.HALT
    back = f"; {_others(a)}" if a.counted else ""
    note = "; rollout.onFailure is Halt: pods stay as they are" if halted else ""
    message = f"{failure.message}{back}{note}"
    returned = _spoken(a) in (ROLLING_BACK, ROLLED_BACK)
    outstanding = _outstanding(a)
    moving = not a.spec.suspend and (decide(a, now) is not None or (outstanding and not expired(a, now)))
    if moving:
        going_back = not halted and (returned or bool(a.on_target) or a.stable_digest == a.target_digest != "")
        return Outcome(
            ready=False,
            reason=failure.reason,
            message=message,
            reconciling=Reason.ROLLING_BACK,
            state=ROLLING_BACK if going_back else "Withdrawing",
        )
    if returned and not outstanding:
        return Outcome(
            ready=False,
            reason=Reason.ROLLED_BACK,
            message=f"{failure.reason}: {message}",
            stalled=True,
            decided=True,
            state=ROLLED_BACK,
            ended=ROLLED_BACK,
        )
    state = ROLLING_BACK if returned else "Halted" if halted else "Failed"
    ended = "" if returned else "Failed"
    return Outcome(
        ready=False, reason=failure.reason, message=message, stalled=True, decided=True, state=state, ended=ended
    )


def _outstanding(a: Assessment) -> bool:
    """Say whether some pod that can be asked is not yet where the assignment wants it."""
    for pod in a.counted:
        wanted = a.desired(pod)
        if running(pod) is not None:
            return True
        if wanted is not None and pod.state is not None and not a.there(pod, wanted.digest):
            return True
    return False


def _spoken(a: Assessment) -> str:
    """Return the rollout state shown for this generation."""
    status = a.snapshot.status
    same = any(c.observed_generation == a.snapshot.generation for c in status.conditions)
    return status.rollout.state if same and status.rollout is not None else ""


def _suspended(a: Assessment) -> Outcome:
    busy = any(running(p) for p in a.present)
    return Outcome(
        ready=None,
        reason=Reason.SUSPENDED,
        message=f"suspended: {_figure(a)}; status.plan says what would be done",
        reconciling=Reason.SWAPPING if busy else "",
        decided=not busy,
        state=Reason.SUSPENDED,
    )


def _blocked(a: Assessment) -> Outcome | None:
    """No pod has been named for the version, because an adapter has nothing for its base."""
    candidate = a.snapshot.assignment.candidate if a.snapshot.assignment is not None else None
    here = {pod.uid for pod in a.counted}
    named = candidate is not None and candidate.digest == a.target_digest and not here.isdisjoint(candidate.pod_uids)
    if named or not a.owned or a.target_digest in ("", a.stable_digest):
        return None  # what pods serve that are not taken over yet may be this very version
    found = blocker(Adapters(a))
    if found is None or (found.waiting and a.scaled_to_zero):
        return None
    reason = Reason.BLOCKED_BY_ADAPTER
    who = f"LoRAAdapter {found.wish.adapter.name} has nothing for base {a.target_digest} ({a.spec.version})"
    if found.waiting:
        message = f"{_figure(a)}; {who} yet: its source is being looked up"
        return Outcome(ready=None, reason=Reason.PROGRESSING, message=message, reconciling=Reason.RESOLVING)
    message = f"{_figure(a)}; {who}; {TEXTS[reason]}"
    return Outcome(ready=False, reason=reason, message=message, stalled=True, decided=True, state="Blocked")


def _overdue(a: Assessment, now: datetime) -> Outcome:
    seconds = a.spec.rollout.progress_deadline_seconds
    waiting = canary.story(a, now) or staging.story(a) or _reading(a) or _coming(a)
    return Outcome(
        ready=False,
        reason=Reason.PROGRESS_DEADLINE_EXCEEDED,
        message=f"no progress for {seconds} s: {_figure(a)}; {waiting or 'it is still tried, slowly'}",
        stalled=True,
        decided=True,
        state="Stalled",
    )


def _retrying(a: Assessment) -> Outcome | None:
    """An attempt failed that may heal, or a pod cannot be asked."""
    revision = a.snapshot.assignment.revision if a.snapshot.assignment is not None else 0
    for pod in a.counted:
        attempt = a.snapshot.memory.attempts.get(pod.uid)
        if attempt is not None and attempt.revision == revision and not is_content(attempt.error):
            return _retry(False, attempt.error.code, _told(a, pod.name, text(attempt.error)))
    for result in a.plans.values():
        if result.error is not None:
            return _retry(False, result.error.code, _told(a, result.pod, text(result.error)))
    for pod in a.counted:
        if isinstance(pod.engine, Unreachable):
            return _retry(None, pod.engine.reason, _told(a, pod.name, pod.engine.message))
    return None


def _told(a: Assessment, pod: str, cause: str) -> str:
    return f"{_figure(a)}; {cause}" if pod in cause else f"{_figure(a)}; pod {pod}: {cause}"


def _retry(ready: bool | None, reason: str, message: str) -> Outcome:
    return Outcome(ready=ready, reason=reason, message=message, reconciling=Reason.PROGRESSING_WITH_RETRY)


def _progressing(a: Assessment) -> Outcome:
    if not a.counted:
        reason = Reason.WAITING_FOR_PODS
        message = f"{TEXTS[reason]}: {_coming(a)}"
        return Outcome(ready=None, reason=reason, message=message, reconciling=reason, state=reason)
    waiting = staging.story(a)
    if waiting:
        reason, message = Reason.STAGING, f"{_figure(a)}; {waiting}"
        return Outcome(ready=None, reason=Reason.PROGRESSING, message=message, reconciling=reason, state=reason)
    reason, reading = Reason.RESOLVING if a.target is None else Reason.SWAPPING, _reading(a)
    message = f"{_figure(a)}; {reading}" if reading else _figure(a)
    return Outcome(ready=None, reason=Reason.PROGRESSING, message=message, reconciling=reason)


def _coming(a: Assessment) -> str:
    """Return what is known of pods while none has been ready; empty once one has."""
    if a.counted:
        return ""
    if not a.snapshot.pods:
        return f"no pod has the label {SLOT_LABEL}: {a.snapshot.slot}"
    failed = ((p, p.state.load_failure) for p in a.present if p.state is not None)
    found = next(((p, failure) for p, failure in failed if failure is not None), None)
    cause = f"; pod {found[0].name} cannot load {found[1].target.version}: {text(found[1].error)}" if found else ""
    return f"{len(a.present)} starting{cause}"


def _reading(a: Assessment) -> str:
    """Return which pod is looking what up where; empty when none does."""
    asked = next((result for result in a.plans.values() if result.pending), None)
    return f"pod {asked.pod} is reading {a.spec.source.uri}" if asked is not None and a.target is None else ""


def _soaking(a: Assessment, now: datetime) -> Outcome | None:
    """The canary pods serve the version and have not shown all that they have to."""
    waiting = canary.story(a, now)
    if not waiting:
        return None
    reason = Reason.SOAKING
    message = f"{_figure(a)}; {waiting}"
    return Outcome(ready=None, reason=Reason.PROGRESSING, message=message, reconciling=reason, state=reason)


def _figure(a: Assessment) -> str:
    """Return ``1/2 pods serve 1.1 (pod: Pausing)``."""
    line = f"{len(a.on_target)}/{len(a.counted)} pods serve {a.spec.version}"
    worst = next((p for p in pods.pod_list(a) if p.state not in CALM), None)
    return f"{line} ({worst.name}: {worst.state})" if worst is not None else line


def _others(a: Assessment) -> str:
    """Return which versions the pods serve meanwhile."""
    parts = [f"{v.pods}/{len(a.counted)} pods serve {v.version or v.digest}" for v in pods.versions(a)]
    return ", ".join(parts) or "no pod has proved what it serves"
