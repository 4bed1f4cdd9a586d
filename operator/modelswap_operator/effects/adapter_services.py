"""The Services of LoRAAdapters and the EndpointSlices behind them: read together, and brought to what is wanted.

An adapter's own are those whose controller it is, by kind and name: a re-created adapter takes its own over. What is
anybody else's is never written. Deleted adapters are followed by the API server's garbage collection.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from modelswap_operator.api.labels import (
    API_VERSION,
    DATA_PORT_NAME,
    FIELD_MANAGER,
    GROUP,
    LORAADAPTER_KIND,
    MANAGED_BY_LABEL,
    SLOT_LABEL,
)
from modelswap_operator.api.reasons import TEXTS, Reason
from modelswap_operator.effects import paths
from modelswap_operator.effects.kube import ApiConflict, ApiError, ApiUnavailable, Json, Kube
from modelswap_operator.planning.adapter_services import Endpoint, ServiceOutcome, Slice, WantedService
from modelswap_operator.planning.snapshot import Adapter

SERVICE_NAME_LABEL: Final = "kubernetes.io/service-name"
FORBIDDEN: Final = 403


@dataclass(frozen=True, kw_only=True)
class There:
    """The slot's Services and EndpointSlices that the operator has made, by name."""

    services: dict[str, Json]
    slices: dict[str, Json]

    @property
    def listed(self) -> dict[str, frozenset[str]]:
        """The UIDs of the pods that each adapter's Service leads to, by the adapter's UID."""
        found: dict[str, frozenset[str]] = {}
        for body in self.slices.values():
            adapter = str(_controller(body).get("uid", ""))
            found[adapter] = found.get(adapter, frozenset()) | {one.uid for one in _endpoints(body)}
        return found


class ServiceTakenError(Exception):
    """Something of the wanted name is somebody else's."""


class AdapterServices:
    """Those of one slot."""

    def __init__(self, kube: Kube, *, namespace: str, slot: str) -> None:
        self._kube = kube
        self._namespace = namespace
        self._labels = {SLOT_LABEL: slot, MANAGED_BY_LABEL: FIELD_MANAGER}

    async def read(self) -> There:
        """Return what there is.

        Raises:
            ApiError: it could not be read.
        """
        selector = ",".join(f"{name}={value}" for name, value in self._labels.items())
        services = await self._kube.list(paths.core("services", self._namespace), label_selector=selector)
        slices = await self._kube.list(paths.endpoint_slices(self._namespace), label_selector=selector)
        return There(services=_by_name(services), slices=_by_name(slices))

    async def bring(self, there: There, wanted: WantedService) -> ServiceOutcome:
        """Make one adapter's Service what it must be.

        Raises:
            ApiConflict: something has changed since it was read.
            ApiUnavailable: the API server did not answer.
        """
        try:
            if wanted.name:
                await self._service(there, wanted)
                for part in wanted.slices:
                    await self._slice(there, wanted, part)
            await self._clear(there, wanted)
        except ServiceTakenError as error:
            return ServiceOutcome(name=wanted.adapter.status.service, reason=Reason.SERVICE_TAKEN, message=str(error))
        except (ApiConflict, ApiUnavailable):
            raise
        except ApiError as error:
            return refused(wanted.adapter, error)
        return ServiceOutcome(name=wanted.name)

    async def _service(self, there: There, wanted: WantedService) -> None:
        # No selector: with one, Kubernetes would list pods of its own choice beside ours.
        ports = [{"name": DATA_PORT_NAME, "port": wanted.port, "protocol": "TCP"}]
        body: Json = {"metadata": self._metadata(wanted.name, wanted.adapter), "spec": {"ports": ports}}
        found = there.services.get(wanted.name)
        path = paths.core("services", self._namespace, wanted.name)
        if found is None:
            body = {"apiVersion": "v1", "kind": "Service", **body}
            await self._create(paths.core("services", self._namespace), path, body, wanted.adapter)
            return
        _own("Service", found, wanted.adapter)
        shown = [(p.get("name"), p["port"], p.get("protocol")) for p in found["spec"].get("ports") or []]
        if shown != [(DATA_PORT_NAME, wanted.port, "TCP")] or found["spec"].get("selector") or _astray(found, body):
            await self._kube.merge(path, _on(found, {**body, "spec": {"ports": ports, "selector": None}}))

    async def _slice(self, there: There, wanted: WantedService, part: Slice) -> None:
        metadata = self._metadata(part.name, wanted.adapter)
        metadata["labels"] |= {
            SERVICE_NAME_LABEL: wanted.name,
            "endpointslice.kubernetes.io/managed-by": GROUP,  # so that Kubernetes' own controller leaves it alone
        }
        body: Json = {
            "metadata": metadata,
            "ports": [{"name": DATA_PORT_NAME, "port": part.port, "protocol": "TCP"}],
            "endpoints": [self._endpoint(one) for one in part.endpoints],
        }
        found, path = there.slices.get(part.name), paths.endpoint_slices(self._namespace, part.name)
        if found is None:
            body |= {"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": part.family}
            await self._create(paths.endpoint_slices(self._namespace), path, body, wanted.adapter)
            return
        _own("EndpointSlice", found, wanted.adapter)
        if _endpoints(found) != part.endpoints or found.get("ports") != body["ports"] or _astray(found, body):
            await self._kube.merge(path, _on(found, body))

    async def _create(self, collection: str, path: str, body: Json, adapter: Adapter) -> None:
        try:
            await self._kube.create(collection, body)
        except ApiConflict:
            found = await self._kube.get(path)
            if found is None:
                raise
            _own(body["kind"], found, adapter)
            await self._kube.merge(path, _on(found, body))  # ours, but somebody took the labels that it is found by

    async def _clear(self, there: There, wanted: WantedService) -> None:
        """Take away what the adapter has and does not ask for any more."""
        for name, body in there.services.items():
            if _controller(body).get("name") == wanted.adapter.name and name != wanted.name:
                await self._kube.delete(paths.core("services", self._namespace, name), uid=body["metadata"]["uid"])
        kept = {part.name for part in wanted.slices}
        for name, body in there.slices.items():
            if _controller(body).get("name") == wanted.adapter.name and name not in kept:
                await self._kube.delete(paths.endpoint_slices(self._namespace, name), uid=body["metadata"]["uid"])

    def _metadata(self, name: str, adapter: Adapter) -> dict[str, Any]:
        owner = {"apiVersion": API_VERSION, "kind": LORAADAPTER_KIND, "name": adapter.name, "uid": adapter.uid}
        return {"name": name, "labels": dict(self._labels), "ownerReferences": [{**owner, "controller": True}]}

    def _endpoint(self, one: Endpoint) -> Json:
        pod = {"kind": "Pod", "namespace": self._namespace, "name": one.name, "uid": one.uid}
        conditions = {"ready": True, "serving": True, "terminating": False}
        return {"addresses": [one.ip], "conditions": conditions, "targetRef": pod}


