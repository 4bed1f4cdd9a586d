"""Pods that exist in the API server only, each with a sidecar of `fake_sidecar` on loopback behind it.

A stand-in for kubelet and engine: it makes the Pod object, writes the status a kubelet would write, and serves the
control port that the pod's container port named `modelswap` points to.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from modelswap_engine.protocol.assignment import ASSIGNMENT_KEY, Assignment
from modelswap_engine.protocol.codec import decode
from modelswap_engine.protocol.errors import ErrorBody
from modelswap_engine.protocol.messages import VersionRef
from tests.support.custom import GROUP_VERSION, lora_adapter, model_version
from tests.support.fake_sidecar import Content, FakeSidecar
from tests.support.rest import Rest
from tests.support.sim_adapters import SimAdapters

T = TypeVar("T")
MERGE = "application/merge-patch+json"
PATIENCE_SECONDS = 90.0


def digest(letter: str) -> str:
    return "sha256:" + letter * 64


def ref(version: str, letter: str) -> VersionRef:
    return VersionRef(version=version, uri=f"file:///models/{version}", digest=digest(letter))


@dataclass
class FakePod:
    """One pod and its sidecar."""

    name: str
    uid: str
    sidecar: FakeSidecar


class Slot:
    """One ModelVersion and its pods in one namespace of a real API server."""

    def __init__(self, rest: Rest, *, namespace: str, name: str, contents: dict[str, Content]) -> None:
        self._rest = rest
        self.namespace = namespace
        self.name = name
        self.contents = contents
        self.adapter_contents: dict[str, str | ErrorBody] = {}
        self.pods: list[FakePod] = []

    # Pods

    async def add_pod(
        self,
        serving: VersionRef | None,
        *,
        ready: bool = True,
        secured: bool = True,
        tls: ssl.SSLContext | None = None,
    ) -> FakePod:
        sidecar = FakeSidecar(pod_uid="", contents=self.contents, live=serving)
        port = await sidecar.start("127.0.0.1", 0, tls=tls)
        name = f"{self.name}-{len(self.pods) + 1}"
        sidecar.pod_uid = self.make_pod(name, port=port, tls=tls is not None)
        sidecar.adapters = SimAdapters(pod_uid=sidecar.pod_uid, contents=self.adapter_contents)
        found = self.assignment()
        sidecar.adapters.restart(found, serving.digest if serving is not None else "")
        sidecar.audience = sidecar.pod_uid if secured else None
        pod = FakePod(name, sidecar.pod_uid, sidecar)
        self.pods.append(pod)
        self.set_ready(pod.name, ready)
        return pod

    def make_pod(self, name: str, *, port: int, tls: bool) -> str:
        """Make a pod whose control port is this one of loopback, and return its UID."""
        ports = [{"name": "modelswap-tls" if tls else "modelswap", "containerPort": port}]
        body = {
            "metadata": {"name": name, "labels": {"modelswap.dev/slot": self.name}},
            "spec": {"nodeName": "node-1", "containers": [{"name": "engine", "image": "none", "ports": ports}]},
        }
        return str(self._rest.call("POST", self._core("pods"), body).accepted()["metadata"]["uid"])

    def set_ready(self, pod: str, ready: bool) -> None:
        """Say whether a pod is Ready, as its kubelet would."""
        status = {
            "phase": "Running",
            "podIP": "127.0.0.1",
            "podIPs": [{"ip": "127.0.0.1"}],
            "conditions": [{"type": "Ready", "status": str(ready)}],
        }
        self._rest.call("PATCH", f"{self._core('pods')}/{pod}/status", {"status": status}, content=MERGE).accepted()

    def delete_pod(self, pod: FakePod) -> None:
        self._rest.call("DELETE", f"{self._core('pods')}/{pod.name}", {"gracePeriodSeconds": 0}).accepted()
        self.pods.remove(pod)

    async def close(self) -> None:
        for pod in self.pods:
            await pod.sidecar.stop()

    async def remove(self) -> None:
        """Leave nothing that an operator would go on looking after: its pods' ports will be those of others."""
        for path in (f"{self._list()}/{self.name}", *(f"{self._core('pods')}/{pod.name}" for pod in self.pods)):
            answer = self._rest.call("DELETE", path, {"gracePeriodSeconds": 0})
            assert answer.status in {200, 202, 404}, answer.message
        await self.close()

    # The ModelVersion

    def create(self, version: VersionRef, **spec: Any) -> dict[str, Any]:
        source = {"source": {"uri": version.uri}, "version": version.version}
        thing = model_version(self.name, **(source | spec))
        return self._rest.call("POST", self._list(), thing).accepted()

    def patch(self, **spec: Any) -> None:
        self._rest.call("PATCH", f"{self._list()}/{self.name}", {"spec": spec}, content=MERGE).accepted()

    def mark(self, **metadata: dict[str, str]) -> None:
        """Set labels and annotations."""
        self._rest.call("PATCH", f"{self._list()}/{self.name}", {"metadata": metadata}, content=MERGE).accepted()

    def generation(self) -> int:
        return int(self.object()["metadata"]["generation"])

    def bump(self, version: VersionRef, *, pin: str | None = None) -> None:
        self.patch(version=version.version, source={"uri": version.uri, "digest": pin})

    def delete(self) -> None:
        self._rest.call("DELETE", f"{self._list()}/{self.name}").accepted()

    # Its adapters

    def create_adapter(self, name: str, *sources: dict[str, Any], **spec: Any) -> None:
        wanted = {"adapterName": name, "modelRef": {"name": self.name}, "sources": list(sources)}
        self._rest.call("POST", self._adapters(), lora_adapter(f"{self.name}-{name}", **(wanted | spec))).accepted()

    def patch_adapter(self, name: str, **spec: Any) -> None:
        self._rest.call("PATCH", f"{self._adapters()}/{self.name}-{name}", {"spec": spec}, content=MERGE).accepted()

    def mark_adapter(self, name: str, **metadata: dict[str, str]) -> None:
        """Set labels and annotations of an adapter."""
        path = f"{self._adapters()}/{self.name}-{name}"
        self._rest.call("PATCH", path, {"metadata": metadata}, content=MERGE).accepted()

    def delete_adapter(self, name: str) -> None:
        self._rest.call("DELETE", f"{self._adapters()}/{self.name}-{name}").accepted()

    def adapter(self, name: str) -> dict[str, Any]:
        return self._rest.call("GET", f"{self._adapters()}/{self.name}-{name}").accepted()

    def adapters_say(self) -> dict[str, tuple[str, str]]:
        """Name → (status, reason) of the Ready conditions that speak of the present generation."""
        found = {}
        for thing in self._rest.call("GET", self._adapters()).accepted()["items"]:
            if thing["spec"]["modelRef"]["name"] == self.name:
                for item in thing.get("status", {}).get("conditions", []):
                    if item["type"] == "Ready" and item["observedGeneration"] == thing["metadata"]["generation"]:
                        found[thing["spec"]["adapterName"]] = (item["status"], item["reason"])
        return found

    def loaded(self) -> list[dict[str, str]]:
        """Of each pod: adapter → the end of its URI."""
        served = [p.sidecar.adapters.served if p.sidecar.adapters is not None else {} for p in self.pods]
        return [{name: source.uri.rpartition("/")[2] for name, source in sorted(pod.items())} for pod in served]

    # What is to be seen

    def object(self) -> dict[str, Any]:
        return self._rest.call("GET", f"{self._list()}/{self.name}").accepted()

    def condition(self, kind: str) -> tuple[str, str] | None:
        """Return (status, reason) of a condition that speaks of the present generation."""
        thing = self.object()
        for found in thing.get("status", {}).get("conditions", []):
            if found["type"] == kind and found["observedGeneration"] == thing["metadata"]["generation"]:
                return found["status"], found["reason"]
        return None

    def message(self) -> str:
        conditions = self.object()["status"]["conditions"]
        return str(next(c["message"] for c in conditions if c["type"] == "Ready"))

    def configmap(self) -> dict[str, Any]:
        """Return the ConfigMap of the assignment as it is stored."""
        return self._rest.call("GET", f"{self._core('configmaps')}/modelswap-{self.name}").accepted()

    def assignment(self) -> Assignment | None:
        answer = self._rest.call("GET", f"{self._core('configmaps')}/modelswap-{self.name}")
        return decode(answer.body["data"][ASSIGNMENT_KEY], Assignment) if answer.status == 200 else None

    def events(self) -> list[tuple[str, str]]:
        path = f"/apis/events.k8s.io/v1/namespaces/{self.namespace}/events"
        items = self._rest.call("GET", path).accepted()["items"]
        return [(e["reason"], e["note"]) for e in items if e["regarding"].get("name") == self.name]

    def serving(self) -> list[str]:
        return [p.sidecar.live.version if p.sidecar.live else "" for p in self.pods]

    async def ready_at(self, version: VersionRef) -> None:
        await eventually(lambda: self.condition("Ready") == ("True", "Succeeded"), what=self.story)
        assert self.serving() == [version.version] * len(self.pods)

    async def stalled(self, reason: str) -> None:
        await eventually(lambda: self.condition("Stalled") == ("True", reason), what=self.story)

    def story(self) -> str:
        status = self.object().get("status", {})
        lines = [f"{c['type']}={c['status']} {c['reason']}: {c['message']}" for c in status.get("conditions", [])]
        return "\n".join([*lines, f"pods serve {self.serving()}", f"events {self.events()}"])

    def _core(self, plural: str) -> str:
        return f"/api/v1/namespaces/{self.namespace}/{plural}"

    def _adapters(self) -> str:
        return f"/apis/{GROUP_VERSION}/namespaces/{self.namespace}/loraadapters"

    def _list(self) -> str:
        return f"/apis/{GROUP_VERSION}/namespaces/{self.namespace}/modelversions"


async def eventually(
    check: Callable[[], T], *, what: Callable[[], str] = lambda: "", seconds: float = PATIENCE_SECONDS
) -> T:
    """Return the first true answer of a check; fail with the story so far when there is none in time."""
    ends = time.monotonic() + seconds
    while not (found := check()):
        if time.monotonic() > ends:
            raise AssertionError(f"not within {seconds:.0f} s\n{what()}")
        await asyncio.sleep(0.05)
    return found
