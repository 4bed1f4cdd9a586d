"""What the assignment must say about the LoRA adapters of a slot. Pure.

Every source is pinned by its digest before any pod is told to load it: a mutable one is looked up by one pod first, so
that all pods get the same content, and a bad one reaches none. While something about an adapter cannot be decided, what
is assigned under its name stays as it is.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import msgspec

from modelswap_engine.protocol.adapters import AdapterSource, AdapterState, AdapterStatus, OnIncompatible
from modelswap_engine.protocol.assignment import AssignedAdapter, AssignedSource
from modelswap_engine.protocol.engine_state import EngineState
from modelswap_operator.api.loraadapter import ALL_PODS, LoRAAdapterSpec, SourceSpec
from modelswap_operator.api.reasons import Reason
from modelswap_operator.planning.assess import Assessment, trusting
from modelswap_operator.planning.snapshot import Adapter, AdapterSince, Pod, Resolution, ResolveKey

MOST_ADAPTERS: Final = 256
MOST_BYTES: Final = 700 * 1024
"""What the adapters may take of the ConfigMap, which holds 1 MiB together with everything else in it."""


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What is wanted of one object.

    Attributes:
        item: its entry in the assignment; None while there can be none.
        reason: why its spec cannot be followed, as it is; ``message`` says it in words.
        unresolved: its sources whose content nobody has looked up yet.
        leaving: pods among those of ``item`` that lose it next, once its Service leads to them no more.
    """

    adapter: Adapter
    item: AssignedAdapter | None = None
    reason: Reason | None = None
    message: str = ""
    unresolved: tuple[SourceSpec, ...] = ()
    leaving: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Adapters:
    """All adapters of one slot, decided together; the older object comes first where two want the same."""

    a: Assessment

    @cached_property
    def current(self) -> Mapping[str, AssignedAdapter]:
        """What is assigned now, by name."""
        assignment = self.a.snapshot.assignment
        return {item.name: item for item in assignment.adapters} if assignment is not None else {}

    @cached_property
    def wishes(self) -> tuple[Wish, ...]:
        """What is wanted of each object, the oldest first."""
        return tuple(self._wishes())

    @cached_property
    def wanted(self) -> list[AssignedAdapter]:
        """What is to be assigned, the oldest object's first: it has the room where there is not enough for all."""
        found = [wish.item for wish in self.wishes if wish.item is not None]
        if any(wish.adapter.spec is None for wish in self.wishes):
            named = {item.name for item in found}  # one of them may be what cannot be read
            found += [item for item in self.current.values() if item.name not in named]
        return found

    def _wishes(self) -> Iterator[Wish]:
        names = {self.a.spec.served_model_name: f"ModelVersion {self.a.snapshot.slot}"}
        load: Counter[str] = Counter()
        room, places = MOST_BYTES, MOST_ADAPTERS
        for adapter in sorted(self.a.snapshot.adapters, key=lambda item: (item.created, item.name)):
            wish = self._kept_from_old(self._wish(adapter, names, load))
            size = len(msgspec.json.encode(wish.item)) if wish.item is not None else 0
            if wish.item is not None and (size > room or not places):
                wish = Wish(adapter=adapter, reason=Reason.TOO_MANY_ADAPTERS, message=_full(room, places))
            if wish.item is not None:
                room, places = room - size, places - 1
                load.update(wish.item.pod_uids or ())
            yield wish

    def _wish(self, adapter: Adapter, names: dict[str, str], load: Counter[str]) -> Wish:
        spec = adapter.spec
        if spec is None:
            return Wish(adapter=adapter, reason=Reason.INVALID_SPEC, message=adapter.spec_error)
        holder = names.setdefault(spec.adapter_name, f"LoRAAdapter {adapter.name}")
        entry = self.current.get(spec.adapter_name)
        if holder != f"LoRAAdapter {adapter.name}":
            return Wish(adapter=adapter, reason=Reason.NAME_TAKEN, message=_taken(spec, holder))
        if spec.suspend:
            return Wish(adapter=adapter, item=entry, reason=Reason.SUSPENDED)
        sources, unresolved = self._sources(spec, entry)
        if not sources:
            return Wish(adapter=adapter, item=entry, unresolved=unresolved)
        chosen, leaving = self._pods(spec, entry, load)
        item = AssignedAdapter(
            name=spec.adapter_name,
            sources=sources,
            pinned=spec.pinned,
            drain_timeout_seconds=spec.drain_timeout_seconds,
            pod_uids=chosen if chosen is None else [*chosen, *leaving],
            verification=self.a.spec.verification.to_wire(),
            requested_at=adapter.requested_at or (entry.requested_at if entry is not None else ""),
        )
        return Wish(adapter=adapter, item=item, unresolved=unresolved, leaving=frozenset(leaving))

    def keeps(self, pod: Pod, name: str) -> bool:
        """Say whether a pod cannot take a name away any more by a decision that was made already.

        What a pod serves is no promise: an adapter that is made again may be there still of before, and go because of
        a decision between the two, which the pod is about to follow or reads from its mounted file a minute late.
        """
        entry = self.current.get(name)
        return entry is not None and entry.meant_for(pod.uid) and self._followed(pod) >= self._known(name).came

    def settled(self, pod: Pod, item: AssignedAdapter) -> bool:
        """Say the same of what is wanted under a name: that it is assigned, and what was before is followed no more."""
        if not self.keeps(pod, item.name) or self.current[item.name].sources != item.sources:
            return False
        return self._followed(pod) >= self._known(item.name).changed

    def _followed(self, pod: Pod) -> int:
        """Return which decision about adapters a pod follows, -1 for none of this assignment's owner."""
        current = self.a.snapshot.assignment
        seen = pod.state.adapters.assigned if pod.state is not None and pod.state.adapters is not None else None
        if current is None or seen is None or seen.owner_uid != current.owner_uid:
            return -1
        return seen.revision

    def _known(self, name: str) -> AdapterSince:
        return self.a.snapshot.ledger.adapters.get(name, AdapterSince())

    def since(self, revision: int) -> dict[str, AdapterSince]:
        """Return what to remember of the wanted adapters when they are assigned in this revision."""
        return {item.name: self._since(item, revision) for item in self.wanted}

    def _since(self, item: AssignedAdapter, revision: int) -> AdapterSince:
        entry, known = self.current.get(item.name), self._known(item.name)
        if entry is None or _spreads(entry, item):
            return AdapterSince(came=revision, changed=revision)
        same = msgspec.structs.replace(entry, pod_uids=None) == msgspec.structs.replace(item, pod_uids=None)
        return known if same else msgspec.structs.replace(known, changed=revision)

    def too_old(self, pod: Pod) -> bool:
        """Say whether a pod would load what it is told without asking for the signature that the slot asks for."""
        return trusting(pod) and self.a.spec.verification.to_wire() is not None

    def _kept_from_old(self, wish: Wish) -> Wish:
        """Keep an adapter from pods that are too old to verify it; what they serve of it they keep.

        A name has one content in all pods, so what it has now stays while such a pod would lose it for another.
        """
        item, old = wish.item, [pod for pod in self.a.present if self.too_old(pod)]
        if item is None or not old:
            return wish
        entry = self.current.get(item.name)
        losing = [p for p in old if entry is not None and entry.meant_for(p.uid) and _has(p, entry)]
        stuck = next((pod for pod in losing if not _has(pod, item)), None)
        if stuck is not None and entry is not None:
            item = msgspec.structs.replace(item, sources=entry.sources)
            wish = replace(wish, reason=wish.reason or Reason.ENGINE_PROTOCOL, message=wish.message or too_old(stuck))
        shut = {pod.uid for pod in old if not _has(pod, item)}
        if shut:
            there = [pod.uid for pod in self.a.present] if item.pod_uids is None else item.pod_uids
            item = msgspec.structs.replace(item, pod_uids=[uid for uid in there if uid not in shut])
        return replace(wish, item=item)

    def _sources(
        self, spec: LoRAAdapterSpec, entry: AssignedAdapter | None
    ) -> tuple[list[AssignedSource], tuple[SourceSpec, ...]]:
        """Return the sources whose content is known, and those of which it is not: what is assigned stands in there."""
        found: list[AssignedSource] = []
        unknown = []
        before = {source.base_digest: source for source in entry.sources} if entry is not None else {}
        for source in spec.sources:
            known, old = self._digest(spec, source, before), before.get(source.base_digest)
            if known:
                pinned = AssignedSource(
                    uri=source.uri, digest=known, base_digest=source.base_digest, credentials=source.credentials
                )
                found.append(pinned)
                continue
            unknown.append(source)
            if old is not None:
                found.append(old)
        return found, tuple(unknown)

    def _digest(self, spec: LoRAAdapterSpec, source: SourceSpec, before: Mapping[str, AssignedSource]) -> str:
        """Return the pin, else what was looked up once: that stays, whatever becomes of the source."""
        old = before.get(source.base_digest)
        if source.digest or (old is not None and old.uri == source.uri):
            return source.digest or (old.digest if old is not None else "")
        looked_up = self.resolution(spec, source)
        return looked_up.digest if looked_up is not None else ""

    def resolution(self, spec: LoRAAdapterSpec, source: SourceSpec) -> Resolution | None:
        """Return what a pod said about a source."""
        return self.a.snapshot.memory.resolved.get(resolve_key(self.a, spec, source))

    def _pods(
        self, spec: LoRAAdapterSpec, entry: AssignedAdapter | None, load: Counter[str]
    ) -> tuple[list[str] | None, list[str]]:
        """Return the pods that an adapter goes to, those that have it, then those with the fewest; and who leaves."""
        if spec.placement.pods == ALL_PODS:
            return None, []
        number = int(spec.placement.pods)
        there = {pod.uid: pod for pod in self.a.present}
        named = entry.pod_uids if entry is not None else []
        before = [uid for uid in (there if named is None else named) if uid in there]
        kept = before[:number]
        others = sorted(
            (pod for uid, pod in there.items() if uid not in kept and not self.too_old(pod)),
            key=lambda pod: (not pod.ever_ready, load[pod.uid], pod.name),
        )
        leaving = [uid for uid in before[number:] if self._led_to(there[uid], spec)]
        return kept + [pod.uid for pod in others[: number - len(kept)]], leaving

    def _led_to(self, pod: Pod, spec: LoRAAdapterSpec) -> bool:
        """Say whether requests for an adapter may still be led to a pod that is to lose it."""
        if spec.service is None or (pod.state is not None and serving(pod.state, spec.adapter_name) is None):
            return False
        away = self.a.snapshot.memory.led_away.get(spec.adapter_name, {})
        return pod.uid not in away or away[pod.uid] is not None


