"""Whole versions from real servers: what travels is counted where it leaves the server."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from modelswap_engine.checkpoint import manifest as manifests
from modelswap_engine.checkpoint.build import build_manifest
from modelswap_engine.checkpoint.manifest import MANIFEST_FILE, Manifest
from modelswap_engine.protocol.errors import ManifestMismatch
from modelswap_engine.sources.allowed import Allowed
from modelswap_engine.sources.remote.fetch import Fetcher
from modelswap_engine.sources.remote.records import Records
from modelswap_engine.sources.remote.source import RemoteSource
from modelswap_engine.store.content import ContentStore
from tests.support.checkpoints import Tensor, write_checkpoint
from tests.support.servers.faults import Truncated, WrongRange, throttled
from tests.support.servers.places import NAMED, HubPlace, Place

pytestmark = pytest.mark.sources

SIZE = 200_000
OLD: dict[str, Tensor] = {f"layers.{n}.weight": ("U8", (SIZE,), random.Random(n).randbytes(SIZE)) for n in range(12)}
WEIGHTS = r"safetensors|/blobs/|^/[0-9a-f]{64}"
CHANGED = {"layers.3.weight", "layers.4.weight", "layers.9.weight"}
NEW = {name: ("U8", (SIZE,), bytes(reversed(data[2]))) if name in CHANGED else data for name, data in OLD.items()}


async def publish(place: Place, folder: Path, tensors: dict[str, Tensor]) -> Manifest:
    write_checkpoint(folder, tensors, shards=2)
    built = build_manifest(folder)
    (folder / MANIFEST_FILE).write_bytes(manifests.encode(built))
    await place.upload({entry.name: entry.read_bytes() for entry in folder.iterdir()})
    return built


def source(place: Place, folder: Path) -> RemoteSource:
    store = ContentStore(folder / "store")
    store.open()
    fetcher = Fetcher(store, sleep=place.settings.sleep, chance=lambda: 0.0)
    allowed = Allowed([place.uri.rpartition("/")[0]], credentials=())
    return RemoteSource(
        place.opener, allowed=allowed, store=store, records=Records(folder / "sources"), fetcher=fetcher
    )


async def fetched(found: RemoteSource, place: Place) -> int:
    resolved = await found.resolve(place.uri, credentials=NAMED)
    return (await resolved.obtain([entry.name for entry in resolved.manifest.tensors])).source


async def test_only_what_changed_leaves_the_server(place: Place, tmp_path: Path) -> None:
    await publish(place, tmp_path / "old", OLD)
    pod = source(place, tmp_path / "pod")
    assert await fetched(pod, place) == len(OLD) * SIZE
    new = await publish(place, tmp_path / "new", NEW)
    resolved = await pod.resolve(place.uri, credentials=NAMED)
    assert resolved.manifest.digest == new.digest
    place.proxy.forget()
    assert (await resolved.obtain(list(NEW))).source == len(CHANGED) * SIZE
    assert place.proxy.sent() <= 1.02 * len(CHANGED) * SIZE


async def test_what_a_hub_keeps_in_xet_travels_by_ranges_too(hub_place: HubPlace, tmp_path: Path) -> None:
    """Its bridge names files by another hash; ours are of the bytes."""
    hub_place.hub.repository(hub_place.name).xet = True
    await publish(hub_place, tmp_path / "old", OLD)
    pod = source(hub_place, tmp_path / "pod")
    assert await fetched(pod, hub_place) == len(OLD) * SIZE
    new = await publish(hub_place, tmp_path / "new", NEW)
    resolved = await pod.resolve(hub_place.uri, credentials=NAMED)
    assert resolved.manifest.digest == new.digest
    hub_place.proxy.forget()
    assert (await resolved.obtain(list(NEW))).source == len(CHANGED) * SIZE
    assert hub_place.proxy.sent("/xet-bridge/") <= 1.02 * len(CHANGED) * SIZE
    assert hub_place.proxy.sent() == hub_place.proxy.sent("/xet-bridge/")


async def test_faults_on_the_way_cost_time_and_nothing_else(place: Place, tmp_path: Path) -> None:
    built = await publish(place, tmp_path / "old", OLD)
    place.proxy.inject(throttled(503), path=WEIGHTS, skip=2, times=1)
    place.proxy.inject(Truncated(after=50_000), path=WEIGHTS, skip=4, times=2)
    pod = source(place, tmp_path / "pod")
    assert await fetched(pod, place) == built.total_bytes


async def test_bytes_that_are_not_those_of_the_manifest(place: Place, tmp_path: Path) -> None:
    await publish(place, tmp_path / "old", OLD)
    pod = source(place, tmp_path / "pod")
    resolved = await pod.resolve(place.uri, credentials=NAMED)
    names = [entry.name for entry in resolved.manifest.tensors]
    place.proxy.inject(WrongRange(admitted=False), path=WEIGHTS, times=1)
    assert (await resolved.obtain(names)).source > len(OLD) * SIZE, "what is wrong once is asked for again"
    other = source(place, tmp_path / "other")
    resolved = await other.resolve(place.uri, credentials=NAMED)
    place.proxy.inject(WrongRange(admitted=False))
    with pytest.raises(ManifestMismatch, match="does not hash to") as caught:
        await resolved.obtain(names)
    assert caught.value.details["revision"]


async def test_another_version_under_the_same_name_is_seen_without_fetching_it(place: Place, tmp_path: Path) -> None:
    await publish(place, tmp_path / "old", OLD)
    resolved = await source(place, tmp_path / "pod").resolve(place.uri, credentials=NAMED)
    assert (await resolved.moved()).found == ""
    new = await publish(place, tmp_path / "new", NEW)
    place.proxy.forget()
    assert (await resolved.moved()).found == new.digest
    assert place.proxy.sent() < SIZE
    await publish(place, tmp_path / "old", OLD)
    assert (await resolved.moved()).found == "", "the old content is there again"
