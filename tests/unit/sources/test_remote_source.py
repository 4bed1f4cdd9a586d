"""Checkpoints that lie elsewhere: what travels, what is believed, what is kept. The place is in memory."""

import asyncio
import errno
import hashlib
import itertools
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from modelswap_engine.checkpoint import manifest as manifests
from modelswap_engine.checkpoint.build import build_manifest, hash_contents, with_hashes
from modelswap_engine.checkpoint.layout import SIGNATURE_FILE, Evidence
from modelswap_engine.checkpoint.manifest import MANIFEST_FILE, Manifest, Provenance
from modelswap_engine.protocol.errors import (
    InvalidCheckpoint,
    ManifestMismatch,
    ModelswapError,
    SourceChanged,
    SourceNotAllowed,
    SourceNotFound,
    SourceUnreadable,
    UnsupportedFormat,
)
from modelswap_engine.protocol.looking import SourceLook
from modelswap_engine.sources.adapter import read_adapter
from modelswap_engine.sources.allowed import Allowed
from modelswap_engine.sources.port import Brought, Identity, Mounted
from modelswap_engine.sources.remote.fetch import Fetcher, FetchSettings
from modelswap_engine.sources.remote.folders import Folders
from modelswap_engine.sources.remote.port import RETRY_AFTER
from modelswap_engine.sources.remote.records import Records
from modelswap_engine.sources.remote.sharing import Sink
from modelswap_engine.sources.remote.source import RemoteSource
from modelswap_engine.store.content import ContentStore
from modelswap_engine.store.incoming import Incoming
from tests.support.checkpoints import TENSORS, Tensor, write_checkpoint
from tests.support.memory_places import MemoryPlaces

URI = "mem://bucket/chat/1.0"
NEXT = "mem://bucket/chat/1.1"
MANY: dict[str, Tensor] = {
    f"model.layers.{number}.weight": ("U8", (64,), random.Random(number).randbytes(64)) for number in range(40)
}


class World:
    """One pod: its store and records outlive a restart."""

    def __init__(self, folder: Path, places: MemoryPlaces, *, limit: int = 0) -> None:
        self.folder, self.places, self.limit = folder, places, limit
        self.pauses: list[float] = []
        self.mounted: Mounted = tuple
        self.start()

    def start(self) -> None:
        self.store = ContentStore(self.folder / "store", limit_bytes=self.limit)
        self.store.open()

        async def sleep(seconds: float) -> None:
            self.pauses.append(seconds)

        self.source = RemoteSource(
            self.places,
            allowed=Allowed(["mem://bucket/chat", "mem://bucket/base"]),
            store=self.store,
            records=Records(self.folder / "sources"),
            fetcher=Fetcher(
                self.store, settings=FetchSettings(parallel=3, attempts=3), sleep=sleep, chance=lambda: 0.0
            ),
            mounted=self.mounted,
        )

    def holds(self, manifest: Manifest) -> bool:
        return all(
            hashlib.sha256(self.store.path(entry.sha256).read_bytes()).hexdigest() == entry.sha256
            for entry in manifest.tensors
        )


@pytest.fixture
def places() -> MemoryPlaces:
    return MemoryPlaces()


@pytest.fixture
def world(tmp_path: Path, places: MemoryPlaces) -> Iterator[World]:
    yield (made := World(tmp_path / "pod", places))
    assert made.places.opened == 0, "a folder was left open"


def publish(places: MemoryPlaces, folder: Path, uri: str, *, manifest: bool = True) -> Manifest:
    built = build_manifest(folder)
    if manifest:
        (folder / MANIFEST_FILE).write_bytes(manifests.encode(built))
    places.upload(uri, folder)
    return built


async def test_a_whole_version_comes_once(world: World, places: MemoryPlaces, tmp_path: Path) -> None:
    built = publish(places, write_checkpoint(tmp_path / "a", shards=2), URI)
    resolved = await world.source.resolve(URI)
    assert resolved.manifest.digest == built.digest
    told: list[Brought] = []
    assert await resolved.obtain([entry.name for entry in built.tensors], travelled=told.append) == Brought(
        source=built.total_bytes
    )
    assert told[-1] == Brought(source=built.total_bytes)
    assert world.holds(built)
    await resolved.copy_side_files(tmp_path / "side")
    assert (tmp_path / "side" / "config.json").read_bytes() == (tmp_path / "a" / "config.json").read_bytes()
    places.forget()
    assert await resolved.obtain([entry.name for entry in built.tensors]) == Brought()
    assert not places.asked


