"""The canary: what the first pods have shown of a version, and what follows from it.

What has to be known again is in status: for each pod since when, and from which counts, it serves the version. So an
operator that starts anew counts on where the one before it stopped. Pods count requests by version since their process
began; a soak therefore belongs to one boot id. Time is a value here, as everywhere in planning.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta

from modelswap_operator.api.modelversion import SoakStatus
from modelswap_operator.api.times import parse, stamp
from modelswap_operator.planning.assess import Assessment
from modelswap_operator.planning.snapshot import Pod

POLL_SECONDS = 2.0
"""How often canary pods are read."""

RESTARTS = 3
"""A canary pod whose engine was started again so often has failed the version."""

NAMES_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class Soak:
    """What the canary pods have shown so far.

    Attributes:
        pods: those that have served the version, for status.
        names: of the same pods, for people.
        ends: when they have served it for long enough; None while one is away or still to come.
        requests: of this version that they have answered since, the failed ones among them.
        errors: those that failed.
        blind: a pod whose sidecar is too old to count; empty when there is none.
        restarted: a pod whose engine was started again too often; empty when there is none.
    """

    pods: tuple[SoakStatus, ...]
    names: tuple[str, ...]
    ends: datetime | None
    requests: int
    errors: int
    blind: str
    restarted: str

    @property
    def who(self) -> str:
        """Return the pods' names as a text."""
        more = len(self.names) - NAMES_SHOWN
        return ", ".join(self.names[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def required(a: Assessment) -> bool:
    """Say whether pods have to show something; going back to what every pod served last is not held up."""
    return a.spec.rollout.canary.pods > 0 and not a.completed_before


def size(a: Assessment) -> int:
    """Return how many pods go first; one that was down before the version came is no part of it."""
    nameable = [p for p in a.counted if p.ready or p.uid in _recorded(a) or _named(a, p)]
    return max(1, min(a.spec.rollout.canary.pods, len(nameable))) if required(a) else 1


def _named(a: Assessment, pod: Pod) -> bool:
    return a.candidate is not None and pod.uid in a.candidate.pod_uids


def soak(a: Assessment, now: datetime) -> Soak | None:
    """Return how the canary stands; None while no pod has served the version, or none has to."""
    candidate = a.candidate
    if candidate is None or not required(a):
        return None
    named = [p for p in a.counted if p.uid in candidate.pod_uids]
    rows = [(pod, row) for pod in named if (row := _row(a, pod, now)) is not None]
    if not rows:
        return None
    there = [(pod, row) for pod, row in rows if _serves(a, pod, row)]
    counts = [_since(pod, row, a.target_digest) for pod, row in there]
    complete = len(there) == len(named) >= size(a) and all(pod.ready for pod, _ in there)
    return Soak(
        pods=tuple(row for _, row in rows),
        names=tuple(pod.name for pod, _ in rows),
        ends=_ends(a, [row for _, row in there]) if complete else None,
        requests=sum(requests for requests, _ in counts),
        errors=sum(errors for _, errors in counts),
        blind=next((pod.name for pod, _ in there if pod.state is not None and pod.state.answers is None), ""),
        restarted=next((pod.name for pod, row in rows if row.restarts >= RESTARTS), ""),
    )


def passed(a: Assessment, now: datetime) -> Soak | None:
    """Return what the canary has shown when that is all it had to; None while it has not."""
    found, wanted = soak(a, now), a.spec.rollout.canary
    if found is None or found.ends is None or now < found.ends or found.blind or refusal(a, now):
        return None
    return found if found.requests >= wanted.min_requests else None


def refusal(a: Assessment, now: datetime) -> str:
    """Return why the canary has failed; empty when it has not.

    Errors are judged as soon as good answers up to ``minRequests`` could not make them few enough any more.
    """
    found, wanted = soak(a, now), a.spec.rollout.canary
    if found is None:
        return ""
    if found.restarted:
        return f"the engine of canary pod {found.restarted} was started again {RESTARTS} times while it served it"
    if found.errors * 100 > wanted.max_error_percent * max(found.requests, wanted.min_requests):
        share = f"{found.errors} of {found.requests} requests failed on canary pods {found.who}"
        return f"{share}, rollout.canary.maxErrorPercent is {wanted.max_error_percent}"
    return ""


def story(a: Assessment, now: datetime) -> str:
    """Return what is waited for. Its figures are coarse, so that status is not written with each request."""
    found, wanted = soak(a, now), a.spec.rollout.canary
    if found is None:
        return ""
    if found.ends is None:
        return f"canary pods {found.who} serve it, the soak begins when all {size(a)} do"
    if now < found.ends:
        return f"canary pods {found.who} soak until {stamp(found.ends)}"
    if found.blind:
        return f"the sidecar of pod {found.blind} is too old to count requests: upgrade the engine image"
    tenth = max(1, wanted.min_requests // 10)
    seen = min(found.requests, wanted.min_requests) // tenth * tenth
    return f"canary pods {found.who} have soaked and wait for requests: {seen} of {wanted.min_requests} answered"


def soaked(a: Assessment, pod: Pod) -> bool:
    """Say whether a pod has served the version as a canary, by what status says."""
    return a.candidate is not None and pod.uid in _recorded(a)


def recorded_end(a: Assessment) -> datetime | None:
    """Return when the soak ends (or ended) by what status says; until then no progress is expected."""
    return _ends(a, list(_recorded(a).values())) if a.candidate is not None and required(a) else None


def _row(a: Assessment, pod: Pod, now: datetime) -> SoakStatus | None:
    """Return the pod's entry: as it was recorded, begun anew after a restart, or begun now."""
    before, state = _recorded(a).get(pod.uid), pod.state
    if state is None or not a.there(pod, a.target_digest):
        return before
    same = before is not None and before.boot_id == state.boot_id
    if before is not None and same and not _ahead(before, now):
        return before
    requests, errors = _counts(pod, a.target_digest)
    return SoakStatus(
        uid=pod.uid,
        boot_id=state.boot_id,
        since=stamp(now + timedelta(microseconds=999_999)),  # stamps are whole seconds: never a shorter soak
        requests_before=requests,
        errors_before=errors,
        restarts=before.restarts + (not same) if before is not None else 0,
    )


def _ahead(row: SoakStatus, now: datetime) -> bool:
    """Say whether a soak began later than now: another operator wrote that, by a clock that was wrong."""
    since = parse(row.since)
    return since is not None and since > now + timedelta(seconds=1)


def _recorded(a: Assessment) -> dict[str, SoakStatus]:
    """What status says of the version that is wanted now."""
    status = a.snapshot.status
    if status.rollout is None or status.target is None or status.target.digest != a.target_digest:
        return {}
    return {row.uid: row for row in status.rollout.soak}


def _serves(a: Assessment, pod: Pod, row: SoakStatus) -> bool:
    return pod.state is not None and a.there(pod, a.target_digest) and row.boot_id == pod.state.boot_id


def _counts(pod: Pod, digest: str) -> tuple[int, int]:
    """Return how many requests of a version a pod has answered since its start, and how many of them failed."""
    found = pod.state.answers if pod.state is not None else None
    count = next((c for c in found or () if c.digest == digest), None)
    return (count.answered + count.failed, count.failed) if count is not None else (0, 0)


def _since(pod: Pod, row: SoakStatus, digest: str) -> tuple[int, int]:
    requests, errors = _counts(pod, digest)
    return max(0, requests - row.requests_before), max(0, errors - row.errors_before)


def _ends(a: Assessment, rows: list[SoakStatus]) -> datetime | None:
    begun = [moment for row in rows if (moment := parse(row.since)) is not None]
    return max(begun) + timedelta(seconds=a.spec.rollout.canary.soak_seconds) if begun else None
