"""Writing status: one server-side apply of the whole status, on the object version that was observed."""

from typing import Any

import msgspec

from modelswap_operator.api.labels import API_VERSION
from modelswap_operator.effects import paths
from modelswap_operator.effects.kube import Kube


async def apply_status(
    kube: Kube, *, kind: str, plural: str, namespace: str, name: str, resource_version: str, status: msgspec.Struct
) -> str:
    """Apply a status; returns the object's new resourceVersion.

    Raises:
        ApiConflict: the object has changed since it was observed: look again.
        ApiNotFound: it is gone.
    """
    body: dict[str, Any] = {
        "apiVersion": API_VERSION,
        "kind": kind,
        "metadata": {"name": name, "namespace": namespace, "resourceVersion": resource_version},
        "status": msgspec.to_builtins(status),
    }
    answer = await kube.apply(paths.custom(plural, namespace, name, "status"), body)
    return str(answer["metadata"]["resourceVersion"])
