"""The planner's next steps for the adapters of a slot: publish, tell the pods, look sources up. Pure."""

from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import Final

import msgspec

from modelswap_engine.protocol.adapter_calls import MOST_RESOLVED, AssignAdaptersRequest, ResolveAdaptersRequest
from modelswap_engine.protocol.adapters import AdapterSource, AssignedState, place_of
from modelswap_engine.protocol.messages import Fence
from modelswap_operator.planning.actions import (
    AdapterOrder,
    AskAdapters,
    ResolveOrder,
    SendAdapters,
    WriteAssignment,
)
from modelswap_operator.planning.adapters import Adapters, resolve_key
from modelswap_operator.planning.assess import Assessment
from modelswap_operator.planning.errors import is_final
from modelswap_operator.planning.snapshot import Pod, Resolution, ResolveKey

POLL_SECONDS: Final = 0.5
"""How often pods are read that load or unload adapters."""

LATE_AT_ONCE: Final = 2
"""How many sources of one place that were late before are looked up at the same time."""

TROUBLED_SECONDS: Final = 10.0
"""How often pods are read that have an adapter which they cannot load now."""


def decide(adapters: Adapters) -> WriteAssignment | None:
    """Return the assignment to publish next for the adapters' sake."""
    a = adapters.a
    current = a.snapshot.assignment
    if current is None or not a.owned or (adapters.wanted == current.adapters and not _overtaken(a)):
        return None
    revision = next_revision(a)
    assignment = msgspec.structs.replace(
        current, epoch=a.snapshot.epoch, adapters=adapters.wanted, adapters_revision=revision
    )
    ledger = msgspec.structs.replace(a.snapshot.ledger, adapters=adapters.since(revision))
    return WriteAssignment(assignment=assignment, ledger=ledger, why=f"adapters {revision}: {_difference(adapters)}")


def next_revision(a: Assessment) -> int:
    """Return a count above everything seen in the assignment and the pods."""
    current = a.snapshot.assignment
    return 1 + max([current.adapters_revision if current is not None else 0, *_seen(a)])


def _seen(a: Assessment) -> Iterator[int]:
    """The counts that pods have been seen to hold, those of a person's decisions about what is assigned too."""
    current = a.snapshot.assignment
    owner = current.owner_uid if current is not None else ""
    names = {item.name for item in current.adapters} if current is not None else set()
    for pod in a.present:
        registry = pod.state.adapters if pod.state is not None else None
        if registry is None:
            continue
        yield from (row.revision for row in registry.adapters if row.owner_uid == owner or row.name in names)
        if registry.assigned is not None:
            yield registry.assigned.revision


def _overtaken(a: Assessment) -> bool:
    """Somebody decided above the assignment: a person by hand, or an operator whose ConfigMap was lost."""
    current = a.snapshot.assignment
    return current is not None and max(_seen(a), default=0) > current.adapters_revision


def told(a: Assessment, pod: Pod) -> AssignedState | None:
    """Return how far a pod is with the adapters as they are assigned now; None while it has not been told."""
    current = a.snapshot.assignment
    found = pod.state.adapters.assigned if pod.state is not None and pod.state.adapters is not None else None
    if current is None or found is None or found.owner_uid != current.owner_uid:
        return None
    return found if found.revision >= current.adapters_revision else None


def send(a: Assessment, now: datetime) -> SendAdapters | None:
    """Tell the pods that do not know yet; the mounted file would tell them too, a minute later."""
    current = a.snapshot.assignment
    if current is None or not a.owned or not current.adapters_revision:
        return None
    orders = []
    for pod in a.present:
        state = pod.state
        if state is None or state.live is None or state.adapters is None or told(a, pod) is not None:
            continue
        failed = a.snapshot.memory.untold.get(pod.uid)
        if failed is not None and failed.revision == current.adapters_revision and failed.retry_at > now:
            continue
        fence = Fence(
            pod_uid=pod.uid,
            owner_uid=current.owner_uid,
            epoch=a.snapshot.epoch,
            revision=current.adapters_revision,
        )
        orders.append(AdapterOrder(pod=pod, request=AssignAdaptersRequest(fence=fence, adapters=current.adapters)))
    return SendAdapters(orders=tuple(orders)) if orders else None