async def test_only_what_changed_travels(world: World, places: MemoryPlaces, tmp_path: Path) -> None:
    old = publish(places, write_checkpoint(tmp_path / "a", MANY), URI)
    await (await world.source.resolve(URI)).obtain(list(MANY))
    changed = {"model.layers.7.weight", "model.layers.8.weight", "model.layers.30.weight"}
    tensors = MANY | {name: ("U8", (64,), bytes(64)) for name in sorted(changed)[:1]}
    tensors |= dict.fromkeys(sorted(changed)[1:2], ("U8", (64,), b"\x01" * 64))
    tensors |= dict.fromkeys(sorted(changed)[2:], ("U8", (64,), b"\x02" * 64))
    new = publish(places, write_checkpoint(tmp_path / "b", tensors), NEXT)
    resolved = await world.source.resolve(NEXT)
    places.forget()
    assert await resolved.obtain([entry.name for entry in new.tensors]) == Brought(source=3 * 64)
    assert places.given == {"model.safetensors": 3 * 64}
    assert len(places.asked) == 2, "neighbours come with one request"
    assert world.holds(new)
    assert world.holds(old)


async def test_without_a_manifest_all_bytes_travel_once(world: World, places: MemoryPlaces, tmp_path: Path) -> None:
    built = publish(places, write_checkpoint(tmp_path / "a", MANY, shards=3), URI, manifest=False)
    resolved = await world.source.resolve(URI)
    assert resolved.manifest.digest == built.digest
    assert sum(places.given.values()) == built.total_bytes + resolved.header_bytes
    places.forget()
    assert await resolved.obtain(list(MANY)) == Brought()
    assert not places.asked
    again = await world.source.resolve(URI)
    assert again.manifest.digest == built.digest
    assert sum(places.given.values()) == again.header_bytes, "it is known by the revisions of its files"


async def test_without_revisions_bytes_are_hashed_anew(tmp_path: Path) -> None:
    places = MemoryPlaces(revisions=False)
    world = World(tmp_path / "pod", places)
    publish(places, write_checkpoint(tmp_path / "a"), URI, manifest=False)
    first = await world.source.resolve(URI)
    other = publish(
        places, write_checkpoint(tmp_path / "b", TENSORS | {"c.bias": ("I64", (), b"1" * 8)}), URI, manifest=False
    )
    second = await world.source.resolve(URI)
    assert (first.manifest.digest != second.manifest.digest, second.manifest.digest) == (True, other.digest)


async def test_a_pinned_version_that_is_here_needs_no_network(
    world: World, places: MemoryPlaces, tmp_path: Path
) -> None:
    built = publish(places, write_checkpoint(tmp_path / "a"), URI)
    await (await world.source.resolve(URI)).obtain([entry.name for entry in built.tensors])
    world.start()
    places.folders.clear()
    places.forget()
    resolved = await world.source.resolve(URI, digest=built.digest)
    assert resolved.header_bytes == 0
    assert await resolved.obtain([entry.name for entry in built.tensors]) == Brought()
    await resolved.copy_side_files(tmp_path / "side")
    assert resolved.range_of("a.weight").sha256 == built.by_name["a.weight"].sha256
    with pytest.raises(SourceNotFound):
        await world.source.resolve(URI, digest="sha256:" + "0" * 64)


async def test_what_vouches_for_a_version_is_handed_on_as_it_was_and_kept(
    world: World, places: MemoryPlaces, tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path / "a")
    built = publish(places, folder, URI)
    resolved = await world.source.resolve(URI)
    assert resolved.evidence is None
    # As a newer release would write it: unknown here, and part of what was signed.
    signed = (folder / MANIFEST_FILE).read_bytes().replace(b"{", b'{"later": 1,', 1)
    (folder / MANIFEST_FILE).write_bytes(signed)
    (folder / SIGNATURE_FILE).write_bytes(b"signature")
    places.upload(URI, folder)
    resolved = await world.source.resolve(URI)
    assert resolved.evidence == Evidence(signed, b"signature")
    assert resolved.manifest == built
    (folder / SIGNATURE_FILE).unlink()
    elsewhere = msgspec.structs.replace(built, provenance=Provenance(who="somebody else"))
    (folder / MANIFEST_FILE).write_bytes(manifests.encode(elsewhere))
    places.upload(NEXT, folder)
    assert (await world.source.resolve(NEXT)).manifest == elsewhere
    world.start()
    places.folders.clear()
    resolved = await world.source.resolve(URI, digest=built.digest)
    assert (resolved.header_bytes, resolved.evidence) == (0, Evidence(signed, b"signature"))
    assert resolved.manifest == built, "what the signature is of, not what another place says of the same content"


