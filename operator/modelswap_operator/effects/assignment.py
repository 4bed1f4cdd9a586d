"""The slot's assignment ConfigMap: reading and publishing (docs/architecture.md, The assignment).

It has no ownerReference on purpose: pods keep to it when the ModelVersion is gone.
"""

from typing import Any

from modelswap_engine.protocol.assignment import ASSIGNMENT_KEY, Assignment
from modelswap_engine.protocol.codec import decode, encode
from modelswap_engine.protocol.errors import BadRequest
from modelswap_operator.api.labels import FIELD_MANAGER, LEDGER_KEY, MANAGED_BY_LABEL, SLOT_LABEL, assignment_name
from modelswap_operator.effects import paths
from modelswap_operator.effects.kube import Json, Kube
from modelswap_operator.planning.snapshot import Ledger


def parse(configmap: Json | None) -> tuple[Assignment | None, Ledger]:
    """Read a ConfigMap; content that nobody can read counts as absent, and is then written anew."""
    data = (configmap or {}).get("data") or {}
    try:
        assignment = decode(data[ASSIGNMENT_KEY], Assignment) if ASSIGNMENT_KEY in data else None
        ledger = decode(data[LEDGER_KEY], Ledger) if LEDGER_KEY in data else Ledger()
    except BadRequest:
        return None, Ledger()
    return assignment, ledger


async def publish(
    kube: Kube, *, namespace: str, slot: str, assignment: Assignment, ledger: Ledger, uid: str, resource_version: str
) -> None:
    """Write the assignment over the ConfigMap that it was decided on, by UID and version; empty when there was none.

    A version alone would not do: an apply creates what is gone, and somebody who deletes an assignment means it.

    Raises:
        ApiConflict: somebody else wrote it meanwhile; decide again.
    """
    name = assignment_name(slot)
    metadata: dict[str, Any] = {
        "name": name,
        "namespace": namespace,
        "labels": {SLOT_LABEL: slot, MANAGED_BY_LABEL: FIELD_MANAGER},
    }
    body: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata,
        "data": {ASSIGNMENT_KEY: encode(assignment).decode(), LEDGER_KEY: encode(ledger).decode()},
    }
    if resource_version:
        metadata |= {"uid": uid, "resourceVersion": resource_version}
        await kube.apply(paths.core("configmaps", namespace, name), body)
    else:
        await kube.create(paths.core("configmaps", namespace), body)