def ask(adapters: Adapters, now: datetime) -> AskAdapters | None:
    """Look up sources that are not pinned, at one pod: those of a place together, and no more until they are answered.

    What was late is looked up by itself, so that it keeps nothing else waiting.
    """
    known, pod = adapters.a.snapshot.memory.resolved, _able(adapters)
    keys = [
        resolve_key(adapters.a, wish.adapter.spec, source)
        for wish in adapters.wishes
        if wish.adapter.spec is not None
        for source in wish.unresolved
    ]
    due = [key for key in keys if key not in known or _due(known[key], now)]
    if pod is None or not due:
        return None
    late = {key for key, result in known.items() if result.late}
    busy = Counter((place_of(key.uri), key in late) for key, result in known.items() if result.pending)
    found: dict[tuple[str, object], list[ResolveKey]] = {}
    for key in due:
        place = place_of(key.uri)
        lane = found.setdefault((place, key if key in late else None), [])
        if busy[place, key in late] < (LATE_AT_ONCE if key in late else 1) and len(lane) < MOST_RESOLVED:
            lane.append(key)
            busy[place, True] += key in late
    orders = tuple(_resolve(pod, lane) for lane in found.values() if lane)
    return AskAdapters(orders=orders) if orders else None


def _due(result: Resolution, now: datetime) -> bool:
    return not result.pending and result.error is not None and (result.retry_at or now) <= now


def _resolve(pod: Pod, keys: Sequence[ResolveKey]) -> ResolveOrder:
    sources = [AdapterSource(**key._asdict()) for key in keys]
    return ResolveOrder(pod=pod, keys=tuple(keys), request=ResolveAdaptersRequest(sources=sources))


def _able(adapters: Adapters) -> Pod | None:
    """A pod that can hold a source against its base, and verify it; one that serves is taken first."""
    able = []
    for pod in adapters.a.counted:
        state = pod.state
        if state is None or state.live is None or adapters.too_old(pod):
            continue
        if state.adapters is not None and state.adapters.slots:
            able.append(pod)
    return min(able, key=lambda pod: (not pod.ready, pod.name), default=None)


def times(adapters: Adapters, now: datetime) -> Iterator[datetime]:
    """Yield when there may be something to do for the adapters without anything happening first."""
    a, memory = adapters.a, adapters.a.snapshot.memory
    for wish in adapters.wishes:
        away = memory.led_away.get(wish.item.name, {}) if wish.item is not None else {}
        yield from (away.get(uid) or now + timedelta(seconds=TROUBLED_SECONDS) for uid in wish.leaving)
    yield from (r.retry_at for r in memory.resolved.values() if r.retry_at is not None and r.retry_at > now)
    yield from (f.retry_at for f in memory.untold.values() if f.retry_at > now)
    for pod in a.present:
        state = told(a, pod)
        if state is not None and state.open:
            yield now + timedelta(seconds=POLL_SECONDS)
        elif state is not None and any(p.error is not None and not is_final(p.error) for p in state.problems):
            yield now + timedelta(seconds=TROUBLED_SECONDS)


def _difference(adapters: Adapters) -> str:
    wanted = {item.name: item for item in adapters.wanted}
    changed = {
        "new": wanted.keys() - adapters.current.keys(),
        "changed": {name for name, item in wanted.items() if adapters.current.get(name) not in (None, item)},
        "removed": adapters.current.keys() - wanted.keys(),
    }
    parts = [f"{word} {_some(names)}" for word, names in changed.items() if names]
    return "; ".join(parts) or "decided again above what pods were seen to hold"


def _some(names: set[str]) -> str:
    shown = sorted(names)
    return ", ".join(shown[:3]) + (f" and {len(shown) - 3} more" if len(shown) > 3 else "")