async def test_a_pinned_version_of_which_a_part_is_here_fetches_the_rest(
    world: World, places: MemoryPlaces, tmp_path: Path
) -> None:
    built = publish(places, write_checkpoint(tmp_path / "a", MANY), URI)
    await (await world.source.resolve(URI)).obtain(list(MANY)[:30])
    world.start()
    places.forget()
    resolved = await world.source.resolve(URI, digest=built.digest)
    assert await resolved.obtain(list(MANY)) == Brought(source=10 * 64)
    assert world.holds(built)


async def test_a_pinned_version_that_was_written_again_is_looked_at_again(
    world: World, places: MemoryPlaces, tmp_path: Path
) -> None:
    built = publish(places, write_checkpoint(tmp_path / "a", MANY), URI, manifest=False)
    await world.source.resolve(URI, digest=built.digest)
    lost = built.tensors[0].sha256
    world.store.path(lost).unlink()
    world.store.damaged([lost])
    file = places.folders[URI]["model.safetensors"]
    size = int.from_bytes(file[:8], "little")
    longer = (size + 8).to_bytes(8, "little") + file[8 : 8 + size] + b" " * 8 + file[8 + size :]
    places.folders[URI]["model.safetensors"] = longer  # the same tensors
    with pytest.raises(SourceChanged):
        await (await world.source.resolve(URI, digest=built.digest)).obtain(list(MANY))
    await (await world.source.resolve(URI, digest=built.digest)).obtain(list(MANY))
    assert world.holds(built)


async def test_the_same_content_in_other_files_is_read_where_it_lies(
    world: World, places: MemoryPlaces, tmp_path: Path
) -> None:
    first = publish(places, write_checkpoint(tmp_path / "a", MANY), URI)
    second = publish(places, write_checkpoint(tmp_path / "b", MANY, shards=3), NEXT)
    assert first.digest == second.digest
    for uri in (URI, NEXT):
        await world.source.resolve(uri)
    world.start()
    for uri, file in ((URI, "model.safetensors"), (NEXT, "model-00001-of-00003.safetensors")):
        resolved = await world.source.resolve(uri, digest=first.digest)
        places.forget()
        entries = [e for e in resolved.manifest.tensors if e.file == file and world.store.missing([e.sha256])]
        name = entries[0].name
        await resolved.obtain([name])
        assert set(places.given) == {file}


async def test_credentials_are_handed_on_and_stay_with_the_version(
    world: World, places: MemoryPlaces, tmp_path: Path
) -> None:
    publish(places, write_checkpoint(tmp_path / "a"), URI)
    resolved = await world.source.resolve(URI, credentials="team")
    assert (places.credentials, resolved.credentials) == ("team", "team")


# What breaks.


async def test_what_breaks_off_goes_on_where_it_stopped(world: World, places: MemoryPlaces, tmp_path: Path) -> None:
    built = publish(places, write_checkpoint(tmp_path / "a", MANY), URI)
    resolved = await world.source.resolve(URI)
    broken: set[int] = set()

    def fault(name: str, at: int, stop: int) -> ModelswapError | None:
        if at not in broken and len(broken) < 20:
            broken.add(at)
            return SourceUnreadable("reset") if len(broken) % 3 == 0 else None
        return None

    places.faults.append(fault)
    places.forget()
    assert await resolved.obtain(list(MANY)) == Brought(source=built.total_bytes)
    assert world.holds(built)
    assert world.pauses
    assert sum(places.given.values()) == built.total_bytes, "no byte came twice"


async def test_it_gives_up_after_attempts_without_a_byte(world: World, places: MemoryPlaces, tmp_path: Path) -> None:
    built = publish(places, write_checkpoint(tmp_path / "a", MANY), URI)
    resolved = await world.source.resolve(URI)
    places.faults.append(lambda name, at, stop: SourceUnreadable("503"))
    with pytest.raises(SourceUnreadable) as failed:
        await resolved.obtain(list(MANY))
    assert failed.value.details.keys() >= {"file", "tensor", "range"}
    assert world.pauses[:2] == [0.25, 0.5]
    places.faults.clear()
    assert await resolved.obtain(list(MANY)) == Brought(source=built.total_bytes), "nothing is left over of the attempt"


