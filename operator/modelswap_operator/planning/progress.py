"""When the slot last came further, and when its patience ends.

Progress is a new high-water mark: a pod that repeats what it had reached before has not progressed, so an endless row
of retries does meet the deadline.
"""

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from modelswap_engine.protocol.states import SwapState
from modelswap_operator.api.reasons import Reason
from modelswap_operator.api.times import parse
from modelswap_operator.planning import canary
from modelswap_operator.planning.assess import Assessment, running
from modelswap_operator.planning.snapshot import Pod, Progress, Snapshot

VACANT_SECONDS = 30.0
"""How long a slot whose version is not decided has no pods before that counts as scaled to zero: one that is made anew
under its name is away for a moment."""

_ORDER = {state: index for index, state in enumerate(SwapState)}


def advance(snapshot: Snapshot, now: datetime) -> Progress | None:
    """Return the progress to remember after a look at the slot; None while there is no spec."""
    if snapshot.spec is None:
        return None
    a = Assessment(snapshot)
    revision = snapshot.assignment.revision if snapshot.assignment is not None else 0
    before = snapshot.memory.progress
    same = before is not None and before.generation == snapshot.generation
    old = dict(before.marks) if before is not None and same else {}
    marks = {p.uid: max(_mark(a, p), old.get(p.uid, ())) for p in a.counted}
    current = Progress(
        generation=snapshot.generation,
        revision=revision,
        resolved=a.target is not None,
        done=a.done or a.vacant,
        marks=marks,
        at=now,
        **_vacancy(a, now),
    )
    if a.held(now) is not None or a.grouped is not None:
        at = now  # nothing may move, so no time passes
    elif before is None:
        recorded = _recorded(snapshot)
        at = min(recorded, now) if recorded is not None else now  # a clock that was wrong may have written it
    elif same and _equal(before, current):
        at = before.at
    else:
        at = now
    return replace(current, at=at)


def _vacancy(a: Assessment, now: datetime) -> dict[str, Any]:
    """Return since when there is no pod, and whether that is meant; an operator that begins believes what was said."""
    if not a.vacant:
        return {}
    before, shown = a.snapshot.memory.progress, a.snapshot.status.rollout
    if before is None:
        since, meant = now, shown is not None and shown.state == Reason.SCALED_TO_ZERO
    else:
        since, meant = before.vacant_since or now, before.at_zero
    return {"vacant_since": since, "at_zero": meant or now >= since + timedelta(seconds=VACANT_SECONDS)}


def at_zero_from(a: Assessment) -> datetime | None:
    """Return when a slot without pods counts as scaled to zero; None when it has some, or does already."""
    progress = a.snapshot.memory.progress
    if progress is None or progress.vacant_since is None or a.scaled_to_zero:
        return None
    return progress.vacant_since + timedelta(seconds=VACANT_SECONDS)


def _equal(before: Progress, current: Progress) -> bool:
    facts = [(p.revision, p.resolved, p.done) for p in (before, current)]
    further = any(mark > before.marks.get(uid, ()) for uid, mark in current.marks.items())
    return facts[0] == facts[1] and not further


def _mark(a: Assessment, pod: Pod) -> tuple[int, ...]:
    """How far a pod has come: reachable, step of the operation in flight, bytes read, proved."""
    if pod.state is None:
        return (0,)
    if a.target is not None and a.there(pod, a.target_digest):
        return (2,)
    operation = running(pod)
    return (1, _ORDER[operation.state], operation.bytes_travelled) if operation is not None else (1,)


def _recorded(snapshot: Snapshot) -> datetime | None:
    """What status says, when it speaks of this generation (after a restart of the operator)."""
    status = snapshot.status
    spoken = any(c.observed_generation == snapshot.generation for c in status.conditions)
    if not spoken or status.rollout is None or status.rollout.state in (Reason.FROZEN, Reason.GROUPS_UNSUPPORTED):
        return None
    return parse(status.rollout.last_progress_time)


def deadline(a: Assessment) -> datetime | None:
    """Return when the rollout counts as stuck; None when it is done, has failed, is suspended or has no pods any more.

    The canary's soak is not counted: nothing is to come further in it.
    """
    progress = a.snapshot.memory.progress
    if progress is None or a.done or a.vacant or a.failure is not None or a.spec.suspend:
        return None
    since = max(progress.at, canary.recorded_end(a) or progress.at)
    return since + timedelta(seconds=a.spec.rollout.progress_deadline_seconds)


def expired(a: Assessment, now: datetime) -> bool:
    """Say whether nothing has moved for longer than the deadline, whatever the state."""
    progress = a.snapshot.memory.progress
    seconds = a.spec.rollout.progress_deadline_seconds
    return progress is not None and now >= progress.at + timedelta(seconds=seconds)
