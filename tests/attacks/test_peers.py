"""Whatever a pod that passes for a peer does: right bytes, from the source if need be, in time; no token given away."""

import asyncio
import gzip
import hashlib
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import trustme
from aiohttp import web

from modelswap_engine.checkpoint import manifest as manifests
from modelswap_engine.checkpoint.build import build_manifest
from modelswap_engine.checkpoint.manifest import MANIFEST_FILE, Manifest
from modelswap_engine.http.app import listening
from modelswap_engine.protocol.blobs import BLOBS
from modelswap_engine.protocol.errors import DigestMismatch
from modelswap_engine.sources.peers.choice import Peer
from modelswap_engine.sources.peers.client import Access
from modelswap_engine.sources.peers.sharing import SharingSettings
from modelswap_engine.sources.port import Brought
from tests.support.checkpoints import TENSORS, write_checkpoint
from tests.support.memory_places import MemoryPlaces
from tests.support.peer_pods import TOKEN, PeerPod
from tests.support.pki import write_pair

URI, NAME = "mem://bucket/chat/1.0", "modelswap-control.team.svc"
QUICK = SharingSettings(ask_seconds=2.0, grace=0.3, slowest=1 << 30)
PACKED = gzip.compress(bytes(1 << 24))
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Impostor:
    """A server that says of everything that it has it, and answers blobs as a test says."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.heard: list[str] = []
        self.tokens: set[str | None] = set()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.heard.append(f"{request.method} {request.path}")
        self.tokens.add(request.headers.get("Authorization"))
        if request.path == f"{BLOBS}/held":
            return web.json_response(await request.json())
        return await self._answer(request)

    @asynccontextmanager
    async def listening(self, tls: ssl.SSLContext | None = None) -> AsyncIterator[Peer]:
        app = web.Application()
        app.router.add_route("*", "/{any:.*}", self.handle)
        async with listening(app, host="127.0.0.1", port=0, cancel_abandoned=True, tls=tls) as port:
            yield Peer("127.0.0.1", port)


@pytest.fixture
def places() -> MemoryPlaces:
    return MemoryPlaces()


@pytest.fixture
def built(places: MemoryPlaces, tmp_path: Path) -> Manifest:
    folder = write_checkpoint(tmp_path / "version")
    manifest = build_manifest(folder)
    (folder / MANIFEST_FILE).write_bytes(manifests.encode(manifest))
    places.upload(URI, folder)
    return manifest


SIZES = {hashlib.sha256(data).hexdigest(): len(data) for _, _, data in TENSORS.values()}


def size(request: web.Request) -> int:
    """Bytes of the blob that is asked for."""
    return SIZES[request.path.rpartition("/")[2]]


async def other_bytes(request: web.Request) -> web.StreamResponse:
    return web.Response(body=b"\xff" * size(request))


async def longer(request: web.Request) -> web.StreamResponse:
    return web.Response(body=bytes(1000 + size(request)))


async def endless(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(bytes(65536))


async def packed(request: web.Request) -> web.StreamResponse:
    return web.Response(body=PACKED, headers={"Content-Encoding": "gzip"})


async def drip(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Length": str(size(request))})
    await response.prepare(request)
    await response.write(b"\0")
    await asyncio.sleep(60)
    return response


async def silent(request: web.Request) -> web.StreamResponse:
    await asyncio.sleep(60)
    return web.Response()


async def elsewhere(request: web.Request) -> web.StreamResponse:
    raise web.HTTPFound(f"http://127.0.0.1:{request.url.port}/stolen")


async def broken(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def refusing(request: web.Request) -> web.StreamResponse:
    return web.json_response({}, status=401)


def holds(pod: PeerPod, manifest: Manifest) -> bool:
    return all(
        pod.store.path(entry.sha256).read_bytes() == TENSORS[entry.name][2] for entry in manifest.tensors
    ) and not pod.store.damaged([entry.sha256 for entry in manifest.tensors])


@pytest.mark.parametrize(
    "answer",
    [other_bytes, longer, endless, packed, drip, silent, elsewhere, broken, refusing],
    ids=lambda answer: answer.__name__,
)
async def test_right_bytes_come_from_the_source(
    places: MemoryPlaces, built: Manifest, tmp_path: Path, answer: Answer
) -> None:
    impostor = Impostor(answer)
    async with impostor.listening() as peer:
        pod = PeerPod(tmp_path / "pod", places, [peer], allow=["mem://bucket"], settings=QUICK)
        resolved = await pod.source.resolve(URI)
        async with asyncio.timeout(20):
            brought = await resolved.obtain([entry.name for entry in built.tensors])
        assert brought.source == built.total_bytes
        assert holds(pod, built)
        assert not any("/stolen" in line for line in impostor.heard)
        assert any("/blobs/sha256/" in line for line in impostor.heard), "it was not even asked"


async def test_who_lied_is_not_asked_again(places: MemoryPlaces, built: Manifest, tmp_path: Path) -> None:
    impostor = Impostor(other_bytes)
    async with impostor.listening() as peer:
        pod = PeerPod(tmp_path / "pod", places, [peer], allow=["mem://bucket"])
        resolved = await pod.source.resolve(URI)
        await resolved.obtain(["a.weight"])
        impostor.heard.clear()
        assert await resolved.obtain(["b.weight", "c.bias"]) == Brought(source=16)
        assert not impostor.heard


async def test_an_answer_about_what_it_has_is_bounded(places: MemoryPlaces, built: Manifest, tmp_path: Path) -> None:
    class Talker(Impostor):
        async def handle(self, request: web.Request) -> web.StreamResponse:
            self.heard.append(request.path)
            return await endless(request)

    talker = Talker(endless)
    async with talker.listening() as peer:
        pod = PeerPod(tmp_path / "pod", places, [peer], allow=["mem://bucket"])
        brought = await (await pod.source.resolve(URI)).obtain(["a.weight"])
        assert brought == Brought(source=12)
        assert talker.heard == [f"{BLOBS}/held"]


def without_manifest(places: MemoryPlaces) -> None:
    del places.folders[URI][MANIFEST_FILE]


def other_hashes(built: Manifest) -> bytes:
    tensors = tuple(msgspec.structs.replace(entry, sha256="0" * 64) for entry in built.tensors)
    return manifests.encode(msgspec.structs.replace(built, tensors=tensors))


def stated_digest(built: Manifest) -> bytes:
    document = json.loads(other_hashes(built))
    return json.dumps({**document, "digest": built.digest}).encode()


def other_side_file(built: Manifest) -> bytes:
    """The canonical hash, which makes the digest, is right; the bytes that it names are somebody's own."""
    side = tuple(msgspec.structs.replace(file, sha256="1" * 64, size=7) for file in built.side_files)
    return manifests.encode(msgspec.structs.replace(built, side_files=side))


