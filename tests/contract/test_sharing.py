"""Pods of a slot that share what they fetched, over real sockets: what many cost the source, and who gives what."""

import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import pytest
import trustme

from modelswap_engine.checkpoint import manifest as manifests
from modelswap_engine.checkpoint.build import build_manifest
from modelswap_engine.checkpoint.manifest import MANIFEST_FILE
from modelswap_engine.http.tls import Certificate
from modelswap_engine.lora.config import parse_config
from modelswap_engine.lora.digest import adapter_digest
from modelswap_engine.protocol.messages import VersionRef
from modelswap_engine.protocol.states import SwapState
from modelswap_engine.sources.peers.choice import Peer
from modelswap_engine.sources.peers.client import Access
from modelswap_engine.sources.port import Identity
from tests.support.adapters import FIELDS, WEIGHTS, pair, write_adapter
from tests.support.checkpoints import Tensor, write_checkpoint
from tests.support.memory_places import MemoryPlaces
from tests.support.peer_pods import TOKEN, PeerPod, in_waves
from tests.support.pki import write_pair

PODS = 10
ADAPTER = "mem://bucket/adapters/a"
OLD, NEW = "mem://bucket/chat/1.0", "mem://bucket/chat/1.1"
BASE: dict[str, Tensor] = {
    f"model.layers.{number}.weight": ("U8", (16384,), random.Random(number).randbytes(16384)) for number in range(32)
}
CHANGED = BASE | {
    f"model.layers.{number}.weight": ("U8", (16384,), random.Random(100 + number).randbytes(16384))
    for number in range(1, 9)
}
CHANGED_BYTES = 8 * 16384


def publish(places: MemoryPlaces, folder: Path, uri: str, tensors: dict[str, Tensor], *, manifest: bool) -> VersionRef:
    built = build_manifest(write_checkpoint(folder, tensors))
    if manifest:
        (folder / MANIFEST_FILE).write_bytes(manifests.encode(built))
    places.upload(uri, folder)
    return VersionRef(version=uri[-3:], uri=uri, digest=built.digest)


@pytest.fixture
def places() -> MemoryPlaces:
    return MemoryPlaces(piece=65536)


@pytest.fixture
async def pods(tmp_path: Path, places: MemoryPlaces) -> AsyncIterator[list[PeerPod]]:
    addresses: list[Peer] = []
    async with AsyncExitStack() as stack:
        made = []
        for number in range(PODS):
            pod = PeerPod(tmp_path / f"pod-{number}", places, addresses, allow=["mem://bucket"])
            stack.push_async_callback(pod.coordinator.stop)
            addresses.append(Peer("127.0.0.1", await stack.enter_async_context(pod.listening())))
            made.append(pod)
        yield made


def egress(places: MemoryPlaces) -> int:
    """Bytes of tensors that the source gave."""
    return places.given.get("model.safetensors", 0)


@pytest.mark.parametrize("manifest", [True, False], ids=["manifest", "no manifest"])
async def test_ten_pods_cost_the_source_little_more_than_one(
    pods: list[PeerPod], places: MemoryPlaces, tmp_path: Path, manifest: bool
) -> None:
    old = publish(places, tmp_path / "old", OLD, BASE, manifest=manifest)
    new = publish(places, tmp_path / "new", NEW, CHANGED, manifest=manifest)
    await in_waves(pods, lambda pod: pod.coordinator.start(old, None))
    whole = sum(len(data) for _, _, data in BASE.values())
    assert whole <= egress(places) <= 1.3 * whole
    places.forget()
    statuses = []

    async def swap(pod: PeerPod) -> None:
        statuses.append(await pod.swap(new, revision=2))

    await in_waves(pods, swap)
    assert {status.state for status in statuses} == {SwapState.SERVING}
    assert all(pod.backend.live == {name: data for name, (_, _, data) in CHANGED.items()} for pod in pods)
    one = CHANGED_BYTES if manifest else whole  # without a manifest the first pod has to hash everything
    assert one <= egress(places) <= 1.3 * one
    assert sum(status.bytes_fetched for status in statuses) == (CHANGED_BYTES if manifest else 0)
    peers = sum(status.bytes_from_peers for status in statuses)
    assert peers == (PODS - 1) * CHANGED_BYTES
    given = [pod.given for pod in pods]
    assert sum(given) >= peers
    assert max(given[:3]) < sum(given) / 2, "load is spread"