async def test_what_changed_half_way_is_said_and_nothing_of_it_is_believed(
    world: World, places: MemoryPlaces, tmp_path: Path
) -> None:
    publish(places, write_checkpoint(tmp_path / "a", MANY), URI)
    resolved = await world.source.resolve(URI)
    other = MANY | {"model.layers.0.weight": ("U8", (64,), bytes(64))}

    def overwrite(name: str, at: int, stop: int) -> None:
        if at > 700:
            places.upload(URI, write_checkpoint(tmp_path / "b", other))

    places.faults.append(overwrite)
    with pytest.raises(SourceChanged):
        await resolved.obtain(list(MANY))


async def test_wrong_bytes_are_asked_for_again_and_then_refused(
    world: World, places: MemoryPlaces, tmp_path: Path
) -> None:
    places.revisions = False  # or the revision would tell
    built = publish(places, write_checkpoint(tmp_path / "a", MANY), URI)
    resolved = await world.source.resolve(URI)
    file = bytearray(places.folders[URI]["model.safetensors"])
    entry = built.by_name["model.layers.3.weight"]
    file[entry.offset] ^= 1
    places.folders[URI]["model.safetensors"] = bytes(file)
    places.forget()
    with pytest.raises(ManifestMismatch) as refused:
        await resolved.obtain(list(MANY))
    assert refused.value.details["tensor"] == "model.layers.3.weight"
    assert f"bytes {entry.offset} to {entry.offset + 64}" in refused.value.message
    assert sum(places.given.values()) == built.total_bytes + 64, "once more, and only that tensor"
    assert world.store.missing([entry.sha256])


async def test_damage_in_the_store_is_found_when_it_is_suspected(
    world: World, places: MemoryPlaces, tmp_path: Path
) -> None:
    built = publish(places, write_checkpoint(tmp_path / "a"), URI)
    resolved = await world.source.resolve(URI)
    await resolved.obtain([entry.name for entry in built.tensors])
    path = Path(resolved.range_of("a.weight").path)
    path.chmod(0o600)
    path.write_bytes(bytes(12))
    await resolved.unchanged()
    with pytest.raises(SourceChanged, match="damaged"):
        await resolved.unchanged(suspected=True)
    assert await resolved.obtain([entry.name for entry in built.tensors]) == Brought(source=12)
    assert world.holds(built)


async def test_a_manifest_that_is_wrong_about_a_blob_is_named_and_costs_no_blob(
    world: World, places: MemoryPlaces, tmp_path: Path
) -> None:
    built = publish(places, write_checkpoint(tmp_path / "a"), URI)
    await (await world.source.resolve(URI)).obtain([entry.name for entry in built.tensors])
    lying = write_checkpoint(tmp_path / "b", {"a.weight": ("U8", (7,), b"another")})
    (entry,) = build_manifest(lying).tensors
    wrong = msgspec.structs.replace(entry, sha256=built.by_name["a.weight"].sha256)
    shipped = msgspec.structs.replace(build_manifest(lying), tensors=(wrong,))
    (lying / MANIFEST_FILE).write_bytes(manifests.encode(shipped))
    places.upload(NEXT, lying)
    with pytest.raises(ManifestMismatch, match=r"a\.weight.*another size") as refused:
        await (await world.source.resolve(NEXT)).obtain(["a.weight"])
    assert refused.value.details["file"] == MANIFEST_FILE
    assert world.holds(built)


# What is refused.


async def test_places_outside_the_prefixes_are_not_asked(world: World, places: MemoryPlaces, tmp_path: Path) -> None:
    places.upload("mem://bucket/private", write_checkpoint(tmp_path / "a"))
    with pytest.raises(SourceNotAllowed):
        await world.source.resolve("mem://bucket/private")
    assert not places.asked


async def test_an_empty_folder_is_no_checkpoint(world: World, places: MemoryPlaces) -> None:
    places.folders[URI] = {}
    with pytest.raises(SourceNotFound, match="no checkpoint"):
        await world.source.resolve(URI)


async def test_a_missing_shard_is_named(world: World, places: MemoryPlaces, tmp_path: Path) -> None:
    places.upload(URI, write_checkpoint(tmp_path / "a", shards=2))
    del places.folders[URI]["model-00002-of-00002.safetensors"]
    with pytest.raises(InvalidCheckpoint, match="model-00002-of-00002"):
        await world.source.resolve(URI)


