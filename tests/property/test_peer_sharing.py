"""Blobs from peers: whatever peers answer, no wrong byte counts, and what one of them gives comes from one of them."""

import asyncio
import contextlib
import hashlib
import random
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from modelswap_engine.sources.peers.choice import Choice, Peer
from modelswap_engine.sources.peers.client import PeerError, PeerLacksError
from modelswap_engine.sources.peers.sharing import Peers

WAYS = ["gives", "breaks off", "lies", "lacks", "short", "long", "deaf", "refuses", "gone"]
GIVING = {"gives", "breaks off"}
ONCE = {"gives", "lies", "lacks", "long", "refuses"}
"""The others have given something when they end, and may go on."""


def name_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Pods:
    """Peers that behave as drawn; they remember what they were asked for."""

    def __init__(self, blobs: dict[str, bytes], ways: dict[Peer, str], holds: dict[Peer, set[str]]) -> None:
        self.blobs, self.ways, self.holds = blobs, ways, holds
        self.asked: list[tuple[Peer, str]] = []

    def __repr__(self) -> str:
        return f"Pods({self.blobs}, {self.ways}, {self.holds})"

    async def held(self, peer: Peer, hashes: Sequence[str]) -> set[str]:
        if self.ways[peer] == "deaf":
            raise PeerError("no answer")
        return self.holds[peer] & set(hashes)

    async def knows(self, peer: Peer, digest: str) -> bool:
        raise PeerLacksError

    async def manifest(self, peer: Peer, digest: str, *, limit: int) -> bytes:
        raise PeerLacksError

    async def blob(self, peer: Peer, sha256: str, *, start: int, stop: int) -> AsyncGenerator[bytes, None]:
        self.asked.append((peer, sha256))
        way, data = self.ways[peer], self.blobs[sha256][start:stop]
        if way == "lacks":
            raise PeerLacksError("404")
        if way == "refuses":
            raise PeerError("401")
        yield {"lies": bytes(255 - byte for byte in data), "short": data[:-1], "long": data + b"!"}.get(
            way, data[: 1 + len(data) // 2]
        )
        await asyncio.sleep(0)
        if way == "gone" or (way == "breaks off" and len(data) > 1):
            raise PeerError("it broke off")
        if way in GIVING:
            yield data[1 + len(data) // 2 :]


class Memory:
    """A sink; ``right`` are the blobs that counted."""

    def __init__(self) -> None:
        self.written: dict[str, bytearray] = {}
        self.right: dict[str, bytes] = {}

    async def write(self, sha256: str, at: int, data: bytes) -> None:
        written = self.written.setdefault(sha256, bytearray())
        assert at == len(written), "a piece is missing, or comes twice"
        written += data

    async def finish(self, sha256: str) -> bool:
        data = bytes(self.written.pop(sha256))
        if name_of(data) != sha256:
            return False
        assert sha256 not in self.right, "it came twice"
        self.right[sha256] = data
        return True

    def again(self, sha256: str) -> None:
        self.written.pop(sha256, None)


@st.composite
def pods(draw: st.DrawFn) -> Pods:
    contents = draw(st.lists(st.binary(min_size=1, max_size=40), max_size=12, unique=True))
    blobs = {name_of(data): data for data in contents}
    peers = [Peer(f"10.0.0.{number}", 8001) for number in range(draw(st.integers(0, 6)))]
    ways = {peer: draw(st.sampled_from(WAYS)) for peer in peers}
    some = st.sets(st.sampled_from(sorted(blobs))) if blobs else st.just(set[str]())
    return Pods(blobs, ways, {peer: draw(some) for peer in peers})


def sharing(pods: Pods, seed: int) -> Peers:
    @contextlib.asynccontextmanager
    async def connect() -> AsyncIterator[Pods]:
        yield pods

    async def find() -> list[Peer]:
        return list(pods.ways)

    return Peers(find=find, connect=connect, chance=random.Random(seed))


@settings(max_examples=200, deadline=None)
@given(pods(), st.integers(0, 99))
def test_what_a_peer_gives_comes_and_nothing_wrong_does(pods: Pods, seed: int) -> None:
    sink, peers = Memory(), sharing(pods, seed)
    wanted = [(sha256, len(data)) for sha256, data in pods.blobs.items()]
    asyncio.run(peers.bring(wanted, sink))
    assert sink.right.items() <= pods.blobs.items()
    givers = {sha256 for peer, held in pods.holds.items() for sha256 in held if pods.ways[peer] in GIVING}
    assert givers <= sink.right.keys()
    assert not sink.written, "half of a blob is left"
    assert all(count == 1 for (peer, _), count in Counter(pods.asked).items() if pods.ways[peer] in ONCE)
    liars = {peer for peer, _ in pods.asked if pods.ways[peer] == "lies"}
    pods.asked.clear()
    asyncio.run(peers.bring(wanted, Memory()))
    assert not liars & {peer for peer, _ in pods.asked}, "who lied is asked again"


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=60), st.integers(1, 8), st.text(max_size=3))
def test_load_is_even_up_to_one_blob(sizes: list[int], count: int, salt: str) -> None:
    peers = [Peer(f"10.0.0.{number}", 8001) for number in range(count)]
    names = {name_of(str(number).encode()): size for number, size in enumerate(sizes)}
    choice, load = Choice(dict.fromkeys(names, peers), salt=salt), Counter[Peer](dict.fromkeys(peers, 0))
    for sha256, nbytes in names.items():
        picked = choice.pick(sha256, nbytes)
        assert picked is not None
        load[picked] += nbytes
    assert max(load.values()) - min(load.values()) <= max(sizes)


@given(st.integers(1, 8), st.integers(0, 8))
def test_everybody_is_asked_once_and_who_is_left_out_is_not(count: int, out: int) -> None:
    peers = [Peer(f"10.0.0.{number}", 8001) for number in range(count)]
    choice = Choice({"a": peers, "b": peers}, salt="")
    for peer in peers[:out]:
        choice.leave_out(peer)
    asked = []
    while (peer := choice.pick("a", 1)) is not None:
        asked.append(peer)
    assert sorted(asked) == sorted(peers[out:])
    assert choice.pick("c", 1) is None


def test_pods_that_fetch_the_same_do_not_all_begin_with_the_same_peer() -> None:
    peers = [Peer(f"10.0.0.{number}", 8001) for number in range(4)]
    first = Counter(Choice({"a": peers}, salt=str(salt)).pick("a", 1) for salt in range(200))
    assert min(first[peer] for peer in peers) > 20
