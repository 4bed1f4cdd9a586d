"""Bringing blobs from other pods: who has what is asked first, then several give at once; whoever fails is left out.

A peer may be slow, gone, or somebody else. Every wait is bounded, and a peer has to keep up a rate: what does not come
is left to the source. Bytes count by their hash alone; a peer whose bytes are others is not asked again while this
process lives.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from typing import Final, Protocol, TypeVar

import msgspec
import structlog

from modelswap_engine.checkpoint.manifest import MAX_MANIFEST_BYTES
from modelswap_engine.sources.peers.choice import Choice, Peer
from modelswap_engine.sources.peers.client import PeerError, PeerLacksError
from modelswap_engine.sources.remote.contents import all_of
from modelswap_engine.sources.remote.sharing import Sink

_AT_ONCE: Final = 16
"""Peers that are asked at the same time what they have."""
_ENOUGH: Final = 8
"""Holders of each blob; when so many are known nobody else is asked."""
T = TypeVar("T")
_log = structlog.get_logger("modelswap.peers")


class Wire(Protocol):
    """See :class:`sources.peers.client.PeerClient`."""

    async def held(self, peer: Peer, hashes: Sequence[str]) -> set[str]:
        """Return which blobs a peer says that it has."""

    async def knows(self, peer: Peer, digest: str) -> bool:
        """Say whether a peer has the manifest of a version."""

    async def manifest(self, peer: Peer, digest: str, *, limit: int) -> bytes:
        """Return what a peer has as the manifest of a version."""

    def blob(self, peer: Peer, sha256: str, *, start: int, stop: int) -> AsyncGenerator[bytes, None]:
        """Yield the bytes of a blob from ``start`` on."""


Connect = Callable[[], contextlib.AbstractAsyncContextManager[Wire]]
Find = Callable[[], Awaitable[Sequence[Peer]]]


class SharingSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds: ``slowest`` bytes per second, after ``grace`` seconds, is what a peer must keep up in each blob."""

    parallel: int = 4
    ask_seconds: float = 5.0
    grace: float = 15.0
    slowest: int = 1 << 20


DEFAULT: Final = SharingSettings()


