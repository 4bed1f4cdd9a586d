"""The process before an external engine: wires its control side, the proxy, sources, coordinator and the two ports."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import aiohttp

from modelswap_engine.backends.external.handshake import read_boot
from modelswap_engine.backends.external.materialise import Materialiser
from modelswap_engine.backends.external.restart import RestartWish
from modelswap_engine.backends.external.start_point import StartPoint
from modelswap_engine.cli import hosting
from modelswap_engine.cli.engine_choice import Engine, EngineRestart, Route
from modelswap_engine.cli.engines import Driven, Place, driven
from modelswap_engine.cli.hosting import HostSettings, Template
from modelswap_engine.cli.sharing import shared_of
from modelswap_engine.cli.sources import Supply, supply_of
from modelswap_engine.http.app import control_app, proxy_app
from modelswap_engine.http.engine import EngineCase, EngineRoutes
from modelswap_engine.http.metrics import Metrics
from modelswap_engine.http.proxy.dialects import DIALECTS
from modelswap_engine.http.proxy.flights import Flights
from modelswap_engine.http.proxy.port import ProxySettings as PortSettings
from modelswap_engine.http.proxy.upstream import Upstream, UpstreamSettings
from modelswap_engine.http.spool import Spool
from modelswap_engine.limits import Memory, MemoryProbe
from modelswap_engine.lora.desk import AdapterDesk
from modelswap_engine.lora.settings import LoraSettings
from modelswap_engine.lora.vouching import Vouching
from modelswap_engine.protocol.errors import BadRequest
from modelswap_engine.swap.clock import SystemClock
from modelswap_engine.swap.coordinator import Coordinator
from modelswap_engine.swap.gate import Gate
from modelswap_engine.swap.journal import Journal

MIB: Final = 1 << 20
_INSIDE: Final = frozenset({"127.0.0.1", "::1", "localhost"})


@dataclass(frozen=True, kw_only=True)
class ProxySettings(HostSettings):
    """The options of ``modelswap proxy``, see there."""

    backend: Engine
    upstream: str
    route: Route
    allow_unverifiable: bool
    max_body_mib: int
    engine_seconds: float
    silent_seconds: float
    checkpoint_dir: Path | None
    checkpoint_bytes: int
    runtime_dir: Path | None
    adapter_dir: Path | None
    lora_host_mib: int
    engine_restart: EngineRestart


class _NotHere(MemoryProbe):
    """The tensors are in the engine's container, whose ranks tell its limit: what bounds this one says nothing."""

    def read(self) -> Memory:
        return Memory()


@dataclass(frozen=True, kw_only=True)
class _Sidecar:
    """What the two ports have in common."""

    backend: Driven
    coordinator: Coordinator
    adapters: AdapterDesk
    flights: Flights
    metrics: Metrics
    supply: Supply
    engine: EngineRoutes | None


def run_proxy(settings: ProxySettings) -> None:
    """Serve until a signal.

    Raises:
        ModelswapError: it could not start.
    """
    hosting.run(settings, _serve(settings))


async def _serve(settings: ProxySettings) -> None:
    template, url, starting = hosting.template_of(settings), _loopback(settings.upstream), _starting(settings)
    stopping = hosting.signals()
    authenticator = await hosting.authenticator(settings)
    async with (
        aiohttp.ClientSession() as session,
        Upstream(UpstreamSettings(url=url, silent_seconds=settings.silent_seconds)) as upstream,
    ):
        sidecar = _sidecar(settings, _place(settings, url, session, starting=starting), template=template)
        control = control_app(
            coordinator=sidecar.coordinator,
            authenticator=authenticator,
            metrics=sidecar.metrics,
            spool=Spool(settings.state_dir.resolve() / "bodies"),
            adapters=sidecar.adapters,
            engine=sidecar.engine,
            shared=await shared_of(
                settings,
                store=sidecar.supply.store,
                records=sidecar.supply.records,
                given=sidecar.metrics.served_bytes.inc,
            ),
        )
        served_name = settings.served_model_name or template.name
        data = proxy_app(
            coordinator=sidecar.coordinator,
            dialect=DIALECTS[settings.backend],
            upstream=upstream,
            flights=sidecar.flights,
            metrics=sidecar.metrics,
            settings=PortSettings(served_model_name=served_name, max_body_bytes=settings.max_body_mib * MIB),
            base=lambda: sidecar.backend.served_name or served_name,
            on_lost=sidecar.backend.suspect,
            adapters=sidecar.adapters,
        )
        async with _ending_with(sidecar.engine, stopping):
            await hosting.serve_ports(
                settings,
                control=control,
                data=data,
                coordinator=sidecar.coordinator,
                template=template,
                metrics=sidecar.metrics,
                stopping=stopping,
            )


