"""The control ports of a slot's pods, reached as the user may: port-forward, and a token made for one pod.

The token is asked for the service account that the engine chart names (docs/guides/kubectl.md), is bound to the pod by
its audience, and is kept in memory only.
"""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from modelswap_engine.cli.client import ControlClient, Trust
from modelswap_operator.api.labels import CONTROL_PORT_NAME, CONTROL_TLS_PORT_NAME, SLOT_LABEL
from modelswap_operator.cli.failures import NotThereError, PluginError
from modelswap_operator.cli.kubectl import Kubectl
from modelswap_operator.cli.slots import pods_of

TOKEN_MINUTES: Final = 10
_SUBJECT: Final = "--allowed-subject=system:serviceaccount:"
PROVED_BY_FORWARD: Final = Trust(checked=False)
"""The API server and the pod's kubelet lead into this pod and no other; whoever is in its network can be it anyway."""


@dataclass(frozen=True, kw_only=True)
class ControlPort:
    """A pod's control port."""

    number: int
    tls: bool


@dataclass(frozen=True, kw_only=True)
class Engines:
    """The pods of one slot."""

    kubectl: Kubectl
    namespace: str
    slot: str

    def pods(self) -> list[dict[str, Any]]:
        """Return the slot's pods, by name.

        Raises:
            ClusterError: they cannot be listed.
        """
        found = self.kubectl.items("pods", selector=f"{SLOT_LABEL}={self.slot}", namespace=self.namespace)
        return sorted(pods_of(found, self.slot), key=lambda pod: str(pod["metadata"]["name"]))

    @contextlib.contextmanager
    def reach(self, pod: dict[str, Any]) -> Iterator[ControlClient]:
        """Reach a pod's control port.

        Raises:
            ClusterError: no right to, or the pod is gone.
            PluginError: the pod has no control port.
        """
        name = pod["metadata"]["name"]
        port = control_port(pod)
        if port is None:
            raise PluginError(
                f"pod {name} has no container port named {CONTROL_PORT_NAME} or {CONTROL_TLS_PORT_NAME}",
                advice="is it a pod of the engine chart?",
            )
        token = self._token(pod)
        with self.kubectl.forward(name, port.number, tls=port.tls) as url:
            yield ControlClient(url, token=token, trust=PROVED_BY_FORWARD)

    def _token(self, pod: dict[str, Any]) -> str:
        account = account_of(pod)
        if account is None:
            raise PluginError(
                f"pod {pod['metadata']['name']} names no service account that its control port accepts",
                advice="use `modelswap … --token-file` through a port-forward",
            )
        namespace, name = account
        audience = f"--audience={pod['metadata']['uid']}"
        return self.kubectl.run(
            "create", "token", name, audience, f"--duration={TOKEN_MINUTES}m", namespace=namespace
        ).strip()


def control_port(pod: dict[str, Any]) -> ControlPort | None:
    """Return the container port named ``modelswap-tls`` or ``modelswap``, None when there is neither."""
    ports = [port for container in _containers(pod) for port in container.get("ports", [])]
    for name in (CONTROL_TLS_PORT_NAME, CONTROL_PORT_NAME):
        for port in ports:
            if port.get("name") == name:
                return ControlPort(number=int(port["containerPort"]), tls=name == CONTROL_TLS_PORT_NAME)
    return None


def account_of(pod: dict[str, Any]) -> tuple[str, str] | None:
    """Return namespace and name of the first account that a pod's control port accepts, None when none is named."""
    for container in _containers(pod):
        for argument in [*container.get("command", []), *container.get("args", [])]:
            if str(argument).startswith(_SUBJECT):
                namespace, _, name = str(argument).removeprefix(_SUBJECT).partition(":")
                return namespace, name
    return None


def _containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    spec = pod["spec"]
    return [*spec.get("initContainers", []), *spec.get("containers", [])]


def assignment_text(kubectl: Kubectl, namespace: str, name: str) -> str:
    """Return an assignment as it is published, "" while there is none.

    Raises:
        ClusterError: it cannot be read for another reason.
    """
    try:
        thing = json.loads(kubectl.run("get", "configmap", name, "-o", "json", namespace=namespace))
    except NotThereError:
        return ""
    return str(thing.get("data", {}).get("assignment.json", ""))