async def test_a_folder_without_weights_says_what_it_needs(world: World, places: MemoryPlaces, tmp_path: Path) -> None:
    places.upload(URI, write_checkpoint(tmp_path / "a"))
    del places.folders[URI]["model.safetensors"]
    with pytest.raises(UnsupportedFormat) as refused:
        await world.source.resolve(URI)
    assert "model.safetensors" in refused.value.advice


async def test_a_manifest_that_does_not_fit_the_headers_is_refused(
    world: World, places: MemoryPlaces, tmp_path: Path
) -> None:
    publish(places, write_checkpoint(tmp_path / "a"), URI)
    other = write_checkpoint(tmp_path / "b", TENSORS | {"a.weight": ("F16", (2, 3), bytes(range(12)))})
    places.folders[URI]["model.safetensors"] = (other / "model.safetensors").read_bytes()
    with pytest.raises(ManifestMismatch, match=r"a\.weight"):
        await world.source.resolve(URI)


# A version that was published as what is new in it.


def based(whole: Manifest, part: Manifest, base: Manifest, *, place: str) -> Manifest:
    """Return the manifest of a version whose new tensors are in one folder, and the others in that of its base."""
    elsewhere = {entry.name: msgspec.structs.replace(entry, place=place) for entry in base.tensors}
    return msgspec.structs.replace(
        whole, tensors=tuple(part.by_name.get(entry.name) or elsewhere[entry.name] for entry in whole.tensors)
    )


async def test_unchanged_tensors_come_from_the_folder_of_the_base(
    world: World, places: MemoryPlaces, tmp_path: Path
) -> None:
    base = "mem://bucket/base/1.0"
    publish(places, write_checkpoint(tmp_path / "base", MANY), base)
    tensors = MANY | {"model.layers.5.weight": ("U8", (64,), b"n" * 64)}
    whole = build_manifest(write_checkpoint(tmp_path / "whole", tensors))
    part = write_checkpoint(tmp_path / "part", {"model.layers.5.weight": tensors["model.layers.5.weight"]})
    built = based(whole, build_manifest(part), build_manifest(tmp_path / "base"), place=base)
    (part / MANIFEST_FILE).write_bytes(manifests.encode(built))
    places.upload(NEXT, part)
    resolved = await world.source.resolve(NEXT)
    assert resolved.manifest.digest == whole.digest
    await resolved.obtain(list(MANY))
    assert world.holds(whole)


async def test_the_folder_of_the_base_must_be_allowed_too(world: World, places: MemoryPlaces, tmp_path: Path) -> None:
    base = "mem://bucket/private"
    publish(places, write_checkpoint(tmp_path / "base"), base)
    part = write_checkpoint(tmp_path / "part", {"c.bias": ("I64", (), b"1" * 8)})
    whole = build_manifest(write_checkpoint(tmp_path / "whole", TENSORS | {"c.bias": ("I64", (), b"1" * 8)}))
    built = based(whole, build_manifest(part), build_manifest(tmp_path / "base"), place=base)
    (part / MANIFEST_FILE).write_bytes(manifests.encode(built))
    places.upload(NEXT, part)
    with pytest.raises(SourceNotAllowed):
        await world.source.resolve(NEXT)


# What is kept.


async def test_versions_in_use_are_never_evicted(tmp_path: Path, places: MemoryPlaces) -> None:
    world = World(tmp_path / "pod", places, limit=2 * 40 * 64)
    versions = []
    for number in range(3):
        tensors = {name: ("U8", (64,), bytes([number, index, *range(62)])) for index, name in enumerate(MANY)}
        uri = f"mem://bucket/chat/{number}"
        versions.append((uri, publish(places, write_checkpoint(tmp_path / str(number), tensors, side_files={}), uri)))
    for uri, _built in versions:
        resolved = await world.source.resolve(uri)
        await resolved.obtain(list(MANY))
        await world.source.retain({versions[0][1].digest})
    assert world.holds(versions[0][1])
    assert world.holds(versions[2][1])
    assert len(world.store.missing(entry.sha256 for entry in versions[1][1].tensors)) == 40


