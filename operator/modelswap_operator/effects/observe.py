"""One look at a slot: the object, its pods, its assignment, and every engine that can be asked.

Engines are asked at the same time, each within its own bound; one that did not answer is not asked again before its
back-off is over, unless its pod shows a new sign of life. So a dead pod never holds up the news of the others.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Final

from modelswap_engine.protocol.engine_state import EngineState
from modelswap_engine.protocol.errors import Denied, Fenced, ModelswapError
from modelswap_operator.api.labels import (
    LORAADAPTERS,
    MODELVERSIONS,
    OPERATOR,
    SLOT_LABEL,
    assignment_name,
)
from modelswap_operator.api.reasons import TEXTS, Reason
from modelswap_operator.effects import assignment, objects, paths
from modelswap_operator.effects.engine_client import Address, EngineClient
from modelswap_operator.effects.kube import ApiError, Json, Kube
from modelswap_operator.planning.backoff import delay
from modelswap_operator.planning.errors import text
from modelswap_operator.planning.snapshot import Pod, Snapshot, Unreachable

BAD_REQUEST: Final = 400


@dataclass(frozen=True, kw_only=True)
class Look:
    """A snapshot, and the versions of the objects it was made from (for compare-and-swap writes)."""

    snapshot: Snapshot
    resource_version: str
    configmap_uid: str
    configmap_version: str
    adapter_versions: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Contacts:
    """What is remembered about reaching pods: who has been Ready, who does not answer."""

    ever_ready: set[str] = field(default_factory=set)
    silent: dict[str, tuple[Unreachable, tuple[str, bool]]] = field(default_factory=dict)

    def keep(self, uids: set[str]) -> None:
        """Forget pods that are gone."""
        self.ever_ready &= uids
        self.silent = {uid: known for uid, known in self.silent.items() if uid in uids}


class Observer:
    """Makes snapshots."""

    def __init__(
        self,
        *,
        kube: Kube,
        engines: EngineClient,
        now: Callable[[], datetime],
        random: Callable[[], float],
        default_port: int,
        operator: str,
    ) -> None:
        self._kube = kube
        self._engines = engines
        self._now = now
        self._random = random
        self._default_port = default_port
        self._operator = operator

    async def look(self, *, namespace: str, slot: str, epoch: int, contacts: Contacts) -> Look:
        """Return what is to be seen of a slot now.

        Raises:
            ApiError: the API server could not be asked.
        """
        body, pods, configmap, adapters = await asyncio.gather(
            self._kube.get(paths.custom(MODELVERSIONS, namespace, slot)),
            self._kube.list(paths.core("pods", namespace), label_selector=f"{SLOT_LABEL}={slot}"),
            self._kube.get(paths.core("configmaps", namespace, assignment_name(slot))),
            self._adapters(namespace, slot),
        )
        base = _object(body or {}, namespace=namespace, slot=slot, epoch=epoch)
        if base.asked_again:
            contacts.silent.clear()
        shown = {p.uid for p in base.status.pods if p.state not in ("", "Starting")}
        seen = [
            objects.pod_of(p, ever_ready=contacts.ever_ready | shown, default_port=self._default_port) for p in pods
        ]
        contacts.ever_ready |= {p.uid for p in seen if p.ever_ready}
        contacts.keep({p.uid for p in seen})
        asked = () if base.deleted else await asyncio.gather(*(self._ask(pod, contacts) for pod in seen))
        current, ledger = assignment.parse(configmap)
        snapshot = replace(
            base,
            pods=tuple(asked),
            adapters=tuple(objects.adapter_of(adapter) for adapter in adapters),
            operator=self._operator,
            assignment=current,
            ledger=ledger,
        )
        return Look(
            snapshot=snapshot,
            resource_version=_version(body),
            configmap_uid=str(((configmap or {}).get("metadata") or {}).get("uid", "")),
            configmap_version=_version(configmap),
            adapter_versions={str(adapter["metadata"]["name"]): _version(adapter) for adapter in adapters},
        )

    async def _adapters(self, namespace: str, slot: str) -> list[Json]:
        """Return the slot's adapters, but those that are being deleted."""
        path = paths.custom(LORAADAPTERS, namespace)
        try:
            found = await self._kube.list(path, field_selector=f"spec.modelRef.name={slot}")
        except ApiError as error:
            if error.status != BAD_REQUEST:
                raise
            found = await self._kube.list(path)  # before 1.31 only names of objects can be selected by
        return [
            body for body in found if objects.slot_of(body) == slot and not body["metadata"].get("deletionTimestamp")
        ]

    async def _ask(self, pod: Pod, contacts: Contacts) -> Pod:
        if pod.terminating or pod.finished:
            return pod
        now, sign = self._now(), (pod.ip, pod.ready)
        known, last_sign = contacts.silent.get(pod.uid, (None, None))
        if known is not None and last_sign == sign and now < known.retry_at:
            return replace(pod, engine=known)
        found = await self._state(pod)
        if isinstance(found, EngineState):
            contacts.silent.pop(pod.uid, None)
            return replace(pod, engine=found)
        reason, message = found
        again = known is not None and last_sign == sign
        attempts = known.attempts + 1 if known is not None and again else 1
        silent = Unreachable(
            reason=reason,
            message=f"on node {pod.node}: {message}" if pod.node else message,
            since=known.since if known is not None else now,
            attempts=attempts,
            retry_at=self._now() + delay(attempts, self._random()),
        )
        contacts.silent[pod.uid] = (silent, sign)
        return replace(pod, engine=silent)

    async def _state(self, pod: Pod) -> EngineState | tuple[str, str]:
        """Read a pod's state, or return reason and text of why that cannot be."""
        if pod.port is None:
            return Reason.NO_CONTROL_PORT, TEXTS[Reason.NO_CONTROL_PORT]
        if not pod.ip:
            return Reason.NO_POD_IP, TEXTS[Reason.NO_POD_IP]
        try:
            return await self._engines.state(address(pod))
        except Denied as error:
            return Reason.ENGINE_DENIED, f"{text(error.body())}; {TEXTS[Reason.ENGINE_DENIED]}"
        except Fenced as error:
            return Reason.WRONG_POD, text(error.body())
        except ModelswapError as error:
            return error.code if error.code.startswith(("Engine", "Token")) else Reason.ENGINE_FAILED, text(
                error.body()
            )


def address(pod: Pod) -> Address:
    """Return where a pod's control port is."""
    return Address(pod=pod.name, uid=pod.uid, namespace=pod.namespace, ip=pod.ip, port=pod.port or 0, tls=pod.tls)


def _object(body: Json, *, namespace: str, slot: str, epoch: int) -> Snapshot:
    metadata: dict[str, Any] = body.get("metadata") or {}
    if not body or metadata.get("deletionTimestamp"):
        return Snapshot(namespace=namespace, slot=slot, epoch=epoch, uid=str(metadata.get("uid", "")), deleted=True)
    spec, wrong = objects.spec_of(body)
    manager, when = objects.spec_writer(body)
    annotations = metadata.get("annotations") or {}
    return Snapshot(
        namespace=namespace,
        slot=slot,
        epoch=epoch,
        uid=str(metadata["uid"]),
        generation=int(metadata.get("generation", 0)),
        spec=spec,
        spec_error=wrong,
        spec_manager=manager,
        spec_time=when,
        requested_at=objects.requested_at(body),
        reserved_for=str(annotations.get(OPERATOR, "")),
        status=objects.status_of(body),
        asked=objects.asked_of(body),
    )


def _version(body: Json | None) -> str:
    return str(((body or {}).get("metadata") or {}).get("resourceVersion", ""))
