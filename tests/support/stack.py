"""modelswap as a user installs it, on a real cluster: images, both charts, tiny models, the slot's objects.

Everything goes through helm, kubectl and the ports a user has; nothing reaches into a pod but where a test kills it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import stamina

from modelswap_engine.protocol.assignment import ASSIGNMENT_KEY, Assignment
from modelswap_engine.protocol.engine_state import EngineState
from modelswap_engine.protocol.messages import CheckResult
from tests.support.cache import REPOSITORY, cache_root, run_script
from tests.support.cluster.provider import Cluster
from tests.support.operator_release import OPERATOR_NAMESPACE
from tests.support.pod import Pod
from tests.support.reaching import WAIT, Control, kill_on_node, kubectl_program, port_forward

IN_THE_MIDDLE = ("Staging", "Planned", "Fetching", "Staged", "Prepared")


def build_images(cluster: Cluster, *names: str) -> None:
    """Build images from this checkout and hand them to the cluster's nodes: those of the embedded engine, or others."""
    if not names:
        run_script("images/site.sh")
    for name in names or ("operator", "engine"):
        run_script("images/build.sh", name)
        cluster.load_image(f"modelswap/{name}:dev")


def models_folder(name: str) -> Path:
    """Return a folder that pods see as ``/models/<name>``, keyed by the code that fills it."""
    makers = [REPOSITORY / "tests/support/models.py", REPOSITORY / "tests/e2e/conftest.py"]
    makers += sorted((REPOSITORY / "engine/modelswap_engine/checkpoint").glob("*.py"))
    key = hashlib.sha256(b"".join(path.read_bytes() for path in makers)).hexdigest()[:12]
    return cache_root() / "models" / f"{name}-{key}"


def embedded_values(env: dict[str, str]) -> dict[str, Any]:
    """Return the values of pods with the embedded engine; torch and transformers come from the node."""
    return {
        "image": {"repository": "modelswap/engine", "tag": "dev", "pullPolicy": "Never"},
        "kvCache": {"blocks": 128, "pageSize": 32},
        "maxBatchTokens": 256,
        "resources": {"requests": {"cpu": "50m", "memory": "512Mi"}, "limits": {"memory": "3Gi"}},
        "extraEnv": [{"name": key, "value": value} for key, value in env.items()],
        "extraVolumes": [{"name": "site", "hostPath": {"path": "/opt/modelswap/site", "type": "Directory"}}],
        "extraVolumeMounts": [{"name": "site", "mountPath": "/opt/modelswap/site", "readOnly": True}],
    }