def refused(adapter: Adapter, error: ApiError) -> ServiceOutcome:
    """Say that the API server refused; what there was before is there still."""
    hint = f"{TEXTS[Reason.SERVICE_REFUSED]}: " if error.status == FORBIDDEN else ""
    return ServiceOutcome(
        name=adapter.status.service, reason=Reason.SERVICE_REFUSED, message=f"its Service: {hint}{error.message}"
    )


def _own(kind: str, body: Json, adapter: Adapter) -> None:
    """Refuse what is not the adapter's own.

    Raises:
        ServiceTakenError: whose it is.
    """
    owner = _controller(body)
    if owner.get("name") != adapter.name:
        whose = f"belongs to {LORAADAPTER_KIND} {owner['name']}" if owner else "was not made for a LoRAAdapter"
        raise ServiceTakenError(f"{kind} {body['metadata']['name']} {whose}: {TEXTS[Reason.SERVICE_TAKEN]}")


def _controller(body: Json) -> Json:
    """Return the reference to the LoRAAdapter that an object was made for, nothing where there is none."""
    owners: Iterable[Json] = body["metadata"].get("ownerReferences") or []
    mine = (one for one in owners if one["kind"] == LORAADAPTER_KIND and one["apiVersion"].startswith(f"{GROUP}/"))
    return next((one for one in mine if one.get("controller")), {})


def _astray(found: Json, body: Json) -> bool:
    """Say whether labels or owner are not what they must be."""
    labels = found["metadata"].get("labels") or {}
    owners = [one["uid"] for one in found["metadata"].get("ownerReferences") or []]
    wanted = body["metadata"]
    return not wanted["labels"].items() <= labels.items() or owners != [wanted["ownerReferences"][0]["uid"]]


def _on(found: Json, body: Json) -> Json:
    """A change of what was read, and of nothing later."""
    return {**body, "metadata": {**body["metadata"], "resourceVersion": found["metadata"]["resourceVersion"]}}


def _endpoints(body: Json) -> tuple[Endpoint, ...]:
    """Return whom a slice leads to."""
    ready = [one for one in body.get("endpoints") or [] if (one.get("conditions") or {}).get("ready", True)]
    pods = [(one.get("targetRef") or {}, one["addresses"][0]) for one in ready]
    return tuple(Endpoint(name=pod.get("name", ""), uid=pod.get("uid", ""), ip=ip) for pod, ip in pods)


def _by_name(found: Iterable[Json]) -> dict[str, Json]:
    return {body["metadata"]["name"]: body for body in found}