async def hashed(pod: PeerPod, pinned: str = "") -> tuple[str, dict[str, bytes]]:
    """Have an adapter here, as what is assigned to a pod; return its digest, and what its tensors are."""
    opened = await pod.source.open_adapter(ADAPTER)
    known = Identity(of=partial(adapter_digest, parse_config(opened.config), opened.tensors), pinned=pinned)
    hashes = await opened.hash(known)
    places = {name: opened.range_of(entry, sha256=hashes[name]) for name, entry in opened.tensors.items()}
    return known.of(hashes), {name: Path(where.path).read_bytes() for name, where in places.items()}


LARGE = pair(rank=64, inputs=256, outputs=128)
LARGE_BYTES = sum(len(data) for _, _, data in LARGE.values())


async def test_an_adapter_without_a_manifest_is_fetched_once(
    pods: list[PeerPod], places: MemoryPlaces, tmp_path: Path
) -> None:
    places.upload(ADAPTER, write_adapter(tmp_path / "a", tensors=LARGE))
    digest, tensors = await hashed(pods[0])  # who looks it up; the operator pins what it finds
    assert tensors == {name: data for name, (_, _, data) in LARGE.items()}
    assert places.given[WEIGHTS] >= LARGE_BYTES
    places.forget()
    for pod in pods[1:4]:
        assert await hashed(pod, digest) == (digest, tensors)
    assert places.given[WEIGHTS] < LARGE_BYTES / 10, "headers alone"


async def test_a_pinned_adapter_that_is_here_already_is_asked_of_nobody(
    pods: list[PeerPod], places: MemoryPlaces, tmp_path: Path
) -> None:
    places.upload(ADAPTER, write_adapter(tmp_path / "a", tensors=LARGE))
    digest, tensors = await hashed(pods[0])
    places.forget()
    assert await hashed(pods[0], digest) == (digest, tensors)
    assert places.given[WEIGHTS] < LARGE_BYTES / 10, "headers alone"
    assert not any(pod.given for pod in pods)


async def test_where_the_source_holds_another_adapter_by_now_no_pod_is_blamed(
    pods: list[PeerPod], places: MemoryPlaces, tmp_path: Path
) -> None:
    places.upload(ADAPTER, write_adapter(tmp_path / "a", tensors=LARGE))
    digest, tensors = await hashed(pods[0])
    places.upload(ADAPTER, write_adapter(tmp_path / "b", tensors=LARGE, fields=FIELDS | {"lora_alpha": 1}))
    assert (await hashed(pods[1], digest))[0] != digest, "for whoever pinned it to refuse"
    places.upload(ADAPTER, tmp_path / "a")
    places.forget()
    assert await hashed(pods[1], digest) == (digest, tensors)
    assert places.given[WEIGHTS] < LARGE_BYTES / 10, "headers alone"


async def test_pods_share_over_tls(places: MemoryPlaces, tmp_path: Path) -> None:
    name, authority, addresses = "modelswap-control.team.svc", trustme.CA(), list[Peer]()
    files = write_pair(authority, tmp_path / "tls", name)
    authority.cert_pem.write_to_path(str(tmp_path / "ca.crt"))
    (tmp_path / "token").write_text(TOKEN)
    access = Access(token_file=tmp_path / "token", tls=True, ca_file=tmp_path / "ca.crt", server_name=name)
    context = Certificate(certificate=files.certificate, key=files.key).context
    version = publish(places, tmp_path / "old", OLD, BASE, manifest=True)
    async with AsyncExitStack() as stack:
        for number in range(2):
            pod = PeerPod(tmp_path / f"pod-{number}", places, addresses, allow=["mem://bucket"], access=access)
            addresses.append(Peer("127.0.0.1", await stack.enter_async_context(pod.listening(tls=context))))
            places.forget()
            await pod.fetch(version.uri)
    whole = sum(len(data) for _, _, data in BASE.values())
    assert egress(places) < whole / 10, "headers alone"