async def test_an_adapter_is_fetched_and_hashed(world: World, places: MemoryPlaces, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "a", side_files={"adapter_config.json": b"{}"})
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    places.upload(URI, folder)
    opened = await world.source.open_adapter(URI, credentials="adapters")
    assert (opened.config, places.credentials) == (b"{}", "adapters")
    hashes = await opened.hash()
    assert hashes == {name: hashlib.sha256(data).hexdigest() for name, (_, _, data) in TENSORS.items()}
    found = opened.range_of(opened.tensors["a.weight"], sha256=hashes["a.weight"])
    assert Path(found.path).read_bytes() == TENSORS["a.weight"][2]
    assert (await world.source.open_adapter(URI)).revision == opened.revision != ""
    (folder / "adapter_config.json").write_bytes(b"{ }")
    places.upload(URI, folder)
    assert (await world.source.open_adapter(URI)).revision != opened.revision


def adapter(folder: Path, places: MemoryPlaces) -> dict[str, str]:
    """Publish an adapter with its manifest; return name → sha256 of its tensors."""
    write_checkpoint(folder, side_files={"adapter_config.json": b"{}"})
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    built = hash_contents(read_adapter(folder, roots=[folder]), roots=[folder])
    (folder / MANIFEST_FILE).write_bytes(manifests.encode(built))
    places.upload(URI, folder)
    return {entry.name: entry.sha256 for entry in built.tensors}


async def test_an_adapter_s_manifest_and_signature_come_along_where_both_are_there(
    world: World, places: MemoryPlaces, tmp_path: Path
) -> None:
    adapter(tmp_path / "a", places)
    assert (await world.source.open_adapter(URI)).evidence is None
    (tmp_path / "a" / SIGNATURE_FILE).write_bytes(b"a signature")
    places.upload(URI, tmp_path / "a")
    manifest = (tmp_path / "a" / MANIFEST_FILE).read_bytes()
    assert (await world.source.open_adapter(URI)).evidence == Evidence(manifest, b"a signature")


async def test_an_adapter_with_a_manifest_is_taken_from_the_store_and_only_what_was_damaged_comes_again(
    world: World, places: MemoryPlaces, tmp_path: Path
) -> None:
    hashes = adapter(tmp_path / "a", places)
    assert await (await world.source.open_adapter(URI)).hash() == hashes
    world.start()
    opened = await world.source.open_adapter(URI)
    places.forget()
    assert await opened.hash() == hashes
    assert places.asked == []
    blob = world.store.path(hashes["a.weight"])
    blob.chmod(0o644)
    blob.write_bytes(b"?" * blob.stat().st_size)
    assert await opened.hash() == hashes
    assert hashlib.sha256(blob.read_bytes()).hexdigest() == hashes["a.weight"]
    assert sum(places.given.values()) == blob.stat().st_size


class Giving:
    """Another pod that has some blobs, one of them wrong."""

    def __init__(self, blobs: dict[str, bytes]) -> None:
        self.blobs = blobs

    async def bring(self, wanted: Sequence[tuple[str, int]], sink: Sink) -> None:
        for sha256, _ in wanted:
            if sha256 in self.blobs:
                await sink.write(sha256, 0, self.blobs[sha256])
                if not await sink.finish(sha256):
                    sink.again(sha256)

    async def manifest(self, digest: str, *, prove: object) -> None:
        raise AssertionError("nobody asks for the manifest of an adapter that has one")


async def test_an_adapter_with_a_manifest_is_taken_from_other_pods_before_the_source(
    world: World, places: MemoryPlaces, tmp_path: Path
) -> None:
    hashes = adapter(tmp_path / "a", places)
    blobs = {hashes[name]: data for name, (_, _, data) in TENSORS.items() if data}
    wrong = hashes["a.weight"]
    blobs[wrong] = b"x" * len(blobs[wrong])
    source = RemoteSource(
        places,
        allowed=Allowed(["mem://bucket/chat"]),
        store=world.store,
        records=Records(tmp_path / "records"),
        fetcher=Fetcher(world.store),
        sharing=Giving(blobs),
    )
    opened = await source.open_adapter(URI)
    places.forget()
    assert await opened.hash() == hashes
    assert sum(places.given.values()) == len(blobs[wrong]), "the source gave what the other pod had wrong"


class Claiming:
    """Another pod that says what the tensors of an adapter are."""

    def __init__(self, *manifests: bytes) -> None:
        self.manifests = manifests
        self.proved: list[dict[str, str] | None] = []

    async def bring(self, wanted: Sequence[tuple[str, int]], sink: Sink) -> None:
        """Bring nothing."""

    async def manifest(self, digest: str, *, prove: Callable[[bytes], dict[str, str] | None]) -> dict[str, str] | None:
        self.proved = [prove(data) for data in self.manifests]
        return next((found for found in self.proved if found is not None), None)


