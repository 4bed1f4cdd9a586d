"""API objects as they come, turned into the values that decisions are made on. Reads leniently, invents nothing."""

from collections.abc import Collection
from contextlib import suppress
from typing import Any, Final

import msgspec

from modelswap_operator.api.labels import (
    ABORT,
    CHANGE_NOW,
    CONTROL_PORT_NAME,
    CONTROL_TLS_PORT_NAME,
    DATA_PORT_NAME,
    REQUESTED_AT,
)
from modelswap_operator.api.loraadapter import LoRAAdapterSpec, LoRAAdapterStatus
from modelswap_operator.api.modelversion import ModelVersionSpec, ModelVersionStatus
from modelswap_operator.effects.groups import group_of
from modelswap_operator.planning.snapshot import Adapter, Asked, Pod

Json = dict[str, Any]

DATA_PORT: Final = 8000


def spec_of(body: Json) -> tuple[ModelVersionSpec | None, str]:
    """Return the spec, or None and what is wrong with it."""
    try:
        return msgspec.convert(body.get("spec") or {}, ModelVersionSpec, strict=False), ""
    except msgspec.ValidationError as error:
        return None, str(error)


def status_of(body: Json) -> ModelVersionStatus:
    """Return the status; one that cannot be read counts as none."""
    try:
        return msgspec.convert(body.get("status") or {}, ModelVersionStatus, strict=False)
    except msgspec.ValidationError:
        return ModelVersionStatus()


def asked_of(body: Json) -> Asked:
    """Return what annotations ask for."""
    found = _annotations(body)
    return Asked(abort=str(found.get(ABORT, "")).strip(), change_now=str(found.get(CHANGE_NOW, "")).strip())


def requested_at(body: Json) -> str:
    """Return by what somebody asks for another try now, "" when nobody does."""
    return str(_annotations(body).get(REQUESTED_AT, ""))[:128]


def _annotations(body: Json) -> Json:
    return (body.get("metadata") or {}).get("annotations") or {}


def adapter_of(body: Json) -> Adapter:
    """Return a LoRAAdapter; a status that cannot be read counts as none."""
    metadata = body.get("metadata") or {}
    spec, wrong, status = None, "", LoRAAdapterStatus()
    try:
        spec = msgspec.convert(body.get("spec") or {}, LoRAAdapterSpec, strict=False)
    except msgspec.ValidationError as error:
        wrong = str(error)
    with suppress(msgspec.ValidationError):
        status = msgspec.convert(body.get("status") or {}, LoRAAdapterStatus, strict=False)
    return Adapter(
        name=str(metadata.get("name", "")),
        uid=str(metadata.get("uid", "")),
        generation=int(metadata.get("generation", 0)),
        created=str(metadata.get("creationTimestamp", "")),
        spec=spec,
        spec_error=wrong,
        requested_at=requested_at(body),
        status=status,
    )


def slot_of(body: Json) -> str:
    """Return the slot that a LoRAAdapter belongs to, "" when it names none."""
    return str(((body.get("spec") or {}).get("modelRef") or {}).get("name") or "")


def spec_writer(body: Json) -> tuple[str, str]:
    """Return who last set ``spec.version``, and when, as the API server recorded it."""
    entries = (body.get("metadata") or {}).get("managedFields") or []
    mine = [
        (str(e.get("manager", ""))[:128], str(e.get("time", "")))
        for e in entries
        if not e.get("subresource") and "f:version" in ((e.get("fieldsV1") or {}).get("f:spec") or {})
    ]
    return max(mine, key=lambda item: item[1], default=("", ""))


def pod_of(body: Json, *, ever_ready: Collection[str], default_port: int) -> Pod:
    """Return a pod; its engine is asked later. ``ever_ready`` holds UIDs known to have been Ready."""
    metadata, status = body.get("metadata") or {}, body.get("status") or {}
    conditions = status.get("conditions") or []
    ready = any(c.get("type") == "Ready" and c.get("status") == "True" for c in conditions)
    uid = str(metadata.get("uid", ""))
    port, tls = _control_port(body.get("spec") or {}, default_port)
    return Pod(
        name=str(metadata.get("name", "")),
        uid=uid,
        namespace=str(metadata.get("namespace", "")),
        ip=str(status.get("podIP") or ""),
        node=str((body.get("spec") or {}).get("nodeName") or ""),
        port=port,
        tls=tls,
        data_port=_named_port(_ports(body.get("spec") or {}), DATA_PORT_NAME) or DATA_PORT,
        ready=ready,
        ever_ready=ready or uid in ever_ready,
        terminating=bool(metadata.get("deletionTimestamp")),
        finished=status.get("phase") in ("Failed", "Succeeded"),
        group=group_of(body),
    )


def _control_port(spec: Json, default: int) -> tuple[int | None, bool]:
    """Return the control port, and whether it speaks TLS; a pod that names no ports at all is given the default."""
    ports = _ports(spec)
    for name, tls in ((CONTROL_TLS_PORT_NAME, True), (CONTROL_PORT_NAME, False)):
        named = _named_port(ports, name)
        if named is not None:
            return named, tls
    return (None if ports else default), False


def _ports(spec: Json) -> list[Json]:
    containers = [*(spec.get("containers") or []), *(spec.get("initContainers") or [])]
    return [port for container in containers for port in container.get("ports") or []]


def _named_port(ports: list[Json], name: str) -> int | None:
    found = next((port.get("containerPort") for port in ports if port.get("name") == name), None)
    return int(found) if found is not None else None
