"""Staging ahead: every pod has the new version beside the one that it serves, before the first pod changes.

So what is wrong with a version shows while nothing has changed, and commits follow each other quickly. Meanwhile the
assignment has a candidate without pods: a pod that restarts loads what is stable. Pods hold what they staged by leases,
which are renewed here; an operator that is gone costs them nothing but the memory for a while. No swap needs any of it:
a pod that lost what it had staged stages when its turn comes.
"""

import hashlib
from collections.abc import Collection
from datetime import datetime
from typing import Final

from modelswap_engine.protocol.codec import encode
from modelswap_engine.protocol.errors import Cancelled, HoldEnded
from modelswap_engine.protocol.holding import Hold
from modelswap_engine.protocol.messages import SwapStatus
from modelswap_engine.protocol.version import HOLDS_SINCE
from modelswap_operator.api.modelversion import ModelVersionSpec
from modelswap_operator.planning.assess import Assessment, running
from modelswap_operator.planning.snapshot import Pod, Unreachable

LEASE_SECONDS: Final = 300.0
RENEW_SECONDS: Final = LEASE_SECONDS / 2
"""What is left of a lease when it is renewed."""

LONGEST_SOAK_SECONDS: Final = 600
"""Through a longer soak pods do not hold what they staged: they stage again, each when its turn comes."""

PATIENCE_ATTEMPTS: Final = 3
"""How often a pod that serves traffic may be unreachable for us before the others go on without it."""

_GIVEN_UP: Final = (Cancelled.code, HoldEnded.code)


def holding(pod: Pod) -> SwapStatus | None:
    """Return the operation of a pod that goes no further than staged before it is told to, if there is one."""
    operation = running(pod)
    return operation if operation is not None and operation.hold is not None else None


def swapping(pod: Pod) -> SwapStatus | None:
    """Return the operation of a pod that may take it out of service; staging does not."""
    operation = running(pod)
    return operation if operation is not None and operation.hold is None else None


def held(pod: Pod, digest: str) -> SwapStatus | None:
    """Return the operation that holds a version staged, and waits for its turn."""
    operation = holding(pod)
    there = operation is not None and operation.hold is not None and operation.hold.held
    return operation if there and operation is not None and operation.target.digest == digest else None


def given_up(operation: SwapStatus) -> bool:
    """Say whether an operation ended because nobody wanted any more what it staged: no failed attempt."""
    return operation.hold is not None and operation.error is not None and operation.error.code in _GIVEN_UP


def hold(spec: ModelVersionSpec) -> Hold:
    """Return the lease to stage under; its mark is how the swap is to be done."""
    how = encode((spec.traffic.to_wire(), spec.loading.to_wire(), spec.checks.to_wire(), spec.adapters))
    return Hold(seconds=LEASE_SECONDS, mark=hashlib.sha256(how).hexdigest()[:16])


def wanted(a: Assessment) -> bool:
    """Say whether the pods stage the target before the first of them serves it.

    Not where it buys nothing (one pod; a version that every pod has served, whose tensors are retained), not beside a
    trainer (a pod that holds a swap takes no update), and not while some sidecar is too old to be asked.
    """
    if not a.spec.rollout.stage_ahead or a.external or a.completed_before or len(a.counted) < 2:
        return False
    return all(p.state.protocol_version >= HOLDS_SINCE for p in a.counted if p.state is not None)


def staged(a: Assessment) -> tuple[Pod, ...]:
    """Return the counted pods that hold the target staged."""
    return tuple(p for p in a.counted if held(p, a.target_digest) is not None)


def missing(a: Assessment) -> tuple[Pod, ...]:
    """Return the pods that have yet to stage before the first one is named; empty when nobody has to, or all have."""
    if not wanted(a):
        return ()
    return tuple(p for p in a.counted if not a.there(p, a.target_digest) and not held(p, a.target_digest) and able(p))


def able(pod: Pod) -> bool:
    """Say whether a pod is waited for: it can be asked, or has been out of sight for a moment only."""
    if isinstance(pod.engine, Unreachable):
        return pod.ready and pod.engine.attempts < PATIENCE_ATTEMPTS
    return pod.state is not None and pod.state.live is not None and not pod.state.quarantined


def next_wave(a: Assessment, now: datetime) -> tuple[Pod, ...]:
    """Return the pods that begin to stage now: at most one more at once than have staged."""
    if a.candidate is None or a.candidate.pod_uids:
        return ()
    under_way = sum(holding(p) is not None for p in a.counted) - len(staged(a))
    there = sum(a.there(p, a.target_digest) for p in a.counted) + len(staged(a))
    due = [p for p in missing(a) if p.state is not None and running(p) is None and _due(a, p, now)]
    return tuple(due[: max(0, 1 + there - under_way)])


def _due(a: Assessment, pod: Pod, now: datetime) -> bool:
    attempt, current = a.snapshot.memory.attempts.get(pod.uid), a.snapshot.assignment
    return attempt is None or current is None or attempt.revision != current.revision or attempt.retry_at <= now


def kept(a: Assessment, pod: Pod, operation: SwapStatus, now: datetime) -> bool:
    """Say whether a pod is to keep what it stages, the target being wanted still.

    Memory is not held through what may take days: a suspension, a freeze, a long soak. How it is to be swapped is
    looked at when it stages, so another way means to stage again.
    """
    if operation.hold is None or a.spec.suspend or a.held(now) is not None:
        return False
    if operation.hold.mark != hold(a.spec).mark:
        return False
    canary = a.spec.rollout.canary
    named: Collection[str] = a.candidate.pod_uids if a.candidate is not None else ()
    long = canary.pods > 0 and canary.soak_seconds > LONGEST_SOAK_SECONDS
    return not (long and named and pod.uid not in named)


def to_renew(a: Assessment) -> tuple[Pod, ...]:
    """Return the pods whose leases are to be renewed."""
    found = ((p, holding(p)) for p in a.present)
    return tuple(p for p, o in found if o is not None and o.hold is not None and o.hold.seconds_left <= RENEW_SECONDS)


def renewal(pod: Pod) -> float | None:
    """Return in how many seconds a pod's lease is to be renewed; None when it waits for nothing."""
    operation = holding(pod)
    if operation is None or operation.hold is None or not operation.hold.held:
        return None
    return max(0.0, operation.hold.seconds_left - RENEW_SECONDS)


def story(a: Assessment) -> str:
    """Return how far it has come while the first pod is not named; empty when nobody is waited for."""
    if a.candidate is None or a.candidate.pod_uids or not missing(a):
        return ""
    there, away = len(staged(a)), len(missing(a))
    return f"{there}/{there + away} pods have staged it, then the first one changes"