class Slot:
    """One release of the engine chart in a namespace of its own, and its ModelVersion."""

    def __init__(self, cluster: Cluster, *, name: str, models: Path) -> None:
        self.cluster = cluster
        self.name = name
        self.namespace = name
        self.models = models

    def install(
        self,
        *,
        replicas: int,
        model: str,
        version: str,
        node_port: int = 0,
        env: dict[str, str] | None = None,
        engine: dict[str, Any] | None = None,
        arguments: Sequence[str] = (),
    ) -> None:
        """Install the engine chart and wait until every pod serves the template's model.

        ``engine`` are the values of another kind than the embedded one.
        """
        values = {
            "slot": self.name,
            "servedModelName": self.name,
            "replicas": replicas,
            "model": {"path": self.inside(model), "version": version},
            "models": {"mountPath": "/models", "hostPath": {"path": "/models"}},
            "operator": {"namespace": OPERATOR_NAMESPACE, "serviceAccount": "modelswap"},
            "drainSeconds": 20,
            "service": {"type": "NodePort" if node_port else "ClusterIP", "nodePort": node_port},
            "podAnnotations": {"builtFor": str(uuid.uuid4())},  # the image's tag is always the same
            "extraArgs": list(arguments),
            **(engine or embedded_values(env or {})),
        }
        file = self.models.parent / f"{self.name}.values.json"
        file.write_text(json.dumps(values))
        chart = str(REPOSITORY / "charts/modelswap-engine")
        self.cluster.helm(
            "upgrade", "--install", self.name, chart, "--namespace", self.namespace, "--create-namespace",
            "--values", str(file), "--wait", "--timeout=10m",
        )  # fmt: skip

    def uninstall(self, *, wait: bool) -> None:
        """Remove the release, its ModelVersion and the namespace; pods take their time to end."""
        bound = WAIT if wait else "--wait=false"
        self.cluster.kubectl("delete", "namespace", self.namespace, "--ignore-not-found", bound)

    def inside(self, model: str) -> str:
        """Return the path of a checkpoint as pods see it."""
        return f"/models/{self.models.name}/{model}"

    def apply(self, version: str, model: str, *, digest: str = "", **spec: Any) -> int:
        """Apply the slot's ModelVersion; return its generation."""
        source = {"uri": f"file://{self.inside(model)}"} | ({"digest": digest} if digest else {})
        manifest = {
            "apiVersion": "modelswap.dev/v1alpha1",
            "kind": "ModelVersion",
            "metadata": {"name": self.name, "namespace": self.namespace},
            "spec": {"servedModelName": self.name, "version": version, "source": source, **spec},
        }
        text = self.cluster.kubectl("apply", "-f", "-", "-o", "json", stdin=json.dumps(manifest))
        return int(json.loads(text)["metadata"]["generation"])

    def apply_adapter(self, name: str, *sources: dict[str, str], **spec: Any) -> None:
        """Apply a LoRAAdapter of the slot, and wait until it is Ready."""
        spec = {"adapterName": name, "modelRef": {"name": self.name}, "sources": list(sources), **spec}
        metadata = {"name": name, "namespace": self.namespace}
        manifest = {
            "apiVersion": "modelswap.dev/v1alpha1",
            "kind": "LoRAAdapter",
            "metadata": metadata,
            "spec": spec,
        }
        self.cluster.kubectl("apply", "-f", "-", stdin=json.dumps(manifest))
        self._kubectl("wait", f"loraadapter/{name}", "--for=condition=Ready", WAIT)

    def delete_adapter(self, name: str) -> None:
        """Delete a LoRAAdapter."""
        self._kubectl("delete", "loraadapter", name, WAIT)

    def get(self) -> dict[str, Any]:
        """Return the ModelVersion."""
        found: dict[str, Any] = json.loads(self._kubectl("get", "modelversion", self.name, "-o", "json"))
        return found

    def condition(self, kind: str) -> dict[str, Any]:
        """Return a condition of the ModelVersion; empty when it is not there."""
        conditions = self.get().get("status", {}).get("conditions", [])
        return next((c for c in conditions if c["type"] == kind), {})

    def wait_ready(self, generation: int) -> None:
        """Wait until this generation is decided and Ready."""
        self._wait("jsonpath={.status.observedGeneration}=" + str(generation))
        self._wait("condition=Ready")

    def wait_stalled(self, generation: int) -> None:
        """Wait until the operator has given this generation up."""
        self._wait("jsonpath={.status.observedGeneration}=" + str(generation))
        self._wait("condition=Stalled")

    def wait_condition(self, kind: str) -> None:
        """Wait until a condition is True."""
        self._wait(f"condition={kind}")

    def wait_field(self, path: str) -> None:
        """Wait until a field of the ModelVersion has a value."""
        self._wait(f"jsonpath={path}")

    def swapping_pod(self) -> str:
        """Wait until a pod is staging, and return its name."""
        with self.watch() as objects:
            for found in objects:
                for pod in found.get("status", {}).get("pods", []):
                    if pod.get("state") in IN_THE_MIDDLE:
                        return str(pod["name"])
        raise AssertionError(f"no pod was ever seen in {IN_THE_MIDDLE}")

    @contextlib.contextmanager
    def watch(self) -> Iterator[Iterator[dict[str, Any]]]:
        """Follow the ModelVersion: yields it as it is, then each change, for at most three minutes."""
        command = ["-n", self.namespace, "get", "modelversion", self.name, "--watch", "--request-timeout=180s"]
        template = '-o=jsonpath={}{"\\n"}'
        process = subprocess.Popen(
            [kubectl_program(), *command, template],
            env={**os.environ, "KUBECONFIG": str(self.cluster.kubeconfig)},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        try:
            yield (json.loads(line) for line in process.stdout if line.strip())
        finally:
            process.terminate()
            process.wait(10)

    def kill_container(self, name: str) -> None:
        """Kill the pod's engine container without asking; the kubelet starts it again."""
        uid = self.pods()[name].uid
        node = self._kubectl("get", "pod", name, "-o", "jsonpath={.spec.nodeName}")
        kill_on_node(self.cluster, node=node, needle=f"MODELSWAP_POD_UID={uid}")

    def wait_restarted(self, name: str, restarts: int) -> None:
        """Wait until the container has been started again after so many restarts."""
        path = "{.status.containerStatuses[0].restartCount}"
        self._kubectl("wait", f"pod/{name}", f"--for=jsonpath={path}={restarts + 1}", WAIT)

    def wait_engine(self, name: str, digest: str) -> None:
        """Wait until the pod's engine serves, and see that it proves this digest and no other.

        Asks the engine and not the pod's condition: that one still says Ready until the kubelet's next probe.
        """
        self._kubectl("wait", f"pod/{name}", "--for=condition=Ready", WAIT)
        pod = self.pods()[name]
        patient = stamina.retry(on=_not_serving, attempts=None, timeout=180, wait_max=2)(self.check)
        check = patient(pod)
        assert check.ok
        assert check.digest == digest

    def wait_serving(self, pod: Pod, digest: str, *, since: EngineState) -> None:
        """Wait until all ranks of a pod, of another start than those of ``since``, have proved this digest."""
        before = {rank.boot_id for rank in since.ranks}
        patient = stamina.retry_context(on=(NotYet, *UNREACHABLE), attempts=None, timeout=240, wait_max=1)
        for attempt in patient:
            with attempt:
                state = self.state(pod)
                new = before.isdisjoint(rank.boot_id for rank in state.ranks)
                if not (state.ready and new) or {rank.digest for rank in state.ranks} != {digest}:
                    raise NotYet(f"pod {pod.name} is {state.reason or 'ready'}: {state.message}, {state.ranks}")

    def pods(self) -> dict[str, Pod]:
        """Return the slot's pods that are not terminating, by name."""
        selector = f"modelswap.dev/slot={self.name}"
        items = json.loads(self._kubectl("get", "pods", "--selector", selector, "-o", "json"))["items"]
        return {p.name: p for p in map(Pod.of, (i for i in items if "deletionTimestamp" not in i["metadata"]))}

    def wait_pods(self) -> None:
        """Wait until the Deployment is rolled out."""
        self._kubectl("rollout", "status", f"deployment/{self.deployment()}", WAIT)

    def deployment(self) -> str:
        """Return the name of the slot's Deployment."""
        return self._kubectl("get", "deployments", "-o", "jsonpath={.items[0].metadata.name}")

    def scale(self, replicas: int) -> None:
        """Change the number of pods."""
        self._kubectl("scale", f"deployment/{self.deployment()}", f"--replicas={replicas}")

    def delete_pod(self, name: str) -> None:
        """Delete a pod and wait until it is gone."""
        self._kubectl("delete", "pod", name, WAIT)

    def evict_pod(self, name: str) -> None:
        """Evict a pod, as a drain of its node does, and wait until it is gone."""
        subject = {"name": name, "namespace": self.namespace}
        wanted = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": subject}
        path = f"/api/v1/namespaces/{self.namespace}/pods/{name}/eviction"
        self.cluster.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(wanted))
        self._kubectl("wait", f"pod/{name}", "--for=delete", WAIT)

    def assignment(self) -> Assignment:
        """Return the slot's assignment."""
        data = json.loads(self._kubectl("get", "configmap", f"modelswap-{self.name}", "-o", "json"))["data"]
        return msgspec.json.decode(data[ASSIGNMENT_KEY], type=Assignment)

    def describe(self) -> str:
        """Return what a user reads."""
        return self._kubectl("describe", "modelversion", self.name)

    def exec_python(self, pod: str, code: str, *, container: str = "engine") -> subprocess.CompletedProcess[str]:
        """Run Python in a pod; only for killing things, and for looking at what no port tells."""
        place = ("-n", self.namespace, "exec", pod, "--container", container)
        return self.cluster.try_kubectl(*place, "--", "python3", "-c", code)

    def state(self, pod: Pod) -> EngineState:
        """Read the state of a pod's engine through its control port."""
        with self.control(pod) as control:
            return control.state()

    def check(self, pod: Pod) -> CheckResult:
        """Have a pod hash its live tensors."""
        with self.control(pod) as control:
            return control.check()

    @contextlib.contextmanager
    def control(self, pod: Pod) -> Iterator[Control]:
        """Reach a pod's control port with a token of the operator's account, made for this pod."""
        token = self.cluster.kubectl(
            "-n", OPERATOR_NAMESPACE, "create", "token", "modelswap", f"--audience={pod.uid}", "--duration=10m"
        ).strip()
        with port_forward(self.cluster, namespace=self.namespace, pod=pod.name, port=pod.control) as url:
            yield Control(url, token)

    def _kubectl(self, *arguments: str) -> str:
        return self.cluster.kubectl("-n", self.namespace, *arguments)

    def _wait(self, what: str) -> None:
        done = self.cluster.try_kubectl(
            "-n", self.namespace, "wait", f"modelversion/{self.name}", f"--for={what}", WAIT
        )
        assert done.returncode == 0, f"{done.stderr}\n{json.dumps(self.get().get('status'), indent=1)}"


class NotYet(AssertionError):
    """It may still come true."""


UNREACHABLE = (urllib.error.URLError, ConnectionError)


def _not_serving(error: Exception) -> bool:
    return isinstance(error, urllib.error.HTTPError) and error.code == 503