class Peers:
    """See the module, and :class:`sources.remote.sharing.Sharing`.

    Args:
        find: returns who there may be.
        connect: opens a client for one fetch.
        settings: bounds.
        clock: monotonic time in seconds.
        chance: in which order peers are asked.
    """

    def __init__(
        self,
        *,
        find: Find,
        connect: Connect,
        settings: SharingSettings = DEFAULT,
        clock: Callable[[], float] = time.monotonic,
        chance: random.Random | None = None,
    ) -> None:
        self._find, self._connect = find, connect
        self._settings, self._clock = settings, clock
        self._chance = chance or random.Random()  # noqa: S311 - spreads load
        self._liars: set[Peer] = set()

    async def bring(self, wanted: Sequence[tuple[str, int]], sink: Sink) -> None:
        """Bring what other pods have."""
        peers = await self._peers() if wanted else []
        async with self._connected(peers) as wire:
            if wire is None:
                return
            asked = [sha256 for sha256, _ in wanted]
            choice = Choice(await self._holders(wire, peers, asked), salt=str(self._chance.random()))
            left = iter(sorted(wanted, key=lambda blob: blob[1], reverse=True))  # the large ones first: an even end

            async def work() -> None:
                for sha256, nbytes in left:
                    await self._one(wire, choice, sink, sha256, nbytes)

            await all_of(work() for _ in range(self._settings.parallel))

    async def manifest(self, digest: str, *, prove: Callable[[bytes], T | None]) -> T | None:
        """Ask for a manifest until one is proved."""
        peers = await self._peers()
        async with self._connected(peers) as wire:
            if wire is None:
                return None
            async for peer, there in self._polled(peers, lambda peer: wire.knows(peer, digest)):
                if there and (found := await self._proved(wire, peer, digest, prove)) is not None:
                    return found
        return None

    async def _peers(self) -> list[Peer]:
        peers = [peer for peer in await self._find() if peer not in self._liars]
        self._chance.shuffle(peers)
        return peers

    @contextlib.asynccontextmanager
    async def _connected(self, peers: Sequence[Peer]) -> AsyncIterator[Wire | None]:
        """Yield a client; None where there is nobody to ask, or no way to."""
        async with contextlib.AsyncExitStack() as stack:
            wire = None
            try:
                wire = await stack.enter_async_context(self._connect()) if peers else None
            except PeerError as error:
                _log.warning("no peer is asked", reason=str(error))
            yield wire

    async def _polled(
        self, peers: Sequence[Peer], ask: Callable[[Peer], Awaitable[T]]
    ) -> AsyncIterator[tuple[Peer, T | None]]:
        """Ask some at a time, and yield what they answer while there is time."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._settings.ask_seconds

        async def answer(peer: Peer) -> T | None:
            try:
                return await ask(peer)
            except PeerLacksError:
                return None
            except PeerError as error:
                _log.info("a peer is left out", peer=peer.host, reason=str(error))
                return None

        for at in range(0, len(peers), _AT_ONCE):
            some = peers[at : at + _AT_ONCE]
            try:
                async with asyncio.timeout_at(until):
                    answers = await all_of(answer(peer) for peer in some)
            except TimeoutError:
                return
            for pair in zip(some, answers, strict=True):
                yield pair

    async def _holders(self, wire: Wire, peers: Sequence[Peer], hashes: Sequence[str]) -> dict[str, set[Peer]]:
        holders: dict[str, set[Peer]] = {sha256: set() for sha256 in hashes}
        async for peer, held in self._polled(peers, lambda peer: wire.held(peer, hashes)):
            for sha256 in held or ():
                holders[sha256].add(peer)
            if all(len(found) >= _ENOUGH for found in holders.values()):
                break
        return holders

    async def _one(self, wire: Wire, choice: Choice, sink: Sink, sha256: str, nbytes: int) -> None:
        while (peer := choice.pick(sha256, nbytes)) is not None:
            try:
                await self._from(wire, peer, sink, sha256, nbytes)
                if await sink.finish(sha256):
                    return
            except PeerLacksError:
                sink.again(sha256)
            except PeerError as error:
                sink.again(sha256)
                choice.leave_out(peer)
                _log.info("a peer is left out", peer=peer.host, reason=str(error))
            else:
                choice.leave_out(peer)
                self._lied(peer, sha256)

    async def _from(self, wire: Wire, peer: Peer, sink: Sink, sha256: str, nbytes: int) -> None:
        """Write what a peer gives; what breaks off goes on where it stopped while the peer keeps up."""
        settings, began, done = self._settings, self._clock(), 0
        while done < nbytes:
            before = done
            try:
                async with contextlib.aclosing(wire.blob(peer, sha256, start=done, stop=nbytes)) as stream:
                    while data := await _next(stream, began + settings.grace + done / settings.slowest - self._clock()):
                        if done + len(data) > nbytes:
                            raise PeerError("it sent more than was asked for")
                        await sink.write(sha256, done, data)
                        done += len(data)
                if done < nbytes:
                    raise PeerError("it broke off")
            except PeerError:
                if done == before:
                    raise

    async def _proved(self, wire: Wire, peer: Peer, digest: str, prove: Callable[[bytes], T | None]) -> T | None:
        try:
            async with asyncio.timeout(self._settings.grace):
                data = await wire.manifest(peer, digest, limit=MAX_MANIFEST_BYTES)
        except (PeerError, TimeoutError) as error:
            _log.info("a peer is left out", peer=peer.host, reason=str(error))
            return None
        found = await asyncio.to_thread(prove, data)
        if found is None:
            self._lied(peer, digest)
        return found

    def _lied(self, peer: Peer, what: str) -> None:
        self._liars.add(peer)
        _log.warning("a peer gave other bytes than it was asked for and is not asked again", peer=peer.host, of=what)


async def _next(stream: AsyncGenerator[bytes, None], seconds: float) -> bytes:
    try:
        return await asyncio.wait_for(anext(stream, b""), max(0.0, seconds))
    except TimeoutError:
        raise PeerError("it is too slow") from None