async def test_what_another_pod_says_of_a_pinned_adapter_is_proved_by_the_digest(
    world: World, places: MemoryPlaces, tmp_path: Path
) -> None:
    hashes = adapter(tmp_path / "a", places)
    manifest = places.folders[URI].pop(MANIFEST_FILE)
    identity = Identity(of=lambda found: "sha256:" + hashlib.sha256(repr(found).encode()).hexdigest())
    identity = msgspec.structs.replace(identity, pinned=identity.of(hashes))
    wrong = manifests.encode(
        with_hashes(read_adapter(tmp_path / "a", roots=[tmp_path]), dict.fromkeys(hashes, "0" * 64))
    )
    pod = Claiming(wrong, b"{", manifest)
    source = RemoteSource(
        places,
        allowed=Allowed(["mem://bucket/chat"]),
        store=world.store,
        records=Records(tmp_path / "records"),
        fetcher=Fetcher(world.store),
        sharing=pod,  # type: ignore[arg-type]
    )
    assert await (await source.open_adapter(URI)).hash(identity) == hashes
    assert pod.proved == [None, None, hashes]


async def test_a_manifest_of_another_adapter_is_refused(world: World, places: MemoryPlaces, tmp_path: Path) -> None:
    adapter(tmp_path / "a", places)
    places.folders[URI]["adapter_config.json"] = b'{"r": 4}'
    opened = await world.source.open_adapter(URI)
    with pytest.raises(ManifestMismatch, match=r"adapter_config\.json"):
        await opened.hash()


async def test_an_adapter_that_is_none_says_what_is_missing(world: World, places: MemoryPlaces, tmp_path: Path) -> None:
    places.upload(URI, write_checkpoint(tmp_path / "a"))
    with pytest.raises(UnsupportedFormat, match=r"adapter_config\.json"):
        await world.source.open_adapter(URI)


# What a review has found.


