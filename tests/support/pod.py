"""One engine pod as the API server shows it, as far as tests look at it. It reaches nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Pod:
    """One engine pod as the API server shows it."""

    name: str
    uid: str
    restarts: int
    ready: bool
    started: str
    node: str = ""
    ip: str = ""
    control: int = 8001

    @staticmethod
    def of(manifest: dict[str, Any]) -> Pod:
        """Read it from the pod's manifest."""
        status = manifest.get("status", {})
        # A sidecar before a foreign engine is an init container that stays.
        containers = [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]
        return Pod(
            name=manifest["metadata"]["name"],
            uid=manifest["metadata"]["uid"],
            restarts=sum(container["restartCount"] for container in containers),
            ready=any(c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions", [])),
            started=status.get("startTime", ""),
            node=manifest["spec"].get("nodeName", ""),
            ip=status.get("podIP", ""),
            control=_control_port(manifest["spec"]),
        )


def _control_port(spec: dict[str, Any]) -> int:
    containers = [*spec.get("initContainers", []), *spec["containers"]]
    ports = {port.get("name", ""): port["containerPort"] for c in containers for port in c.get("ports", [])}
    return int(next((port for name, port in ports.items() if name.startswith("modelswap")), 8001))