def _place(settings: ProxySettings, url: str, session: aiohttp.ClientSession, *, starting: StartPoint | None) -> Place:
    adapter_dir = settings.adapter_dir or settings.checkpoint_dir or settings.state_dir
    return Place(
        url=url,
        session=session,
        seconds=settings.engine_seconds,
        folder=(settings.checkpoint_dir or settings.state_dir).resolve() / "plain",
        adapter_dir=adapter_dir.resolve(),
        adapter_bytes=settings.checkpoint_bytes if adapter_dir == settings.checkpoint_dir else 0,
        runtime_dir=settings.runtime_dir,
        starting=starting,
        unverifiable=settings.allow_unverifiable,
    )


def _sidecar(settings: ProxySettings, place: Place, *, template: Template) -> _Sidecar:
    restart, flights, clock = RestartWish(), Flights(), SystemClock()
    backend, host = driven(settings.backend, settings.route, place, requests=flights, restart=restart)
    served_name, supply = settings.served_model_name or template.name, supply_of(settings, template=template)
    lora = LoraSettings(
        host_bytes=settings.lora_host_mib * MIB, served_model_name=served_name, pod_uid=settings.pod_uid
    )
    signatures = hosting.signatures(settings)
    desk = AdapterDesk(host=host, opener=supply.sources, clock=clock, settings=lora, vouching=Vouching(signatures))
    coordinator = Coordinator(
        backend=backend,
        sources=supply.sources,
        journal=Journal.open(settings.state_dir.resolve() / "journal"),
        gate=Gate(clock=clock, max_queue=settings.max_queue),
        clock=clock,
        settings=hosting.swap_settings(settings, served_name=served_name),
        companion=desk,
        memory=_NotHere(),
        signatures=signatures,
    )
    return _Sidecar(
        backend=backend,
        coordinator=coordinator,
        adapters=desk,
        flights=flights,
        metrics=Metrics(coordinator.state),
        supply=supply,
        engine=_engine_routes(settings, coordinator=coordinator, restart=restart),
    )


def _loopback(upstream: str) -> str:
    """Return where the engine is, which must be this pod: its admin routes are behind the same port.

    Raises:
        BadRequest: it is no such address.
    """
    url = urlsplit(upstream)
    if url.scheme != "http" or url.hostname not in _INSIDE or url.path not in ("", "/") or url.username:
        raise BadRequest(
            f"--upstream {upstream}: not an address of this pod",
            advice="have the engine listen on 127.0.0.1 and pass http://127.0.0.1:PORT",
        )
    return f"http://{url.netloc}"


def _starting(settings: ProxySettings) -> StartPoint | None:
    """Return how the engine's launcher is told what to start on, None without one."""
    if settings.checkpoint_dir is None and settings.runtime_dir is None:
        return None
    if settings.checkpoint_dir is None or settings.runtime_dir is None:
        raise BadRequest("--checkpoint-dir and --runtime-dir belong together", advice="pass both, or none of them")
    place = Materialiser(settings.checkpoint_dir, limit_bytes=settings.checkpoint_bytes)
    return StartPoint(place, runtime=settings.runtime_dir)


def _engine_routes(settings: ProxySettings, *, coordinator: Coordinator, restart: RestartWish) -> EngineRoutes | None:
    """Return what the engine's own container asks, None where it has none that asks."""
    if settings.runtime_dir is None:
        return None

    async def case() -> EngineCase:
        wanted, quarantined, flag = restart.reason, coordinator.stuck, settings.engine_restart is EngineRestart.ALLOWED
        allowed = await coordinator.restart_allowed(otherwise=flag) if wanted or quarantined else flag
        return EngineCase(wanted=wanted, quarantined=quarantined, allowed=allowed, start=restart.boot_id)

    return EngineRoutes(
        case=case,
        boot=partial(read_boot, settings.runtime_dir),
        drain=lambda: coordinator.drain(settings.drain_seconds),
        clock=SystemClock(),
        start_seconds=settings.engine_seconds,
    )


@asynccontextmanager
async def _ending_with(engine: EngineRoutes | None, stopping: asyncio.Event) -> AsyncIterator[None]:
    """End this process when the engine was started again after all that was done for its end."""

    async def watch(routes: EngineRoutes) -> None:
        await routes.begun_anew()
        stopping.set()

    watching = asyncio.create_task(watch(engine)) if engine is not None else None
    try:
        yield
    finally:
        if watching is not None:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
