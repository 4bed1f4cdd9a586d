"""Pods that share what they fetched: what ten of them cost the source, and how a pod that gives goes on decoding.

What reads from the pod runs on the same cores here; in a cluster it runs on another machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
from aiohttp import web

from bench.engine import SETTINGS, running
from bench.models import ensure_model
from bench.seen import median
from bench.verdicts import Verdict
from modelswap_engine.cli.host_options import PEER_BYTES_PER_SECOND
from modelswap_engine.http.app import listening
from modelswap_engine.http.blobs import Bandwidth, BlobRoutes
from modelswap_engine.protocol.blobs import BLOBS
from modelswap_engine.sources.peers.choice import Peer
from modelswap_engine.sources.peers.client import Access, connected
from modelswap_engine.sources.peers.finding import find
from modelswap_engine.sources.peers.sharing import Peers
from modelswap_engine.sources.remote.records import Records
from modelswap_engine.sources.remote.sharing import Sharing
from modelswap_engine.sources.remote.source import RemoteSource
from modelswap_engine.store.content import ContentStore
from modelswap_engine.swap.clock import SystemClock
from tests.support.servers.proxy import FaultProxy

PODS: Final = 10
EGRESS: Final = 1.3
KEPT: Final = 0.8
_MODEL_BYTES: Final = 100_000_000
_BLOB_BYTES: Final = 64 << 20
_SECONDS: Final = 3.0

MakeSource = Callable[[Path, str, ContentStore, Sharing], RemoteSource]


class SharingResult(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Figures of one run: bytes that left the source for the first pod and for all, tokens and bytes per second."""

    one: int
    all: int
    alone: float
    while_giving: float
    kept: float
    given_bytes_per_second: float

    def verdicts(self) -> list[Verdict]:
        """Hold the figures against what was asked."""
        return [
            Verdict(
                what=f"what {PODS} pods cost the source, by what one costs it",
                asked=f"<= {EGRESS}",
                measured=f"{self.all / self.one:.2f} ({self.all / 1e6:.1f} of {self.one / 1e6:.1f} MB)",
                met=self.all <= EGRESS * self.one,
            ),
            Verdict(
                what="decode speed of a pod that gives to others",
                asked=f">= {100 * KEPT:.0f} %",
                measured=f"{100 * self.kept:.0f} % ({self.while_giving:.1f} of {self.alone:.1f} tokens/s, "
                f"giving {self.given_bytes_per_second / 1e6:.0f} MB/s)",
                met=self.kept >= KEPT,
            ),
        ]


async def measure_sharing(
    folder: Path, *, uri: str, server: str, make: MakeSource, turns: int, report: Callable[[str], None]
) -> SharingResult:
    """Measure with a version that a server has.

    Args:
        folder: for what the pods keep.
        uri: of the version.
        server: its address.
        make: a pod's source, of its folder, the address of the server, its store, and the other pods.
        turns: how often decode speed is taken.
        report: told what is measured.
    """
    report(f"{PODS} pods, one, two and four at a time")
    with closing(FaultProxy(server)) as proxy:
        one, everything = await _egress(folder, uri=uri, proxy=proxy, make=make)
    report(f"decode speed, alone and while giving to another pod, {turns} turns")
    alone, beside, given = await _decoding(folder, turns=turns)
    return SharingResult(
        one=one,
        all=everything,
        alone=median(alone),
        while_giving=median(beside),
        kept=median([during / before for before, during in zip(alone, beside, strict=True) if before]),
        given_bytes_per_second=median(given),
    )


async def _egress(folder: Path, *, uri: str, proxy: FaultProxy, make: MakeSource) -> tuple[int, int]:
    ports: list[int] = []
    async with contextlib.AsyncExitStack() as stack:
        sources = []
        for number in range(PODS):
            pod = folder / f"pod-{number}"
            store = _store(pod)
            ports.append(await stack.enter_async_context(_giving(store, Records(pod / "records"), rate=0)))
            peers = Peers(find=partial(_others, ports, ports[-1]), connect=partial(connected, Access(token_file=None)))
            sources.append(make(pod, proxy.url, store, peers))
        await _fetch(sources[0], uri)
        one, left, size = proxy.sent(), sources[1:], 2
        while left:
            await asyncio.gather(*(_fetch(source, uri) for source in left[:size]))
            left, size = left[size:], size * 2
        return one, proxy.sent()


async def _others(ports: Sequence[int], own: int) -> list[Peer]:
    return await find([Peer("127.0.0.1", port) for port in ports], own_port=own)


async def _fetch(source: RemoteSource, uri: str) -> None:
    resolved = await source.resolve(uri)
    await resolved.obtain([entry.name for entry in resolved.manifest.tensors])


async def _decoding(folder: Path, *, turns: int) -> tuple[list[float], list[float], list[float]]:
    """Return tokens per second alone, and beside giving, and the bytes per second that were given."""
    store, given = _store(folder / "giver"), [0]
    blob = bytes(_BLOB_BYTES)
    name = hashlib.sha256(blob).hexdigest()
    store.put(name, blob)

    def count(nbytes: int) -> None:
        given[0] += nbytes

    alone, beside, rates = list[float](), list[float](), list[float]()
    routes = _giving(store, Records(folder / "giver"), rate=PEER_BYTES_PER_SECOND, given=count)
    model = ensure_model(_MODEL_BYTES)
    async with running(model, settings=SETTINGS) as (engine, _), routes as port, engine.busy() as record:
        await asyncio.sleep(1.0)
        for _ in range(turns):
            begin = time.monotonic()
            await asyncio.sleep(_SECONDS)
            alone.append(record.rate(begin))
            with _reading(f"http://127.0.0.1:{port}{BLOBS}/sha256/{name}"):
                await asyncio.sleep(0.5)
                begin, before = time.monotonic(), given[0]
                await asyncio.sleep(_SECONDS)
                beside.append(record.rate(begin))
                rates.append((given[0] - before) / (time.monotonic() - begin))
    return alone, beside, rates


def _store(folder: Path) -> ContentStore:
    store = ContentStore(folder / "store")
    store.open()
    return store


@contextlib.asynccontextmanager
async def _giving(
    store: ContentStore, records: Records, *, rate: int, given: Callable[[int], None] = lambda nbytes: None
) -> AsyncIterator[int]:
    """Serve what a store has, to anybody; yields the port."""
    blobs = BlobRoutes(
        store=store, manifest=records.manifest_file, bandwidth=Bandwidth(rate, clock=SystemClock()), given=given
    )
    app = web.Application()
    app.add_routes(blobs.routes())
    async with listening(app, host="127.0.0.1", port=0, cancel_abandoned=False) as port:
        yield port


@contextlib.contextmanager
def _reading(url: str) -> contextlib.AbstractContextManager[None]:
    """Read a blob again and again in a process of its own while the context lasts."""
    reader = subprocess.Popen([sys.executable, "-m", "bench.sharing", url])
    try:
        yield
    finally:
        reader.terminate()
        reader.wait(timeout=10)


def _read(url: str) -> None:
    import urllib.request

    buffer = memoryview(bytearray(1 << 20))
    while True:
        with urllib.request.urlopen(url, timeout=60) as response:
            while response.readinto(buffer):
                pass


if __name__ == "__main__":
    _read(sys.argv[1])