def serving(state: EngineState, name: str) -> AdapterStatus | None:
    """Return what an engine serves under a name."""
    rows = state.adapters.adapters if state.adapters is not None else ()
    return next((r for r in rows if r.name == name and r.state in (AdapterState.READY, AdapterState.EVICTED)), None)


def is_of(row: AdapterStatus | None, source: AdapterSource) -> bool:
    """Say whether what is served is the content of a source."""
    return row is not None and (row.digest, row.base_digest) == (source.digest, source.base_digest)


def _spreads(before: AssignedAdapter, now: AssignedAdapter) -> bool:
    """Say whether an adapter goes to pods that it did not go to."""
    if before.pod_uids is None:
        return False
    return now.pod_uids is None or not set(now.pod_uids) <= set(before.pod_uids)


def _has(pod: Pod, item: AssignedAdapter) -> bool:
    """Say whether a pod serves what an adapter is assigned for its base."""
    state = pod.state
    source = item.source_for(state.live.digest) if state is not None and state.live is not None else None
    return state is not None and source is not None and is_of(serving(state, item.name), source)


def too_old(pod: Pod) -> str:
    """Return what is to be done about a pod that cannot verify."""
    return f"the sidecar of pod {pod.name} is too old to verify signatures: upgrade the engine image"


@dataclass(frozen=True, kw_only=True)
class Blocker:
    """An adapter that keeps a version from its first pod; ``waiting`` while its source for it is being looked up."""

    wish: Wish
    waiting: bool


