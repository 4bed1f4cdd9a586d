"""The routes by which pods read of each other: what they give, to whom, and how much of it at once."""

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientPayloadError, ClientSession
from structlog.testing import capture_logs

from modelswap_engine.checkpoint import manifest as manifests
from modelswap_engine.checkpoint.build import build_manifest
from modelswap_engine.checkpoint.manifest import Manifest
from modelswap_engine.http.auth import Authenticator
from modelswap_engine.http.blobs import PIECE_BYTES, Bandwidth
from modelswap_engine.http.kubernetes_auth import Expected, KeySet, KubernetesAuthenticator, like
from modelswap_engine.protocol.blobs import BLOBS, MOST_HASHES
from modelswap_engine.sources.remote.records import Found
from tests.support.checkpoints import write_checkpoint
from tests.support.clock import ManualClock
from tests.support.memory_places import MemoryPlaces
from tests.support.peer_pods import CONTROL_TOKEN, TOKEN, PeerPod
from tests.support.tokens import ISSUER, NOW, POD_UID, SUBJECT, Signer, claims, key_set

BLOB = bytes(range(256)) * 8
HASH = hashlib.sha256(BLOB).hexdigest()
LARGE = bytes(3 * PIECE_BYTES)
LARGE_HASH = hashlib.sha256(LARGE).hexdigest()


@pytest.fixture
def pod(tmp_path: Path) -> PeerPod:
    made = PeerPod(tmp_path / "pod", MemoryPlaces(), [], allow=["mem://bucket"])
    for data in (BLOB, LARGE):
        made.store.put(hashlib.sha256(data).hexdigest(), data)
    return made


@asynccontextmanager
async def asking(port: int, token: str = TOKEN) -> AsyncIterator[ClientSession]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with ClientSession(f"http://127.0.0.1:{port}", headers=headers) as session:
        yield session


@pytest.fixture
async def peer(pod: PeerPod) -> AsyncIterator[ClientSession]:
    async with pod.listening() as port, asking(port) as session:
        yield session


RANGES: list[tuple[str, int, int]] = [
    ("bytes=0-", 0, 2048), ("bytes=0-0", 0, 1), ("bytes=100-199", 100, 200), ("bytes=2000-9999", 2000, 2048),
    ("bytes=-5", 2043, 2048), ("bytes=-9999", 0, 2048),
]  # fmt: skip


async def test_a_blob_comes_whole(pod: PeerPod, peer: ClientSession) -> None:
    async with peer.get(f"{BLOBS}/sha256/{HASH}") as response:
        assert (response.status, await response.read()) == (200, BLOB)
        assert response.headers["ETag"] == f'"{HASH}"'
        assert response.headers["Accept-Ranges"] == "bytes"
        assert "Content-Range" not in response.headers
    assert pod.given == len(BLOB)


@pytest.mark.parametrize(("asked", "start", "stop"), RANGES)
async def test_a_blob_comes_in_ranges(peer: ClientSession, asked: str, start: int, stop: int) -> None:
    async with peer.get(f"{BLOBS}/sha256/{HASH}", headers={"Range": asked}) as response:
        assert (response.status, await response.read()) == (206, BLOB[start:stop])
        assert response.headers["Content-Range"] == f"bytes {start}-{stop - 1}/2048"
        assert response.content_length == stop - start


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        ("bytes=2048-", 416), ("bytes=9999-", 416), ("bytes=5-3", 400), ("bytes=a-b", 400), ("bytes=0-1,4-5", 400),
        ("chapters=1-2", 400), (f"bytes={'9' * 5000}-", 400), ("", 400),
    ],
)  # fmt: skip
async def test_other_ranges_are_refused(pod: PeerPod, peer: ClientSession, asked: str, status: int) -> None:
    async with peer.get(f"{BLOBS}/sha256/{HASH}", headers={"Range": asked}) as response:
        assert response.status == status, await response.text()
        assert response.headers.get("Content-Range") == ("bytes */2048" if status == 416 else None)
    assert pod.given == 0


HOSTILE = [
    "0" * 64, HASH.upper(), HASH[:-1], HASH + "0", f"{HASH}/", "..", "%2e%2e", f"..%2f{HASH}", f"%2fetc%2fpasswd{HASH}",
    f"{HASH}%00", f"{HASH}%0a", "²" * 64, "a/b", "", "*", f"{HASH[:2]}%2f{HASH}",
]  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("kind", ["sha256/", "manifests/", "manifests/sha256:", "manifests/md5:"])
async def test_what_is_no_hash_of_a_blob_is_not_here(pod: PeerPod, kind: str, name: str) -> None:
    """Sent as it is: no client cleans the path."""
    async with pod.listening() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        path = f"{BLOBS}/{kind}{name}".encode()
        head = b" HTTP/1.1\r\nHost: pod\r\nConnection: close\r\nAuthorization: Bearer " + TOKEN.encode() + b"\r\n\r\n"
        writer.write(b"GET " + path + head)
        answer = await reader.read()
        writer.close()
    assert answer.split(b" ", 2)[1] in {b"404", b"400", b"401"}
    assert BLOB[:16] not in answer
    assert pod.given == 0