async def test_a_disk_that_fails_is_no_fault_of_the_version(
    world: World, places: MemoryPlaces, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = publish(places, write_checkpoint(tmp_path / "a", MANY), URI)
    resolved = await world.source.resolve(URI)
    write, calls = os.pwrite, itertools.count(1)

    def failing(fd: int, data: memoryview, at: int) -> int:
        if next(calls) == 3:
            raise OSError(errno.EIO, "I/O error")
        return write(fd, data, at)

    monkeypatch.setattr(os, "pwrite", failing)
    places.piece = 1000
    with pytest.raises(SourceUnreadable, match="I/O error"):
        await resolved.obtain(list(MANY))
    await resolved.obtain(list(MANY))
    assert world.holds(built)


async def test_room_that_is_made_for_who_has_gone_is_given_back(
    world: World, places: MemoryPlaces, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(places, write_checkpoint(tmp_path / "a", MANY), URI)
    resolved = await world.source.resolve(URI)
    begun, go_on = threading.Event(), threading.Event()
    expect = world.store.expect

    def slow(blobs: Sequence[tuple[str, int]]) -> list[Incoming]:
        begun.set()
        go_on.wait(10)
        return expect(blobs)

    monkeypatch.setattr(world.store, "expect", slow)
    task = asyncio.create_task(resolved.obtain(list(MANY)))
    await asyncio.to_thread(begun.wait, 10)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    go_on.set()
    async with asyncio.timeout(10):
        while next(world.store._names) == 1 or world.store._coming:  # the thread says so in no other way
            await asyncio.sleep(0.01)


async def test_two_that_want_one_version_fetch_it_once(world: World, places: MemoryPlaces, tmp_path: Path) -> None:
    built = publish(places, write_checkpoint(tmp_path / "a", MANY), URI)
    first, second = [await world.source.resolve(URI) for _ in range(2)]
    places.forget()
    brought = await asyncio.gather(first.obtain(list(MANY)), second.obtain(list(MANY)))
    assert sum(item.source for item in brought) == built.total_bytes
    assert sum(places.given.values()) == built.total_bytes


async def test_a_blob_that_is_gone_is_fetched_again(world: World, places: MemoryPlaces, tmp_path: Path) -> None:
    built = publish(places, write_checkpoint(tmp_path / "a", MANY), URI)
    resolved = await world.source.resolve(URI)
    await resolved.obtain(list(MANY))
    world.store.path(built.tensors[3].sha256).unlink()
    assert (await resolved.obtain(list(MANY))).source == 64
    assert world.holds(built)


async def test_the_last_adapters_are_kept_and_no_more(
    world: World, places: MemoryPlaces, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("modelswap_engine.sources.remote.source.ADAPTERS_HELD", 2)
    for number in range(4):
        folder = write_checkpoint(
            tmp_path / str(number), {"a": ("U8", (4,), bytes([number] * 4))}, side_files={"adapter_config.json": b"{}"}
        )
        (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
        opened = await world.source.open_adapter(places.upload(f"mem://bucket/chat/{number}", folder))
        await opened.hash()
    assert len(world.store.holders()) == 2


async def test_credentials_go_to_no_other_server(tmp_path: Path, places: MemoryPlaces) -> None:
    allowed = Allowed(["mem://corp", "mem://vendor"], credentials=[("theirs", "mem://vendor")])
    places.folders = {"mem://corp/m": {}, "mem://corp/base": {}, "mem://vendor/base": {}}
    folders = Folders(places, "mem://corp/m", credentials="ours", allowed=allowed)
    seen = []
    for place in ("", "mem://corp/base", "mem://vendor/base"):
        await folders(place)
        seen.append(places.credentials)
    assert seen == ["ours", "ours", "theirs"]


async def test_a_place_that_asks_for_a_long_pause_is_left_alone(
    world: World, places: MemoryPlaces, tmp_path: Path
) -> None:
    publish(places, write_checkpoint(tmp_path / "a", MANY), URI)
    resolved = await world.source.resolve(URI)
    places.faults.append(lambda name, at, stop: SourceUnreadable("429", details={RETRY_AFTER: "300"}))
    with pytest.raises(SourceUnreadable, match="429"):
        await resolved.obtain(list(MANY))
    assert not world.pauses


@pytest.mark.parametrize("shipped", [True, False])
async def test_another_content_under_the_name_is_seen_without_reading_tensors(
    shipped: bool, world: World, places: MemoryPlaces, tmp_path: Path
) -> None:
    publish(places, write_checkpoint(tmp_path / "a", shards=2), URI, manifest=shipped)
    resolved = await world.source.resolve(URI)
    old = dict(places.folders[URI])
    places.forget()
    assert (await resolved.moved()).found == ""
    assert not places.asked
    changed = {name: (kind, shape, bytes(len(data))) for name, (kind, shape, data) in TENSORS.items()}
    new = publish(places, write_checkpoint(tmp_path / "b", changed, shards=2), URI, manifest=shipped)
    expected = "other files (model-00001-of-00002.safetensors, model-00002-of-00002.safetensors)"
    assert (await resolved.moved()).found == (new.digest if shipped else expected)
    assert {name for _, name, _, _ in places.asked} == ({MANIFEST_FILE} if shipped else set())
    since = await World(tmp_path / "other", places).source.resolve(URI)
    assert await since.moved() == SourceLook(revision=(await resolved.moved()).revision), "both name the same files"
    places.folders[URI] = old
    assert (await resolved.moved()).revision == (await since.moved()).revision != ""
    assert (await resolved.moved()).found == ""


async def test_a_manifest_decides_whether_the_content_is_another(
    world: World, places: MemoryPlaces, tmp_path: Path
) -> None:
    publish(places, write_checkpoint(tmp_path / "a"), URI)
    (folder := places.folders[URI])[SIGNATURE_FILE] = b"signature"
    resolved = await world.source.resolve(URI)
    folder[SIGNATURE_FILE] = b"by another key"
    assert (await resolved.moved()).found == "", "the same content, signed again"
    same = publish(places, write_checkpoint(tmp_path / "b", shards=2), URI)
    assert same.digest == resolved.manifest.digest
    assert (await resolved.moved()).found == "", "the same content in other files"
    places.folders[URI][MANIFEST_FILE] = b"{}"
    assert (await resolved.moved()).found == f"other files ({MANIFEST_FILE})"


async def test_what_is_not_there_is_no_other_content(world: World, places: MemoryPlaces, tmp_path: Path) -> None:
    publish(places, write_checkpoint(tmp_path / "a", shards=2), URI)
    resolved = await world.source.resolve(URI)
    del places.folders[URI]["model-00002-of-00002.safetensors"]
    assert (await resolved.moved()).found == ""
    places.folders[URI] = {}
    with pytest.raises(SourceNotFound, match="nothing of it is there"):
        await resolved.moved()
