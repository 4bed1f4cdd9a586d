"""Versions in servers of objects, read through a proxy that counts and does wrong: the fault table."""

import hashlib
import itertools
import random
from pathlib import Path

import obstore
import pytest

from modelswap_engine.checkpoint import manifest as manifests
from modelswap_engine.checkpoint.build import build_manifest
from modelswap_engine.checkpoint.manifest import MANIFEST_FILE, Manifest
from modelswap_engine.protocol.errors import (
    CredentialsNotMounted,
    ManifestMismatch,
    ModelswapError,
    SourceChanged,
    SourceDenied,
    SourceNotFound,
    SourceUnreadable,
)
from modelswap_engine.sources.allowed import Allowed
from modelswap_engine.sources.credentials import Credentials
from modelswap_engine.sources.objects import ObjectSettings, ObjectStores
from modelswap_engine.sources.port import Brought
from modelswap_engine.sources.remote.fetch import Fetcher, FetchSettings
from modelswap_engine.sources.remote.records import Records
from modelswap_engine.sources.remote.source import RemoteSource
from modelswap_engine.store.content import ContentStore
from tests.support.checkpoints import Tensor, write_checkpoint
from tests.support.servers.faults import (
    Answer,
    Fault,
    Reset,
    Stalled,
    Truncated,
    WholeBody,
    WrongRange,
    forbidden,
    throttled,
)
from tests.support.servers.fixtures import Proxied, patience
from tests.support.servers.proxy import FaultProxy
from tests.support.servers.stores import EVERYWHERE, ObjectServer, direct
from tests.support.stores import on_the_way

pytestmark = [pytest.mark.sources, EVERYWHERE]

SIZE = 100_000
TENSORS: dict[str, Tensor] = {
    f"model.layers.{number}.weight": ("U8", (SIZE,), random.Random(number).randbytes(SIZE)) for number in range(20)
}
WEIGHTS = "model.safetensors"
_numbers = itertools.count(1)


class World:
    """A bucket, and a pod that reads from it through a proxy."""

    def __init__(self, server: ObjectServer, proxy: FaultProxy, folder: Path, *, stall: float) -> None:
        self.server, self.proxy, self.folder = server, proxy, folder
        self.bucket = server.bucket(f"models-{next(_numbers)}")
        self._direct = direct(server, self.bucket)
        self.credentials = folder / "credentials"
        self.mount()
        self.store = ContentStore(folder / "store")
        self.store.open()
        self.opener = ObjectStores(Credentials(self.credentials), settings=ObjectSettings(stall=stall, retries=1))

        async def at_once(seconds: float) -> None:
            """The test does not wait."""

        self.source = RemoteSource(
            self.opener,
            allowed=Allowed([self.uri("")], credentials=[("reader", self.uri(""))]),
            store=self.store,
            records=Records(folder / "records"),
            fetcher=Fetcher(self.store, settings=FetchSettings(parallel=2, attempts=2), sleep=at_once),
        )

    def uri(self, path: str) -> str:
        return f"{self.server.scheme}://{self.bucket}/{path}".rstrip("/")

    def mount(self, *, mistaken: bool = False) -> None:
        """Mount credentials, as the kubelet does for a Secret."""
        (self.credentials / "reader").mkdir(parents=True, exist_ok=True)
        for key, value in self.server.settings(self.proxy.url, mistaken=mistaken).items():
            (self.credentials / "reader" / key).write_text(value + "\n")

    def upload(self, version: str, tensors: dict[str, Tensor], *, manifest: bool = True) -> tuple[str, Manifest]:
        """Upload a version and return its URI."""
        folder = write_checkpoint(self.folder / "made" / version, tensors)
        built = build_manifest(folder)
        if manifest:
            (folder / MANIFEST_FILE).write_bytes(manifests.encode(built))
        for entry in folder.iterdir():
            obstore.put(self._direct, f"chat/{version}/{entry.name}", entry.read_bytes())
        return self.uri(f"chat/{version}"), built

    def overwrite(self, version: str, name: str, data: bytes) -> None:
        obstore.put(self._direct, f"chat/{version}/{name}", data)

    def holds(self, manifest: Manifest) -> bool:
        paths = {entry.sha256: self.store.path(entry.sha256) for entry in manifest.tensors}
        return all(hashlib.sha256(path.read_bytes()).hexdigest() == sha256 for sha256, path in paths.items())


