"""The demo's slot on a cluster: charts, ModelVersion, pods and what their engines say, through helm and kubectl.

Every command that changes or shows something is printed as a person would type it. Refuses to know the order of things.
"""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from demo.console import command, say, step
from demo.excerpts import refusal_excerpt, without_age
from demo.folder import key_of
from demo.lines import Lines
from modelswap_engine.protocol.engine_state import EngineState
from tests.support import engine_values
from tests.support.cache import REPOSITORY
from tests.support.cluster.provider import DATA_NODE_PORT, Cluster
from tests.support.operator_release import OPERATOR_NAMESPACE
from tests.support.pod import Pod
from tests.support.reaching import Control, kubectl_program, port_forward

EMBEDDED: Final = "embedded"
NAME: Final = "smollm2"
NAMESPACE: Final = "default"
_ROLLED_OUT: Final = "--timeout=600s"
_NO_VALUES: Final[Mapping[str, Any]] = {}
_SETTLE_SECONDS: Final = 600.0
_LAST_LINE_SECONDS: Final = 5.0


class Unsettled(RuntimeError):
    """The object did not come to where it should; the message says where it stands."""


class DemoSlot:
    """A ModelVersion and its pods; ``more`` are further values of the engine's chart."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        build: Path,
        engine: str = EMBEDDED,
        name: str = NAME,
        namespace: str = NAMESPACE,
        more: Mapping[str, Any] = _NO_VALUES,
    ) -> None:
        self.cluster, self.engine = cluster, engine
        self._more = dict(more)
        self._build = build
        self._name, self._namespace = name, namespace

    def install_operator(self) -> None:
        """Install the definitions and the operator."""
        values = {
            "image": _image("operator"),
            "podAnnotations": _source("operator", "engine/modelswap_engine/protocol"),
        }
        self._helm("modelswap", "charts/modelswap", values, namespace=OPERATOR_NAMESPACE)

    def clear(self) -> None:
        """Remove what an earlier run left, so that each begins with new pods of 1.0 that have nothing in memory."""
        if self._name not in self.cluster.helm("list", "--short", "--namespace", self._namespace).split():
            return
        say("an earlier run's release and object are removed first:")
        gone = ["uninstall", self._name, "--namespace", self._namespace, "--wait", "--timeout=5m"]
        command(["helm", *gone])
        self.cluster.helm(*gone)
        self.release()

    def install_engine(self, *, replicas: int) -> None:
        """Install the engine pods, which start with version 1.0, and their Service."""
        values = {
            "slot": self._name,
            "servedModelName": self._name,
            "replicas": replicas,
            "podAnnotations": _source("engine"),
            "model": {"path": "/models/smollm2-1.0", "version": "1.0"},
            "models": {"hostPath": {"path": "/models"}},
            "drainSeconds": 30,
            "service": {"type": "NodePort", "nodePort": DATA_NODE_PORT},
            **(_embedded() if self.engine == EMBEDDED else engine_values.values_of(self.engine)),
            **self._more,
        }
        self._helm(self._name, "charts/modelswap-engine", values, namespace=self._namespace)

    def apply(self, file: Path) -> int:
        """Apply a ModelVersion; return its generation."""
        self.show("apply", "-f", str(file))
        return int(self._get()["metadata"]["generation"])

    def settle(self, generation: int, *, to: str) -> None:
        """Show `kubectl get modelversion --watch` until a condition (Ready or Stalled) is True for this generation.

        Raises:
            Unsettled: the other condition came, or none in ten minutes.
        """
        watch = ("get", "modelversion", self._name, "--watch")
        command(["kubectl", *watch])
        environment = {**os.environ, "KUBECONFIG": str(self.cluster.kubeconfig)}
        with Lines([kubectl_program(), "-n", self._namespace, *watch], environment=environment) as lines:
            self._follow(lines, generation, to)

    def _follow(self, lines: Lines, generation: int, to: str) -> None:
        """Print lines that differ until the object is settled, and then until its last line has been printed."""
        started, shown, settled = time.monotonic(), "", False
        while True:
            left = started + _SETTLE_SECONDS - time.monotonic()
            try:
                line = lines.next(seconds=min(left, _LAST_LINE_SECONDS) if settled else left)
            except (TimeoutError, EOFError) as error:
                if settled:
                    return
                raise Unsettled(f"the ModelVersion {self._name} is not {to}: {error}; it says: {shown}") from None
            row = without_age(line)
            if row.split() != shown.split():
                say(f"{time.monotonic() - started:5.1f} s  {row}")
            shown = row
            settled = settled or self._is(to, generation)
            if settled and row.split() == self._row().split():
                return

    def _is(self, wanted: str, generation: int) -> bool:
        true = _true_conditions(self._get(), generation)
        if wanted == "Ready" and "Stalled" in true:
            raise Unsettled(f"the ModelVersion {self._name} is stalled: {true['Stalled']}")
        return wanted in true

    def refusal(self, digest: str) -> tuple[str, str]:
        """Return reason and message with which a digest was refused; empty when it was not."""
        failures = self._get().get("status", {}).get("failures", [])
        found: dict[str, Any] = next((failure for failure in failures if failure.get("digest") == digest), {})
        return str(found.get("reason", "")), str(found.get("message", ""))

    def show_refusal(self, version: str) -> None:
        """Show the part of `kubectl describe` that says why a version was refused, and that the pods serve on."""
        command(["kubectl", "describe", "modelversion", self._name])
        text = self._kubectl("describe", "modelversion", self._name)
        say("\n".join(refusal_excerpt(text, version=version)))

    def pods(self) -> list[Pod]:
        """Return the slot's pods that are not terminating, by name."""
        items = json.loads(self._kubectl("get", "pods", "-l", f"modelswap.dev/slot={self._name}", "-o", "json"))[
            "items"
        ]
        found = [Pod.of(item) for item in items if "deletionTimestamp" not in item["metadata"]]
        return sorted(found, key=lambda pod: pod.name)

    def engine_state(self, pod: Pod) -> EngineState:
        """Ask a pod's engine, as the operator does: with a token made for this pod alone."""
        token = self.cluster.kubectl(
            "-n", OPERATOR_NAMESPACE, "create", "token", "modelswap", f"--audience={pod.uid}", "--duration=10m"
        ).strip()
        with port_forward(self.cluster, namespace=self._namespace, pod=pod.name, port=8001) as url:
            return Control(url, token).state()

    def release(self) -> None:
        """Take the pods out of modelswap's hands: from here on their template alone says what they serve."""
        self.show("delete", "modelversion", self._name, "--ignore-not-found")
        self.show("delete", "configmap", f"modelswap-{self._name}", "--ignore-not-found")

    def roll_out(self, *, path: str, version: str) -> float:
        """Change the model in the pods' template; return the seconds from then until only the new pods serve."""
        release = ["upgrade", self._name, "charts/modelswap-engine", "--namespace", self._namespace, "--reuse-values"]
        release += ["--set-string", f"model.path={path},model.version={version}"]
        command(["helm", *release])
        self.cluster.helm(*[str(REPOSITORY / word) if word.startswith("charts/") else word for word in release])
        started, deployment = time.monotonic(), f"deployment/{self._deployment()}"
        command(["kubectl", "rollout", "status", deployment])
        with step("waiting for the new pods"):
            self._kubectl("rollout", "status", deployment, _ROLLED_OUT)
        return time.monotonic() - started

    def show(self, *arguments: str) -> None:
        """Run kubectl and print command and output."""
        command(["kubectl", *(_relative(argument) for argument in arguments)])
        say(self._kubectl(*arguments).rstrip())

    def _helm(self, release: str, chart: str, values: dict[str, Any], *, namespace: str) -> None:
        file = self._build / f"{release}.values.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values, indent=1) + "\n")
        arguments = ["upgrade", "--install", release, str(REPOSITORY / chart), "--values", str(file)]
        arguments += ["--namespace", namespace, "--create-namespace", "--wait", "--timeout=10m"]
        command(["helm", *(_relative(argument) for argument in arguments)])
        with step(f"release {release}"):
            self.cluster.helm(*arguments)

    def _get(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._kubectl("get", "modelversion", self._name, "-o", "json"))
        return found

    def _row(self) -> str:
        return without_age(self._kubectl("get", "modelversion", self._name, "--no-headers"))

    def _deployment(self) -> str:
        chosen = ("-l", f"modelswap.dev/slot={self._name}", "-o", "jsonpath={.items[0].metadata.name}")
        return self._kubectl("get", "deployments", *chosen)

    def _kubectl(self, *arguments: str) -> str:
        return self.cluster.kubectl("-n", self._namespace, *arguments)


