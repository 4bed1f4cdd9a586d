"""Slots of simulated pods in a real API server: Pod objects, and for each a sidecar on a loopback address of its own.

A stand-in for what cannot exist here, a thousand nodes: there is no kubelet and no engine. The API server, its etcd and
the operator's process are real, and so are the control port's messages and its fencing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from modelswap_engine.protocol.messages import VersionRef
from modelswap_engine.protocol.version import PROTOCOL_VERSION
from tests.support.apiserver import ApiServer
from tests.support.custom import GROUP_VERSION, model_version
from tests.support.fake_sidecar import Content, FakeSidecar
from tests.support.rest import Rest

T = TypeVar("T")

MERGE: Final = "application/merge-patch+json"
PORT: Final = 8001
_CLIENTS: Final = 4


def ref(version: str) -> VersionRef:
    """Return a version whose digest follows from its label."""
    return VersionRef(
        version=version, uri=f"file:///models/{version}", digest=f"sha256:{version.replace('.', ''):0>64}"
    )


@dataclass(kw_only=True)
class SimulatedPod:
    """One pod and its sidecar."""

    name: str
    address: str
    sidecar: FakeSidecar

    @property
    def staged_ahead(self) -> bool:
        """Say whether it was asked to stage and to wait until it is told to go on."""
        return any(order.hold is not None for order in self.sidecar.swaps)


@dataclass(kw_only=True)
class SimulatedSlot:
    """One ModelVersion and its pods; ``first_call`` is when a sidecar was first asked to plan or swap."""

    name: str
    pods: list[SimulatedPod] = field(default_factory=list)
    first_call: float = 0.0


class World:
    """Slots in one namespace of a server."""

    def __init__(self, server: ApiServer, *, namespace: str, block: int) -> None:
        """``block`` is the second byte of the pods' addresses: 127.block.x.y."""
        self.namespace = namespace
        self.slots: list[SimulatedSlot] = []
        self._block = block
        self._clients = [Rest(server) for _ in range(_CLIENTS)]
        self._free = asyncio.Queue[Rest]()
        self._threads = ThreadPoolExecutor(max_workers=_CLIENTS)
        self._contents = {ref(v).uri: Content(ref(v).digest) for v in ("1.0", "1.1", "1.2")}
        for client in self._clients:
            self._free.put_nowait(client)

    async def call(self, method: str, path: str, body: Any = None, *, content: str = "application/json") -> Any:
        """Make one call to the API server, beside the loop that the sidecars answer in."""
        client = await self._free.get()
        try:
            work = asyncio.get_running_loop().run_in_executor(
                self._threads, lambda: client.call(method, path, body, content=content).accepted()
            )
            return await work
        finally:
            self._free.put_nowait(client)

    async def add_slots(self, count: int, *, pods: int, version: str, report: Callable[[str], None]) -> None:
        """Make pods that serve a version, and then the slots that say so."""
        made = [SimulatedSlot(name=f"slot-{number}") for number in range(count)]
        self.slots += made
        numbers = [(slot, number) for slot in made for number in range(pods)]
        for done, chunk in enumerate(_chunks(list(enumerate(numbers)), 250), start=1):
            await asyncio.gather(*(self._add_pod(slot, at, version) for at, (slot, _) in chunk))
            report(f"{min(250 * done, len(numbers))} of {len(numbers)} simulated pods")
        for names in _chunks(made, 100):
            await asyncio.gather(*(self._create(slot, version) for slot in names))

    async def _add_pod(self, slot: SimulatedSlot, number: int, version: str) -> None:
        address = f"127.{self._block}.{number // 250 + 1}.{number % 250 + 1}"
        sidecar = FakeSidecar(pod_uid="", contents=self._contents, live=ref(version), protocol=PROTOCOL_VERSION)
        sidecar.on_call = lambda call: _note(slot, call)
        await sidecar.start(address, PORT)
        name = f"{slot.name}-{number}"
        container = {"name": "engine", "image": "none", "ports": [{"name": "modelswap", "containerPort": PORT}]}
        body = {
            "metadata": {"name": name, "labels": {"modelswap.dev/slot": slot.name}},
            "spec": {"nodeName": "node-1", "containers": [container]},
        }
        pods = f"/api/v1/namespaces/{self.namespace}/pods"
        created = await self.call("POST", pods, body)
        sidecar.pod_uid = sidecar.audience = created["metadata"]["uid"]
        status = {
            "phase": "Running",
            "podIP": address,
            "podIPs": [{"ip": address}],
            "conditions": [{"type": "Ready", "status": "True"}],
        }
        await self.call("PATCH", f"{pods}/{name}/status", {"status": status}, content=MERGE)
        slot.pods.append(SimulatedPod(name=name, address=address, sidecar=sidecar))

    async def _create(self, slot: SimulatedSlot, version: str) -> None:
        thing = model_version(slot.name, **_spec(version), rollout={"maxUnavailable": "10%"})
        await self.call("POST", self._objects, thing)

    async def bump(self, slot: SimulatedSlot, version: str) -> None:
        """Have a slot serve another version."""
        slot.first_call = 0.0
        await self.call("PATCH", f"{self._objects}/{slot.name}", {"spec": _spec(version)}, content=MERGE)

    async def settled(self, version: str, *, seconds: float, report: Callable[[str], None]) -> bool:
        """Wait until every slot is Ready at its present generation and every sidecar serves a version."""
        ends, said = time.monotonic() + seconds, time.monotonic()
        digest, ready = ref(version).digest, 0
        while True:
            serving = sum(p.sidecar.live is not None and p.sidecar.live.digest == digest for p in self.pods)
            # The list is long; it is read when there is a chance.
            if serving == len(self.pods) and (ready := await self._ready()) == len(self.slots):
                return True
            if time.monotonic() - said > 10:
                said = time.monotonic()
                report(f"{serving} of {len(self.pods)} pods serve {version}")
            if time.monotonic() > ends:
                report(
                    f"given up after {seconds:.0f} s: {serving} of {len(self.pods)} pods serve {version}, {ready} Ready"
                )
                return False
            await asyncio.sleep(0.1)

    async def _ready(self) -> int:
        found = (await self.call("GET", self._objects))["items"]
        return sum(map(_is_ready, found))

    @property
    def pods(self) -> list[SimulatedPod]:
        """Return all pods."""
        return [pod for slot in self.slots for pod in slot.pods]

    @property
    def _objects(self) -> str:
        return f"/apis/{GROUP_VERSION}/namespaces/{self.namespace}/modelversions"

    async def close(self) -> None:
        """Stop the sidecars."""
        for chunk in _chunks(self.pods, 100):
            await asyncio.gather(*(pod.sidecar.stop() for pod in chunk))
        self._threads.shutdown()


def _note(slot: SimulatedSlot, call: str) -> None:
    if call in ("POST /plan", "POST /swaps") and not slot.first_call:
        slot.first_call = time.monotonic()


def _spec(version: str) -> dict[str, Any]:
    return {"version": version, "source": {"uri": ref(version).uri}}


def _is_ready(thing: dict[str, Any]) -> bool:
    status, generation = thing.get("status", {}), thing["metadata"]["generation"]
    ready = any(c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions", []))
    return ready and status.get("observedGeneration") == generation


def _chunks(items: Iterable[T], size: int) -> Iterable[list[T]]:
    chunk: list[T] = []
    for item in items:
        chunk.append(item)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