@pytest.fixture
def world(object_server: ObjectServer, proxied: Proxied, tmp_path: Path, request: pytest.FixtureRequest) -> World:
    return World(object_server, proxied(object_server.url), tmp_path, stall=patience(request))


async def test_what_changed_travels_and_next_to_nothing_else(world: World) -> None:
    uri, old = world.upload("1.0", TENSORS)
    resolved = await world.source.resolve(uri)
    assert await resolved.obtain(list(TENSORS)) == Brought(source=old.total_bytes)
    changed = {name: ("U8", (SIZE,), random.Random(f"new {name}").randbytes(SIZE)) for name in list(TENSORS)[3:9:2]}
    uri, new = world.upload("1.1", TENSORS | changed)
    resolved = await world.source.resolve(uri)
    before = world.proxy.sent(WEIGHTS)
    assert resolved.manifest.digest == new.digest
    assert await resolved.obtain(list(TENSORS)) == Brought(source=3 * SIZE)
    assert world.proxy.sent(WEIGHTS) - before <= 1.02 * 3 * SIZE
    assert world.holds(new)
    assert world.holds(old)


async def test_without_a_manifest_it_is_hashed_once_and_known_by_its_tags(world: World) -> None:
    uri, built = world.upload("1.0", TENSORS, manifest=False)
    resolved = await world.source.resolve(uri)
    assert resolved.manifest.digest == built.digest
    assert world.holds(built)
    before = world.proxy.sent(WEIGHTS)
    again = await world.source.resolve(uri)
    assert again.manifest.digest == built.digest
    assert world.proxy.sent(WEIGHTS) - before < 5000, "headers alone"


PASSING: dict[str, Fault] = {
    "truncated": Truncated(after=60_000),
    "reset half way": Reset(after=60_000),
    "reset at once": Reset(),
    "stalled half way": Stalled(after=60_000),
    "stalled at once": Stalled(),
    "too many requests": throttled(429, retry_after="1"),
    "unavailable": throttled(503, retry_after="1"),
    "other bytes under the right range": WrongRange(admitted=False),
    "another range": WrongRange(),
    "the whole object": WholeBody(),
}


@pytest.mark.parametrize("fault", PASSING.values(), ids=PASSING)
async def test_what_passes_is_got_over(world: World, fault: Fault) -> None:
    uri, built = world.upload("1.0", TENSORS)
    resolved = await world.source.resolve(uri)
    world.proxy.inject(fault, path=WEIGHTS, times=1)
    await resolved.obtain(list(TENSORS))
    assert world.holds(built)


LASTING: dict[str, tuple[Fault, type[ModelswapError], str]] = {
    "truncated": (Truncated(after=0), SourceUnreadable, "broke off"),
    "reset": (Reset(), SourceUnreadable, "cannot be read"),
    "stalled": (Stalled(), SourceUnreadable, "cannot be read"),
    "unavailable": (throttled(503), SourceUnreadable, "503"),
    "too many requests": (throttled(429), SourceUnreadable, "429"),
    "another range": (WrongRange(), SourceUnreadable, "another range"),
    "the whole object": (WholeBody(), SourceUnreadable, "whole file"),
    "other bytes under the right range": (WrongRange(admitted=False), ManifestMismatch, "does not hash"),
    "forbidden": (forbidden(), SourceDenied, "credentials"),
    "replaced": (Answer(412), SourceChanged, "overwritten"),
    "removed": (Answer(404), SourceChanged, "not there any more"),
}