def other_places(built: Manifest) -> bytes:
    tensors = tuple(
        msgspec.structs.replace(entry, place="mem://bucket/evil", file="x.safetensors", offset=7)
        for entry in built.tensors
    )
    return manifests.encode(msgspec.structs.replace(built, tensors=tensors))


@pytest.mark.parametrize(
    ("make", "believed"),
    [
        (other_hashes, False), (stated_digest, False), (lambda _: b"", False), (lambda _: b"{" * 100_000, False),
        (other_side_file, True), (other_places, True),
    ],
    ids=["hashes", "stated digest", "nothing", "deep", "side files", "places"],
)  # fmt: skip
async def test_of_a_manifest_only_hashes_that_give_the_digest_count(
    places: MemoryPlaces, built: Manifest, tmp_path: Path, make: Callable[[Manifest], bytes], believed: bool
) -> None:
    without_manifest(places)

    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(body=make(built)) if "/manifests/" in request.path else await refusing(request)

    impostor = Impostor(answer)
    async with impostor.listening() as peer:
        pod = PeerPod(tmp_path / "pod", places, [peer], allow=["mem://bucket"])
        resolved = await pod.source.resolve(URI, digest=built.digest)
        assert resolved.manifest == built, "where tensors lie and what side files are is what the source says"
        if not believed:
            impostor.heard.clear()
        await resolved.obtain([entry.name for entry in built.tensors])
        assert holds(pod, built)
        assert bool(impostor.heard) is believed, "who lied is not asked again"