def blocker(adapters: Adapters) -> Blocker | None:
    """Return an adapter that has nothing for the wanted base, where the spec says that this blocks it."""
    a = adapters.a
    if a.target is None or a.spec.adapters.on_incompatible is OnIncompatible.UNLOAD:
        return None
    for wish in adapters.wishes:
        spec = wish.adapter.spec
        if spec is None or wish.item is None or wish.item.source_for(a.target.digest) is not None:
            continue
        coming = [s for s in wish.unresolved if s.base_digest in ("", a.target.digest)]
        results = [adapters.resolution(spec, source) for source in coming]
        return Blocker(wish=wish, waiting=any(r is None or r.error is None for r in results))
    return None


def resolve_key(a: Assessment, spec: LoRAAdapterSpec, source: SourceSpec) -> ResolveKey:
    """Return what a source is looked up as."""
    return ResolveKey(
        spec.adapter_name, source.uri, source.base_digest, source.credentials, a.spec.verification.to_wire()
    )


def _taken(spec: LoRAAdapterSpec, holder: str) -> str:
    return f"{spec.adapter_name} is taken by {holder}; give this adapter a name of its own, or delete the other"


def _full(room: int, places: int) -> str:
    what = f"{MOST_ADAPTERS} adapters" if not places else f"{MOST_BYTES // 1024} KiB of adapters, {room} bytes are left"
    return f"an assignment holds at most {what}; delete an older LoRAAdapter, or move some to another slot"