def write_model_version(file: Path, *, version: str, uri: str, digest: str) -> Path:
    """Write a ModelVersion of the demo's slot that pins a digest."""
    source = {"uri": uri, "digest": digest}
    spec = {"servedModelName": NAME, "version": version, "source": source}
    body = {"apiVersion": "modelswap.dev/v1alpha1", "kind": "ModelVersion", "metadata": {"name": NAME}, "spec": spec}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(body, indent=1) + "\n")
    return file


def _true_conditions(found: dict[str, Any], generation: int) -> dict[str, str]:
    """Return the conditions that are True for a generation, with their messages."""
    status = found.get("status", {})
    if status.get("observedGeneration") != generation:
        return {}
    return {c["type"]: c.get("message", "") for c in status.get("conditions", []) if c["status"] == "True"}


def _embedded() -> dict[str, Any]:
    """Return what the embedded engine needs; torch and transformers come from the node instead of a 5 GB image."""
    return {
        "image": _image("engine"),
        "kvCache": {"blocks": 128, "pageSize": 32},
        "maxBatchTokens": 256,
        "resources": {"requests": {"cpu": "100m", "memory": "1Gi"}, "limits": {"memory": "3Gi"}},
        "extraVolumes": [{"name": "site", "hostPath": {"path": "/opt/modelswap/site", "type": "Directory"}}],
        "extraVolumeMounts": [{"name": "site", "mountPath": "/opt/modelswap/site", "readOnly": True}],
    }


def _image(name: str) -> dict[str, str]:
    return {"repository": f"modelswap/{name}", "tag": "dev", "pullPolicy": "Never"}


def _source(*folders: str) -> dict[str, str]:
    """Return an annotation that changes with the code, since the tag of the images does not."""
    files: Sequence[Path] = sorted(file for folder in folders for file in (REPOSITORY / folder).rglob("*.py"))
    return {"modelswap.dev/demo-source": key_of(*files)}


def _relative(argument: str) -> str:
    return argument.replace(f"{REPOSITORY}/", "") if argument != str(REPOSITORY) else "."


def commands_prefix(cluster: Cluster) -> str:
    """Return what a person types first, so that the commands shown reach this cluster."""
    return f"export KUBECONFIG={shlex.quote(str(cluster.kubeconfig))}"