async def test_the_question_what_is_here_lists_nothing_else(peer: ClientSession) -> None:
    async with peer.post(f"{BLOBS}/held", json={"sha256": [HASH, "0" * 64]}) as response:
        assert await response.json() == {"sha256": [HASH]}
    for body in ({"sha256": ["*"]}, {"sha256": [HASH.upper()]}, {"sha256": [HASH] * (MOST_HASHES + 1)}, {}, []):
        async with peer.post(f"{BLOBS}/held", json=body) as response:
            assert response.status == 400
    for path in ("", "/", "/sha256", "/manifests", "/held"):
        async with peer.get(f"{BLOBS}{path}") as response:
            assert response.status in {401, 404, 405}


@pytest.fixture
def version(tmp_path: Path, pod: PeerPod) -> Manifest:
    """A version that the pod has the manifest of."""
    built = build_manifest(write_checkpoint(tmp_path / "version"))
    pod.records.keep(Found(uri="mem://bucket/chat/1.0", digest=built.digest, places={}), built)
    return built


async def test_a_manifest_comes_by_its_digest(peer: ClientSession, version: Manifest) -> None:
    async with peer.get(f"{BLOBS}/manifests/{version.digest}") as response:
        assert manifests.decode(await response.read()) == version
    async with peer.head(f"{BLOBS}/manifests/{version.digest}") as response:
        assert (response.status, await response.read()) == (200, b"")
    async with peer.get(f"{BLOBS}/manifests/sha256:{HASH}") as response:
        assert response.status == 404


async def test_a_blob_that_is_removed_while_it_is_sent_comes_to_its_end(pod: PeerPod) -> None:
    clock = ManualClock()
    async with (
        pod.listening(bandwidth=Bandwidth(PIECE_BYTES, clock=clock)) as port,
        asking(port) as session,
        session.get(f"{BLOBS}/sha256/{LARGE_HASH}") as response,
    ):
        await response.content.readexactly(PIECE_BYTES)
        await asyncio.to_thread(pod.store.path(LARGE_HASH).unlink)
        reading = asyncio.create_task(response.content.readexactly(2 * PIECE_BYTES))
        await passing(clock, reading)
        assert await reading == LARGE[PIECE_BYTES:]


async def test_what_breaks_off_is_never_taken_for_the_whole(pod: PeerPod) -> None:
    """No answer of another kind follows where the bytes of a blob were promised."""
    clock = ManualClock()
    async with (
        pod.listening(bandwidth=Bandwidth(PIECE_BYTES, clock=clock)) as port,
        asking(port) as session,
        session.get(f"{BLOBS}/sha256/{LARGE_HASH}") as response,
    ):
        await response.content.readexactly(PIECE_BYTES)
        await asyncio.to_thread(_cut, pod.store.path(LARGE_HASH))
        reading = asyncio.create_task(response.content.read())
        await passing(clock, reading)
        with pytest.raises(ClientPayloadError):
            await reading


def _cut(path: Path) -> None:
    path.chmod(0o600)
    os.truncate(path, PIECE_BYTES)


async def test_who_leaves_makes_room_for_the_next(pod: PeerPod) -> None:
    with capture_logs() as logs:
        async with pod.listening(transfers=1) as port, asking(port) as session:
            for _ in range(3):
                response = await session.get(f"{BLOBS}/sha256/{LARGE_HASH}")
                response.close()
            assert await _whole(session, HASH) == (200, BLOB)
    assert not [line for line in logs if line["log_level"] == "error"]


async def passing(clock: ManualClock, work: asyncio.Task[Any]) -> None:
    """Let time pass until work that also waits for sockets is done."""
    async with asyncio.timeout(30):
        while not work.done():
            await clock.advance(0.5)
            await asyncio.sleep(0.005)


async def test_all_transfers_share_one_bandwidth() -> None:
    clock = ManualClock()
    bandwidth = Bandwidth(1000, clock=clock)

    async def take(count: int) -> float:
        for _ in range(count):
            await bandwidth.take(500)
        return clock.now

    began = clock.now
    await clock.run(asyncio.gather(take(5), take(5)))
    assert clock.now - began == pytest.approx(4.5)  # the first piece goes at once
    await clock.advance(10)
    before = clock.now
    await clock.run(take(2))
    assert clock.now - before == pytest.approx(0.5), "what was not used is not saved up"


