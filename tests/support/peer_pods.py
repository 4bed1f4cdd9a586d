"""Pods that share what they fetched: each with its store, its coordinator and its real control port on loopback.

The engine is one in memory, and what they fetch from is what a test passes; everything between is the real thing.
"""

import asyncio
import contextlib
import random
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path

from modelswap_engine.backends.port import TensorRange
from modelswap_engine.http.app import Shared, control_app, listening
from modelswap_engine.http.auth import Authenticator, TokenFileAuthenticator
from modelswap_engine.http.blobs import TRANSFERS, Bandwidth, BlobRoutes
from modelswap_engine.http.metrics import Metrics
from modelswap_engine.http.spool import Spool
from modelswap_engine.protocol.messages import SwapStatus, VersionRef
from modelswap_engine.sources.allowed import Allowed
from modelswap_engine.sources.peers.choice import Peer
from modelswap_engine.sources.peers.client import Access, connected
from modelswap_engine.sources.peers.finding import find
from modelswap_engine.sources.peers.sharing import Peers, SharingSettings
from modelswap_engine.sources.registry import Sources
from modelswap_engine.sources.remote.fetch import Fetcher, FetchSettings
from modelswap_engine.sources.remote.port import Opener
from modelswap_engine.sources.remote.records import Records
from modelswap_engine.sources.remote.source import RemoteSource
from modelswap_engine.store.content import ContentStore
from modelswap_engine.swap.clock import SystemClock
from modelswap_engine.swap.coordinator import Coordinator
from modelswap_engine.swap.gate import Gate
from modelswap_engine.swap.journal import Journal
from modelswap_engine.swap.settings import SwapSettings
from tests.support.fake_backend import FakeBackend
from tests.support.swapping import POD, Unbounded, last, request

TOKEN = "peer-token"
CONTROL_TOKEN = "control-token"
SETTINGS = SharingSettings(ask_seconds=5.0, grace=5.0, slowest=1 << 20)


class PeerPod:
    """One pod.

    Args:
        folder: of its own.
        opener: what it fetches from.
        addresses: control ports of all pods, its own among them; read when something is fetched.
        allow: prefixes.
        settings: bounds of asking.
        access: how it speaks to the others; by default with the token of all.
    """

    def __init__(
        self,
        folder: Path,
        opener: Opener,
        addresses: list[Peer],
        *,
        allow: list[str],
        settings: SharingSettings = SETTINGS,
        access: Access | None = None,
    ) -> None:
        folder.mkdir()
        self.folder = folder
        self.port = 0
        self.given = 0
        self.routes: list[tuple[str, str]] = []
        (folder / "peer-token").write_text(TOKEN)
        (folder / "tokens").write_text(CONTROL_TOKEN)
        access = access or Access(token_file=folder / "peer-token")
        self.store, self.records = ContentStore(folder / "store"), Records(folder / "sources")
        self.store.open()
        peers = Peers(
            find=lambda: find(list(addresses), own_port=self.port),
            connect=partial(connected, access),
            settings=settings,
            chance=random.Random(str(folder)),
        )
        fetcher = Fetcher(self.store, settings=FetchSettings(attempts=2, first_pause=0.0))
        self.source = RemoteSource(
            opener, allowed=Allowed(allow), store=self.store, records=self.records, fetcher=fetcher, sharing=peers
        )
        self.backend = FakeBackend(read=_read, ranks=1)
        clock = SystemClock()
        self.coordinator = Coordinator(
            backend=self.backend,
            sources=Sources({"mem": self.source}),
            journal=Journal.open(folder / "journal", sync=lambda file: None),
            gate=Gate(clock=clock, max_queue=4, queue_seconds=10),
            clock=clock,
            settings=SwapSettings(state_dir=folder / "state", pod_uid=POD, propagation_seconds=0, memory_reserve=0),
            listeners=[],
            memory=Unbounded(),  # type: ignore[arg-type]
        )

    def _gave(self, nbytes: int) -> None:
        self.given += nbytes

    @contextlib.asynccontextmanager
    async def listening(
        self,
        *,
        peers: Authenticator | None = None,
        control: Authenticator | None = None,
        bandwidth: Bandwidth | None = None,
        transfers: int = TRANSFERS,
        tls: ssl.SSLContext | None = None,
    ) -> AsyncIterator[int]:
        """Serve the control port and yield its number."""
        blobs = BlobRoutes(
            store=self.store,
            manifest=self.records.given,
            bandwidth=bandwidth or Bandwidth(0, clock=SystemClock()),
            given=self._gave,
            transfers=transfers,
        )
        app = control_app(
            coordinator=self.coordinator,
            authenticator=control or TokenFileAuthenticator(self.folder / "tokens"),
            metrics=Metrics(self.coordinator.state),
            spool=Spool(self.folder / "bodies"),
            shared=Shared(blobs=blobs, peers=peers or TokenFileAuthenticator(self.folder / "peer-token")),
        )
        self.routes = [
            (route.method, route.resource.canonical)
            for route in app.router.routes()
            if route.resource is not None and route.method != "HEAD"
        ]
        async with listening(app, host="127.0.0.1", port=0, cancel_abandoned=False, tls=tls) as self.port:
            yield self.port

    async def fetch(self, uri: str, *, digest: str = "") -> None:
        """Have a whole version here, without serving it."""
        resolved = await self.source.resolve(uri, digest=digest)
        await resolved.obtain([entry.name for entry in resolved.manifest.tensors])

    async def swap(self, target: VersionRef, *, revision: int) -> SwapStatus:
        """Swap to a version and return how it ended."""
        operation = f"op-{revision}"
        await self.coordinator.swap(request(target, operation, revision=revision))
        return await last(self.coordinator, operation)


async def in_waves(pods: list[PeerPod], work: Callable[[PeerPod], Awaitable[object]]) -> None:
    """Do something in one pod, then in two, then in four, as the operator has pods stage."""

    size = 1
    while pods:
        await asyncio.gather(*(work(pod) for pod in pods[:size]))
        pods, size = pods[size:], size * 2


def _read(tensor: TensorRange) -> bytes:
    with Path(tensor.path).open("rb") as file:
        file.seek(tensor.offset)
        return file.read(tensor.nbytes)
