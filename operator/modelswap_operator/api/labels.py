"""Names that appear in the cluster: API group, labels, field managers, object names."""

from typing import Final

GROUP: Final = "modelswap.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"

MODELVERSION_KIND: Final = "ModelVersion"
MODELVERSIONS: Final = "modelversions"
LORAADAPTER_KIND: Final = "LoRAAdapter"
LORAADAPTERS: Final = "loraadapters"

SLOT_LABEL: Final = f"{GROUP}/slot"
MANAGED_BY_LABEL: Final = "app.kubernetes.io/managed-by"

REQUESTED_AT: Final = f"{GROUP}/requestedAt"
OPERATOR: Final = f"{GROUP}/operator"
"""Names the one operator that may act on the object, as namespace/lease."""
"""Annotation by which a person asks for another try now; any value that was not handled yet counts."""

FIELD_MANAGER: Final = "modelswap-operator"
"""Owns the status of both kinds and the assignment; one name per writer, so that nothing of others is touched."""

ABORT: Final = f"{GROUP}/abort"
"""Annotation of a ModelVersion: the generation whose rollout is given up."""
CHANGE_NOW: Final = f"{GROUP}/change-now"
"""Annotation of a ModelVersion: the generation that is rolled out although changes are frozen."""
CHANGES_NAME: Final = "changes.modelswap.dev"
"""ConfigMap beside the operator that says when versions may change; no assignment can have this name."""

REPORTING_CONTROLLER: Final = f"{GROUP}/operator"

CONTROL_PORT_NAME: Final = "modelswap"
CONTROL_TLS_PORT_NAME: Final = "modelswap-tls"
"""Name of a control port that speaks TLS. Names of ports cannot be changed in a pod: nobody talks us out of TLS."""
DATA_PORT_NAME: Final = "http"
"""Of the pods' port that clients ask, and so of the port of an adapter's Service."""
LEDGER_KEY: Final = "ledger.json"
"""Key beside the assignment where the operator keeps what only it needs; the sidecar never reads it."""


def assignment_name(slot: str) -> str:
    """Return the name of the slot's assignment ConfigMap."""
    return f"modelswap-{slot}"
