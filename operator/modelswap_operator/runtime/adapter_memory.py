"""What the process remembers about a slot's adapters between passes; losing it costs repeated questions only."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Final

from modelswap_engine.protocol.adapter_calls import ResolvedAdapters
from modelswap_engine.protocol.errors import ErrorBody, Unavailable
from modelswap_engine.protocol.looking import SourceLook
from modelswap_engine.protocol.messages import VersionRef
from modelswap_operator.planning import staging, watching
from modelswap_operator.planning.actions import AdapterOrder, ResolveOrder, UntoldPod
from modelswap_operator.planning.backoff import LONGEST_SECONDS, SLOW_SECONDS, delay
from modelswap_operator.planning.errors import is_final
from modelswap_operator.planning.snapshot import Resolution, ResolveKey, Snapshot, Untold, Watched

LATE: Final = (Unavailable.code, "EngineTimeout")
"""What is said of a source that did not answer, by the pod or for it."""
LED_AWAY: Final = timedelta(seconds=5)
"""From the write of an EndpointSlice until every node routes by it."""
_EMPTY = ErrorBody(code="EngineFailed", message="the pod said nothing about this source", retryable=True)


class AdapterMemory:
    """Sources that were looked up or are watched, and pods that could not be told."""

    def __init__(self) -> None:
        self._resolved: dict[ResolveKey, Resolution] = {}
        self._untold: dict[str, Untold] = {}
        self._watched: dict[str, Watched] = {}
        self._led_away: dict[str, dict[str, datetime | None]] = {}

    @property
    def resolved(self) -> Mapping[ResolveKey, Resolution]:
        """What pods said about sources."""
        return MappingProxyType(dict(self._resolved))

    @property
    def untold(self) -> Mapping[str, Untold]:
        """Pods that could not be told, by UID."""
        return MappingProxyType(dict(self._untold))

    @property
    def led_away(self) -> Mapping[str, Mapping[str, datetime | None]]:
        """Until when pods that are led to no more are to keep an adapter all the same; None once it is over."""
        return MappingProxyType({name: MappingProxyType(dict(pods)) for name, pods in self._led_away.items()})

    @property
    def watched(self) -> Mapping[str, Watched]:
        """What is known of the sources that may come to hold another content, by name."""
        return MappingProxyType(dict(self._watched))

    def take_in(self, snapshot: Snapshot, now: datetime) -> None:
        """Forget sources that nobody names any more, so that one which is named again is looked at again, and pods.

        Of an adapter that somebody asks for, every waiting try is due.
        """
        asked = snapshot.spec.verification.to_wire() if snapshot.spec is not None else None
        named = {
            ResolveKey(adapter.spec.adapter_name, source.uri, source.base_digest, source.credentials, asked)
            for adapter in snapshot.adapters
            if adapter.spec is not None
            for source in adapter.spec.sources
            if not source.digest
        }
        pods = {pod.name for pod in snapshot.pods if not pod.terminating and staging.able(pod)}
        self._resolved = {
            key: found
            for key, found in self._resolved.items()
            if key in named and (found.pod in pods or not found.pending)  # of one that is gone no answer will come
        }
        self._watched = watching.watched_adapters(snapshot, now)
        self._led_away = {
            name: {uid: None if until is None or until <= now else until for uid, until in pods.items()}
            for name, pods in self._led_away.items()
        }
        present = {pod.uid for pod in snapshot.pods}
        self._untold = {uid: found for uid, found in self._untold.items() if uid in present}
        again = {a.spec.adapter_name for a in snapshot.adapters if a.asked_again and a.spec is not None}
        if again:
            self._wait_no_longer(again, now)

    def _wait_no_longer(self, names: Collection[str], now: datetime) -> None:
        self._resolved = {
            key: replace(found, retry_at=now) if key.name in names and found.error is not None else found
            for key, found in self._resolved.items()
        }
        self._untold = {uid: replace(found, retry_at=now) for uid, found in self._untold.items()}

    def tell(
        self, orders: Iterable[AdapterOrder], failed: Iterable[UntoldPod], *, now: datetime, random: float
    ) -> None:
        """Remember which pods could not be told; the next try waits longer."""
        before = dict(self._untold)
        for order in orders:
            self._untold.pop(order.pod.uid, None)
        for pod in failed:
            known = before.get(pod.pod.uid)
            attempts = known.attempts + 1 if known is not None and known.revision == pod.revision else 1
            self._untold[pod.pod.uid] = Untold(
                revision=pod.revision, attempts=attempts, retry_at=now + delay(attempts, random), error=pod.error
            )

    def led(self, left: Mapping[str, Collection[str]], now: datetime) -> None:
        """Remember which pods, by the names of adapters that they are to lose, no Service leads to any more."""
        before = self._led_away
        self._led_away = {
            name: {uid: before.get(name, {}).get(uid, now + LED_AWAY) for uid in uids} for name, uids in left.items()
        }

    def looking_at(self, name: str) -> None:
        """Remember that a pod looks at an adapter's source again."""
        if name in self._watched:
            self._watched[name] = watching.asked(self._watched[name])

    def looked_at(
        self, name: str, target: VersionRef, answer: SourceLook | ErrorBody, *, now: datetime, random: float
    ) -> None:
        """Remember what a pod saw there."""
        if name in self._watched:
            self._watched[name] = watching.answered(self._watched[name], target, answer, now=now, random=random)

    def looking_up(self, order: ResolveOrder) -> None:
        """Remember that a pod is working on it."""
        for key in order.keys:
            before = self._resolved.get(key) or Resolution(pod="")
            self._resolved[key] = Resolution(pod=order.pod.name, attempts=before.attempts, late=before.late)

    def looked_up(
        self, order: ResolveOrder, answer: ResolvedAdapters | ErrorBody, *, now: datetime, random: float
    ) -> None:
        """Remember the answers; what nobody waits for any more is left out."""
        rows = answer.adapters if isinstance(answer, ResolvedAdapters) else []
        said = {(row.name, row.uri, row.base_digest): row for row in rows}
        for key in order.keys:
            before = self._resolved.get(key)
            if before is None or not before.pending or before.pod != order.pod.name:
                continue
            row = said.get(key[:3])
            if row is not None and row.digest:
                self._resolved[key] = Resolution(pod=order.pod.name, digest=row.digest)
                continue
            error = (row.error if row is not None else None) or (answer if isinstance(answer, ErrorBody) else _EMPTY)
            longest = SLOW_SECONDS if is_final(error) else LONGEST_SECONDS
            attempts = before.attempts + 1
            wait = delay(attempts + 8 * is_final(error), random, longest=longest)
            self._resolved[key] = Resolution(
                pod=order.pod.name, error=error, attempts=attempts, retry_at=now + wait, late=error.code in LATE
            )
