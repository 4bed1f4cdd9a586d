"""Versions that the pods fetch ahead of the change of the spec: who has not been told which. Pure.

A pod fetches by itself, beside all that it does; nothing of a rollout waits for it. As with staging, at most one more
fetches at once than have it already: the later ones find it in others, and the source is asked little more than once.
"""

from collections.abc import Iterator
from datetime import datetime

from modelswap_engine.protocol.messages import Fence, VersionRef
from modelswap_engine.protocol.prefetch import PrefetchPhase, PrefetchRequest, PrefetchState
from modelswap_engine.protocol.version import FETCHES_AHEAD_SINCE
from modelswap_operator.planning.actions import PrefetchOrder, SendPrefetch
from modelswap_operator.planning.assess import Assessment

UNDER_WAY = (PrefetchPhase.PENDING, PrefetchPhase.FETCHING)


def targets(a: Assessment) -> list[VersionRef]:
    """Return what the spec wants to have in the pods."""
    return [
        VersionRef(
            uri=source.uri,
            digest=source.digest,
            credentials=source.credentials,
            verification=a.spec.verification.to_wire(),
        )
        for source in a.spec.prefetch
    ]


def send(a: Assessment, now: datetime) -> SendPrefetch | None:
    """Tell pods whose list is another one: all that there is nothing to fetch, else as many as others can give to."""
    current, wanted = a.snapshot.assignment, targets(a)
    if current is None or not a.owned:
        return None
    orders = []
    for pod in a.counted:
        state = pod.state
        if state is None or state.live is None or state.protocol_version < FETCHES_AHEAD_SINCE:
            continue
        if [found.target for found in state.prefetch] == wanted or a.snapshot.memory.unasked.get(pod.uid, now) > now:
            continue
        fence = Fence(pod_uid=pod.uid, owner_uid=a.snapshot.uid, epoch=a.snapshot.epoch, revision=current.revision)
        orders.append(PrefetchOrder(pod=pod, request=PrefetchRequest(fence=fence, targets=wanted)))
    if wanted:
        orders = orders[: max(0, 1 + _there(a, wanted) - _busy(a, wanted))]
    return SendPrefetch(orders=tuple(orders)) if orders else None


def _there(a: Assessment, wanted: list[VersionRef]) -> int:
    """Count the pods that have fetched all of it."""
    return sum(all(found.phase is PrefetchPhase.FETCHED for found in rows) for rows in _told(a, wanted))


def _busy(a: Assessment, wanted: list[VersionRef]) -> int:
    """Count the pods that are fetching it."""
    return sum(any(found.phase in UNDER_WAY for found in rows) for rows in _told(a, wanted))


def _told(a: Assessment, wanted: list[VersionRef]) -> list[list[PrefetchState]]:
    rows = [pod.state.prefetch for pod in a.counted if pod.state is not None]
    return [found for found in rows if [row.target for row in found] == wanted]


def times(a: Assessment, now: datetime) -> Iterator[datetime]:
    """Say when pods that could not be told are told again."""
    yield from (at for at in a.snapshot.memory.unasked.values() if at > now)


def under_way(a: Assessment) -> bool:
    """Say whether some pod is fetching, so that it is worth looking again."""
    return any(f.phase in UNDER_WAY for p in a.counted if p.state is not None for f in p.state.prefetch)
