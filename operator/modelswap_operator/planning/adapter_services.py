"""Which pods the Service of a LoRAAdapter leads to. Pure.

Pods carry no label for it: the operator lists them in an EndpointSlice of its own, and nobody else does. What is listed
stays good while the operator is away, and a pod that it cannot ask now is not taken out for that.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from modelswap_engine.protocol.assignment import AssignedAdapter
from modelswap_operator.planning.adapters import Adapters, Wish, is_of, serving
from modelswap_operator.planning.assess import Assessment, proved, running
from modelswap_operator.planning.snapshot import Adapter, Pod, Snapshot, Unreachable

MOST_ENDPOINTS: Final = 500
"""In one EndpointSlice; the API server takes 1000."""


@dataclass(frozen=True, kw_only=True, order=True)
class Endpoint:
    """One pod that is led to."""

    name: str
    uid: str
    ip: str


@dataclass(frozen=True, kw_only=True)
class Slice:
    """The pods of one address family whose data port has one number."""

    name: str
    family: str
    port: int
    endpoints: tuple[Endpoint, ...]


@dataclass(frozen=True, kw_only=True)
class WantedService:
    """What an adapter asks for; ``name`` is empty where it asks for no Service, and one that it has must go.

    ``left`` are the UIDs of pods that are to lose the adapter and are led to no more.
    """

    adapter: Adapter
    name: str = ""
    port: int = 0
    slices: tuple[Slice, ...] = ()
    left: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class ServiceOutcome:
    """The Service that there is now, and why it is not the one that is asked for: a reason and words, or nothing."""

    name: str = ""
    reason: str = ""
    message: str = ""


def concerned(snapshot: Snapshot) -> bool:
    """Say whether an adapter of the slot asks for a Service, or has one."""
    if snapshot.deleted or snapshot.spec is None:
        return False  # whom to lead to is not known then: what is listed stays
    return any(_asked(adapter) or adapter.status.service for adapter in snapshot.adapters)


def wanted_services(snapshot: Snapshot, listed: Mapping[str, frozenset[str]]) -> Iterator[WantedService]:
    """Yield the Services that adapters ask for, or have.

    ``listed`` are the UIDs of the pods that are led to now, by the UID of the adapter: of one that was deleted and made
    again under its name they say nothing.
    """
    adapters = Adapters(Assessment(snapshot))
    for wish in adapters.wishes:
        adapter = wish.adapter
        if adapter.spec is None:
            continue
        asked = adapter.spec.service
        if asked is None:
            if adapter.status.service:
                yield WantedService(adapter=adapter)
            continue
        name = asked.name or adapter.name
        pods = _pods(adapters, wish, listed.get(adapter.uid, frozenset()))
        yield WantedService(
            adapter=adapter,
            name=name,
            port=asked.port,
            slices=tuple(_slices(name, pods)),
            left=wish.leaving - {pod.uid for pod in pods},
        )


def led_away(
    wanted: WantedService, outcome: ServiceOutcome, listed: Mapping[str, frozenset[str]] | None
) -> frozenset[str]:
    """Return who is led to no more: a Service that could not be written leads where it did.

    ``listed`` are the pods that each adapter's Service led to before, by the adapter's UID; None where nobody knows.
    """
    if not outcome.reason:
        return wanted.left
    if listed is None:
        return frozenset() if wanted.adapter.status.service else wanted.left
    return wanted.left - listed.get(wanted.adapter.uid, frozenset())


def _asked(adapter: Adapter) -> bool:
    return adapter.spec is not None and adapter.spec.service is not None


def _pods(adapters: Adapters, wish: Wish, listed: frozenset[str]) -> list[Pod]:
    """Return the ready pods with the adapter's content; while none has it yet, those that serve what was before.

    Pods that are to lose it are left out while there are others.
    """
    item = wish.item
    if item is None:
        return []
    ready = [pod for pod in adapters.a.counted if pod.ready and pod.ip and item.meant_for(pod.uid)]
    kept = [pod for pod in ready if adapters.keeps(pod, item.name)]
    served = [pod for pod in kept if pod.state is not None and serving(pod.state, item.name) is not None]
    silent = [pod for pod in ready if isinstance(pod.engine, Unreachable) and pod.uid in listed]
    found = [pod for pod in served if _has(pod, item)] + silent or served
    found = [pod for pod in found if not _swaps_it_away(pod, item)] or found
    return [pod for pod in found if pod.uid not in wish.leaving] or found


def _swaps_it_away(pod: Pod, item: AssignedAdapter) -> bool:
    """Say whether a pod is changing to a base that the adapter has nothing for: its name goes with the commit."""
    operation = running(pod)
    if operation is None or operation.hold is not None or not operation.target.digest:
        return False
    return item.source_for(operation.target.digest) is None


def _has(pod: Pod, item: AssignedAdapter) -> bool:
    """Say whether a pod's engine serves the content that is assigned for its base, which it has proved."""
    state = pod.state
    if state is None or state.live is None or not proved(state, state.live.digest):
        return False
    source = item.source_for(state.live.digest)
    return source is not None and is_of(serving(state, item.name), source)


def _slices(service: str, pods: Iterable[Pod]) -> Iterator[Slice]:
    def kind(pod: Pod) -> tuple[str, int]:
        return ("IPv6" if ":" in pod.ip else "IPv4"), pod.data_port

    for (family, port), alike in groupby(sorted(pods, key=kind), kind):
        found = sorted(Endpoint(name=pod.name, uid=pod.uid, ip=pod.ip) for pod in alike)
        for start in range(0, len(found), MOST_ENDPOINTS):
            name = f"{service}-{family.lower()}-{port}-{start // MOST_ENDPOINTS}"
            yield Slice(name=name, family=family, port=port, endpoints=tuple(found[start : start + MOST_ENDPOINTS]))