@pytest.mark.parametrize(("fault", "error", "text"), LASTING.values(), ids=LASTING)
async def test_what_lasts_is_told_and_nothing_of_it_is_seen(
    world: World, fault: Fault, error: type[ModelswapError], text: str
) -> None:
    uri, built = world.upload("1.0", TENSORS)
    resolved = await world.source.resolve(uri)
    world.proxy.inject(fault, path=WEIGHTS)
    with pytest.raises(error, match=text) as told:
        await resolved.obtain(list(TENSORS))
    body = told.value.body()
    assert body.advice
    assert body.details["file"] == WEIGHTS
    assert body.details["tensor"] in TENSORS
    assert world.server.secret not in str(body)
    assert world.proxy.url not in str(body)
    missing = world.store.missing(entry.sha256 for entry in built.tensors)
    present = [entry for entry in built.tensors if entry.sha256 not in missing]
    assert all(hashlib.sha256(world.store.path(e.sha256).read_bytes()).hexdigest() == e.sha256 for e in present)
    assert not on_the_way(world.folder / "store")


async def test_an_object_that_is_replaced_half_way_is_not_mixed(world: World) -> None:
    uri, _ = world.upload("1.0", TENSORS)
    resolved = await world.source.resolve(uri)
    world.proxy.inject(Truncated(after=60_000), path=WEIGHTS, times=2)
    other = write_checkpoint(world.folder / "other", TENSORS | {"model.layers.9.weight": ("U8", (SIZE,), bytes(SIZE))})
    world.overwrite("1.0", WEIGHTS, (other / WEIGHTS).read_bytes())
    with pytest.raises(SourceChanged, match="overwritten"):
        await resolved.obtain(list(TENSORS))
    with pytest.raises(ManifestMismatch):  # its manifest is still that of before
        await (await world.source.resolve(uri)).obtain(list(TENSORS))


async def test_a_wrong_key_is_denied_and_a_new_one_is_taken_without_a_restart(world: World) -> None:
    uri, built = world.upload("1.0", TENSORS)
    world.mount(mistaken=True)
    with pytest.raises(SourceDenied):
        await world.source.resolve(uri)
    world.mount()
    assert (await world.source.resolve(uri)).manifest.digest == built.digest


async def test_credentials_whose_time_is_over(world: World) -> None:
    uri, _ = world.upload("1.0", TENSORS)
    resolved = await world.source.resolve(uri)
    world.proxy.inject(world.server.expired, path=WEIGHTS)
    with pytest.raises(SourceDenied, match="credentials"):
        await resolved.obtain(list(TENSORS))


async def test_what_is_not_there_is_said(world: World) -> None:
    world.upload("1.0", TENSORS)
    with pytest.raises(SourceNotFound):
        await world.source.resolve(world.uri("chat/2.0"))
    nowhere = await world.opener.open(f"{world.server.scheme}://nowhere-{world.bucket}/chat", credentials="reader")
    with pytest.raises(SourceNotFound, match="no such bucket"):
        await nowhere.files([WEIGHTS])
    with pytest.raises(CredentialsNotMounted, match="other"):
        await world.source.resolve(world.uri("chat/1.0"), credentials="other")


async def test_who_may_not_list_can_still_read(world: World) -> None:
    uri, built = world.upload("1.0", TENSORS)
    world.proxy.inject(forbidden(), path=r"list-type=2|\?")
    resolved = await world.source.resolve(uri)
    assert resolved.manifest.digest == built.digest
    await resolved.obtain(list(TENSORS))
    uri, new = world.upload("1.1", TENSORS | {"model.layers.3.weight": ("U8", (SIZE,), bytes(SIZE))})
    # It holds a version, so it looks for a pack that it may not know of.
    await (await world.source.resolve(uri)).obtain(list(TENSORS))
    assert world.holds(new)
