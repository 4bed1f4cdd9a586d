"""The data port of ``modelswap proxy`` on a loopback socket, over the real coordinator and a canned engine.

What exchanges the weights is in memory (:mod:`tests.support.external_world`): these tests look at what the proxy does.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from aiohttp import ClientSession, ClientTimeout

from modelswap_engine.http.app import listening, proxy_app
from modelswap_engine.http.metrics import Metrics
from modelswap_engine.http.proxy.dialects import VLLM, Dialect
from modelswap_engine.http.proxy.flights import Flights
from modelswap_engine.http.proxy.port import ProxySettings
from modelswap_engine.http.proxy.upstream import Upstream, UpstreamSettings
from modelswap_engine.lora.desk import AdapterDesk
from modelswap_engine.lora.settings import LoraSettings
from modelswap_engine.protocol.adapter_calls import LoadAdapterRequest, UnloadAdapterRequest
from modelswap_engine.protocol.adapters import AdapterSource, AdapterStatus
from modelswap_engine.protocol.messages import Fence
from modelswap_engine.swap.clock import SystemClock
from tests.support.external_world import BOUNDS, ExternalWorld
from tests.support.fake_adapters import FakeHost, FakeOpener

SERVED = "chat"
BASE = "tiny"  # the engine's own name
MAX_REQUESTS = 8
MAX_BODY = 1 << 20


@dataclass
class ProxyPorts:
    """What a test talks to, and what it looks at."""

    world: ExternalWorld
    data: ClientSession
    url: str
    desk: AdapterDesk
    flights: Flights
    opener: FakeOpener
    metrics: Metrics
    lost: list[str]

    async def load(self, name: str, content: str = "one") -> AdapterStatus:
        """Load an adapter of this content."""
        uri = self.opener.put(f"file:///adapters/{content}", content)
        fence = Fence(pod_uid="pod-1", owner_uid="owner", epoch=1, revision=1)
        return await self.desk.load(LoadAdapterRequest(fence=fence, source=AdapterSource(name=name, uri=uri)))

    async def unload(self, name: str) -> None:
        """Unload an adapter."""
        fence = Fence(pod_uid="pod-1", owner_uid="owner", epoch=1, revision=2)
        await self.desk.unload(name, UnloadAdapterRequest(fence=fence, drain_timeout_seconds=0))


@contextlib.asynccontextmanager
async def open_proxy(
    folder: Path,
    upstream_url: str,
    *,
    dialect: Dialect = VLLM,
    silent_seconds: float = 60.0,
    idle_seconds: float = 60.0,
    write_seconds: float = 20.0,
    max_requests: int = MAX_REQUESTS,
    max_body: int = MAX_BODY,
    look_seconds: float = BOUNDS.watch,
) -> AsyncIterator[ProxyPorts]:
    """Serve version 1.0 through a proxy."""
    flights, opener, lost = Flights(), FakeOpener(), list[str]()
    desk = AdapterDesk(
        host=FakeHost(),
        opener=opener,
        clock=SystemClock(),
        settings=LoraSettings(slots=2, served_model_name=SERVED, pod_uid="pod-1"),
    )
    world = ExternalWorld(
        folder, requests=flights, companion=desk, offload=asyncio.to_thread, look_seconds=look_seconds
    )
    metrics = Metrics(world.coordinator.state)
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(world.running())
        upstream = await stack.enter_async_context(
            Upstream(
                UpstreamSettings(
                    url=upstream_url, connect_seconds=5, silent_seconds=silent_seconds, idle_seconds=idle_seconds
                )
            )
        )
        app = proxy_app(
            coordinator=world.coordinator,
            dialect=dialect,
            upstream=upstream,
            flights=flights,
            metrics=metrics,
            settings=ProxySettings(
                served_model_name=SERVED,
                max_requests=max_requests,
                max_body_bytes=max_body,
                write_seconds=write_seconds,
            ),
            base=lambda: BASE,
            on_lost=lambda: lost.append("lost"),
            adapters=desk,
        )
        port = await stack.enter_async_context(listening(app, host="127.0.0.1", port=0, cancel_abandoned=True))
        url = f"http://127.0.0.1:{port}"
        data = await stack.enter_async_context(ClientSession(url, timeout=ClientTimeout(total=60)))
        yield ProxyPorts(
            world=world, data=data, url=url, desk=desk, flights=flights, opener=opener, metrics=metrics, lost=lost
        )