async def test_so_many_transfers_at_once_the_rest_waits_for_its_turn(pod: PeerPod) -> None:
    clock = ManualClock()
    async with (
        pod.listening(bandwidth=Bandwidth(PIECE_BYTES, clock=clock), transfers=1) as port,
        asking(port) as session,
        session.get(f"{BLOBS}/sha256/{LARGE_HASH}") as first,
    ):
        await first.content.readexactly(PIECE_BYTES)
        second = asyncio.create_task(_whole(session, HASH))
        async with session.post(f"{BLOBS}/held", json={"sha256": [HASH]}) as response:
            assert response.status == 200, "a question needs no turn"
        assert not second.done()
        await passing(clock, second)
        assert await second == (200, BLOB)
        assert await first.content.readexactly(2 * PIECE_BYTES) == LARGE[PIECE_BYTES:]


async def _whole(session: ClientSession, name: str) -> tuple[int, bytes]:
    async with session.get(f"{BLOBS}/sha256/{name}") as response:
        return response.status, await response.read()


# Who may.

SIGNER = Signer("rsa-1")
PODS = "system:serviceaccount:team:chat"
AUDIENCE = "modelswap-peers.chat.team"
OPERATOR_TOKEN = SIGNER.sign(claims())
PEER_TOKEN = SIGNER.sign(claims(sub=PODS, aud=[AUDIENCE]))


def judged(expected: Expected) -> Authenticator:
    async def fetch() -> bytes:
        return key_set(SIGNER)

    return KubernetesAuthenticator(expected=expected, keys=KeySet(fetch, clock=lambda: NOW), clock=lambda: NOW)


@pytest.fixture
async def cluster(pod: PeerPod) -> AsyncIterator[int]:
    control = judged(Expected(audience=POD_UID, issuer=ISSUER, subjects=frozenset({SUBJECT})))
    async with pod.listening(control=control, peers=judged(like(PEER_TOKEN))) as port:
        yield port


async def status(port: int, token: str, method: str = "GET", path: str = f"{BLOBS}/sha256/{HASH}") -> int:
    async with asking(port, token) as session, session.request(method, path, json={}) as response:
        return response.status


async def test_a_peers_token_reads_blobs_and_so_does_the_operators(cluster: int) -> None:
    assert await status(cluster, PEER_TOKEN) == 200
    assert await status(cluster, OPERATOR_TOKEN) == 200


async def test_a_peers_token_is_good_for_nothing_else(cluster: int, pod: PeerPod) -> None:
    others = [(method, path) for method, path in pod.routes if not path.startswith(BLOBS)]
    assert len(others) > 30
    for method, path in others:
        got = await status(cluster, PEER_TOKEN, method, path.replace("{", "").replace("}", ""))
        assert got == 401 or path in {"/livez", "/readyz", "/metrics"}, (method, path)
    for path in (f"{BLOBS}/../state", f"{BLOBS}/sha256/../../state", f"{BLOBS}/%2e%2e/state", f"{BLOBS}//state"):
        async with asking(cluster, PEER_TOKEN) as session, session.get(f"http://127.0.0.1:{cluster}{path}") as response:
            assert response.status in {401, 404}, path
            assert "bootId" not in await response.text()


@pytest.mark.parametrize(
    "changes",
    [
        {"aud": ["modelswap-peers.other.team"]}, {"aud": [POD_UID]}, {"aud": [ISSUER]}, {"aud": None},
        {"sub": "system:serviceaccount:team:default"}, {"sub": "system:serviceaccount:other:chat"}, {"sub": None},
        {"iss": "https://elsewhere"}, {"exp": int(NOW) - 60}, {"nbf": int(NOW) + 60},
    ],
    ids=str,
)  # fmt: skip
async def test_other_tokens_read_nothing(cluster: int, pod: PeerPod, changes: dict[str, object]) -> None:
    token = SIGNER.sign(claims(**{"sub": PODS, "aud": [AUDIENCE], **changes}))
    assert await status(cluster, token) in {401, 403}
    assert pod.given == 0


async def test_nobody_and_forgers_read_nothing(cluster: int, pod: PeerPod) -> None:
    forger = Signer("rsa-1").sign(claims(sub=PODS, aud=[AUDIENCE]))
    for token in ("", "x", forger, TOKEN, CONTROL_TOKEN):
        for method, path in (
            ("GET", f"{BLOBS}/sha256/{HASH}"),
            ("GET", f"{BLOBS}/manifests/sha256:{HASH}"),
            ("POST", f"{BLOBS}/held"),
        ):
            assert await status(cluster, token, method, path) == 401
    assert pod.given == 0


def test_an_own_token_for_several_audiences_says_not_whom_to_believe() -> None:
    for changes in ({"aud": ["a", "b"]}, {"aud": None}, {"aud": []}, {"sub": None}, {"iss": None}):
        with pytest.raises(ValueError, match="token"):
            like(SIGNER.sign(claims(**changes)))