@pytest.mark.parametrize("changed", ["headers", "values"])
async def test_a_source_that_moved_under_its_pin_is_named_and_no_peer_is_a_liar_for_it(
    places: MemoryPlaces, built: Manifest, tmp_path: Path, changed: str
) -> None:
    without_manifest(places)
    true = places.folders[URI]
    others = dict(TENSORS) if changed == "values" else {**TENSORS, "z.weight": TENSORS["a.weight"]}
    dtype, shape, data = others["a.weight"]
    others["a.weight"] = (dtype, shape, bytes(255 - byte for byte in data))
    names = [entry.name for entry in built.tensors]
    peers: list[Peer] = []
    honest = PeerPod(tmp_path / "honest", places, [], allow=["mem://bucket"])
    await honest.fetch(URI)
    pod = PeerPod(tmp_path / "pod", places, peers, allow=["mem://bucket"])
    async with honest.listening() as port:
        peers.append(Peer("127.0.0.1", port))
        places.upload(URI, write_checkpoint(tmp_path / "others", others))
        if changed == "values":  # which the source alone shows, where no pod has them
            honest.store.path(built.by_name["a.weight"].sha256).unlink()
            honest.store.damaged([built.by_name["a.weight"].sha256])
        with pytest.raises(DigestMismatch) as refused:
            await (await pod.source.resolve(URI, digest=built.digest)).obtain(names)
        assert f"{URI} does not hold {built.digest} any more" in refused.value.message
        places.folders[URI] = true
        places.forget()
        await (await pod.source.resolve(URI, digest=built.digest)).obtain(names)
        assert holds(pod, built)
        assert honest.given, "it is asked again"


async def test_without_a_pin_no_peer_is_asked_what_a_version_is(
    places: MemoryPlaces, built: Manifest, tmp_path: Path
) -> None:
    without_manifest(places)
    impostor = Impostor(refusing)
    async with impostor.listening() as peer:
        pod = PeerPod(tmp_path / "pod", places, [peer], allow=["mem://bucket"])
        assert (await pod.source.resolve(URI)).manifest.digest == built.digest
        assert not impostor.heard


async def test_no_token_goes_to_who_has_not_proved_the_name(
    places: MemoryPlaces, built: Manifest, tmp_path: Path
) -> None:
    authority, stranger = trustme.CA(), trustme.CA()
    ca = tmp_path / "ca.crt"
    ca.write_bytes(authority.cert_pem.bytes())
    token = tmp_path / "token"
    token.write_text(TOKEN)
    access = Access(token_file=token, tls=True, ca_file=ca, server_name=NAME)

    def context(issuer: trustme.CA, name: str) -> ssl.SSLContext:
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        made.load_cert_chain(*write_pair(issuer, tmp_path / name / str(id(issuer)), name))
        return made

    wrong = [context(stranger, NAME), context(authority, "modelswap-control.other.svc"), None]
    for number, tls in enumerate(wrong):
        impostor = Impostor(other_bytes)
        async with impostor.listening(tls) as peer:
            pod = PeerPod(tmp_path / f"pod-{number}", places, [peer], allow=["mem://bucket"], access=access)
            brought = await (await pod.source.resolve(URI)).obtain([entry.name for entry in built.tensors])
            assert brought.source == built.total_bytes
            assert not impostor.heard
    impostor = Impostor(other_bytes)
    async with impostor.listening(context(authority, NAME)) as peer:
        pod = PeerPod(tmp_path / "pod", places, [peer], allow=["mem://bucket"], access=access)
        await (await pod.source.resolve(URI)).obtain([entry.name for entry in built.tensors])
        assert impostor.tokens == {f"Bearer {TOKEN}"}


@pytest.mark.parametrize("missing", ["token", "ca.crt"])
async def test_without_a_token_or_an_authority_nobody_is_asked(
    places: MemoryPlaces, built: Manifest, tmp_path: Path, missing: str
) -> None:
    for name, content in (("token", TOKEN.encode()), ("ca.crt", trustme.CA().cert_pem.bytes())):
        if name != missing:
            (tmp_path / name).write_bytes(content)
    access = Access(token_file=tmp_path / "token", tls=True, ca_file=tmp_path / "ca.crt", server_name=NAME)
    impostor = Impostor(other_bytes)
    async with impostor.listening() as peer:
        pod = PeerPod(tmp_path / "pod", places, [peer], allow=["mem://bucket"], access=access)
        brought = await (await pod.source.resolve(URI)).obtain(["a.weight"])
        assert brought == Brought(source=12)
        assert not impostor.heard
