"""The two aiohttp applications of a sidecar, and how they listen; everything they need is passed in."""

import contextlib
import ssl
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from aiohttp import web

from modelswap_engine.backends.port import Generation
from modelswap_engine.http.adapters import AdapterPort
from modelswap_engine.http.auth import Authenticator, EitherAuthenticator, auth_middleware
from modelswap_engine.http.blobs import BlobRoutes
from modelswap_engine.http.compat.session import TrainerSession
from modelswap_engine.http.compat.sglang import SglangRoutes
from modelswap_engine.http.compat.vllm import VllmRoutes
from modelswap_engine.http.control import MAX_BODY_BYTES, ControlPort
from modelswap_engine.http.engine import DRAIN, LIVEZ, EngineRoutes
from modelswap_engine.http.errors import error_middleware
from modelswap_engine.http.health import OPEN_PATHS, Health
from modelswap_engine.http.metrics import Metrics
from modelswap_engine.http.openai.routes import DataPort, DataSettings
from modelswap_engine.http.proxy.dialects import Dialect
from modelswap_engine.http.proxy.flights import Flights
from modelswap_engine.http.proxy.port import ProxyPort, ProxySettings
from modelswap_engine.http.proxy.upstream import Upstream
from modelswap_engine.http.resources import VersionResources
from modelswap_engine.http.spool import Spool
from modelswap_engine.http.telemetry import trace_middleware
from modelswap_engine.http.transfers import TransferRoutes
from modelswap_engine.http.updates import UpdateRoutes
from modelswap_engine.lora.desk import AdapterDesk
from modelswap_engine.protocol.errors import BadRequest
from modelswap_engine.swap.coordinator import Coordinator

SHUTDOWN_SECONDS = 2.0
MAX_PROMPT_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class Shared:
    """What other pods of the slot may read, and who judges their tokens."""

    blobs: BlobRoutes
    peers: Authenticator


def control_app(
    *,
    coordinator: Coordinator,
    authenticator: Authenticator,
    metrics: Metrics,
    spool: Spool,
    adapters: AdapterDesk | None = None,
    engine: EngineRoutes | None = None,
    shared: Shared | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> web.Application:
    """Return the control port: everything but the probes and metrics needs a valid token.

    ``engine`` are the routes for the container of an engine that has one; they see to their own callers. ``shared`` is
    what other pods may read, with tokens that are good for nothing else.
    """
    blobs = shared.blobs.routes() if shared is not None else []
    peers = EitherAuthenticator(shared.peers, authenticator) if shared is not None else authenticator
    open_paths = OPEN_PATHS if engine is None else OPEN_PATHS | {LIVEZ}
    keyed_paths = frozenset() if engine is None else frozenset({DRAIN})
    control = ControlPort(coordinator=coordinator, metrics=metrics, clock=clock)
    app = web.Application(
        middlewares=[
            error_middleware,
            auth_middleware(
                authenticator,
                open_paths=open_paths,
                keyed_paths=keyed_paths,
                others={route.path: peers for route in blobs},
            ),
            trace_middleware(),
        ],
        client_max_size=MAX_BODY_BYTES,
    )
    updates = UpdateRoutes(coordinator=coordinator, spool=spool)
    transfers = TransferRoutes(coordinator=coordinator)
    health = Health(coordinator=coordinator, metrics=metrics, engine_apart=engine is not None)
    app.add_routes([*health.routes(), *control.routes(), *updates.routes(), *transfers.routes(), *blobs])
    if engine is not None:
        app.add_routes(engine.routes())
    if adapters is not None:
        app.add_routes(AdapterPort(adapters).routes())
    session = TrainerSession(coordinator)  # one trainer at a time, whichever dialect it speaks
    sglang = SglangRoutes(coordinator=coordinator, session=session, spool=spool, adapters=adapters)
    vllm = VllmRoutes(coordinator=coordinator, session=session, adapters=adapters)
    app.add_routes([*sglang.routes(), *vllm.routes()])
    app.on_shutdown.append(control.close)
    return app


def data_app(
    *,
    coordinator: Coordinator,
    backend: Generation,
    resources: VersionResources,
    metrics: Metrics,
    settings: DataSettings,
    adapters: AdapterDesk | None = None,
    clock: Callable[[], float] = time.monotonic,
    wall_clock: Callable[[], float] = time.time,
) -> web.Application:
    """Return the data port: the OpenAI API, open to whoever reaches it, and ``/health``."""
    port = DataPort(
        coordinator=coordinator,
        backend=backend,
        resources=resources,
        metrics=metrics,
        settings=settings,
        adapters=adapters,
        clock=clock,
        wall_clock=wall_clock,
    )
    return _data_app(port.routes(), coordinator=coordinator, metrics=metrics, max_body_bytes=MAX_PROMPT_BYTES)


def proxy_app(
    *,
    coordinator: Coordinator,
    dialect: Dialect,
    upstream: Upstream,
    flights: Flights,
    metrics: Metrics,
    settings: ProxySettings,
    base: Callable[[], str],
    on_lost: Callable[[], None],
    adapters: AdapterDesk | None = None,
    clock: Callable[[], float] = time.monotonic,
    wall_clock: Callable[[], float] = time.time,
) -> web.Application:
    """Return the data port before an external engine: what is let through of the engine's API, and ``/health``."""
    port = ProxyPort(
        coordinator=coordinator,
        dialect=dialect,
        upstream=upstream,
        flights=flights,
        metrics=metrics,
        settings=settings,
        base=base,
        on_lost=on_lost,
        adapters=adapters,
        clock=clock,
        wall_clock=wall_clock,
    )
    return _data_app(port.routes(), coordinator=coordinator, metrics=metrics, max_body_bytes=settings.max_body_bytes)


def _data_app(
    routes: list[web.RouteDef], *, coordinator: Coordinator, metrics: Metrics, max_body_bytes: int
) -> web.Application:
    app = web.Application(middlewares=[error_middleware], client_max_size=max_body_bytes)
    app.add_routes([*routes, web.get("/health", Health(coordinator=coordinator, metrics=metrics).health)])

    async def close_when_leaving(_: web.Request, response: web.StreamResponse) -> None:
        # A pod on its way out tells keep-alive clients to connect again, which finds them another pod.
        if coordinator.closing:
            response.force_close()
            response.headers["Connection"] = "close"  # aiohttp has composed its headers already

    app.on_response_prepare.append(close_when_leaving)
    return app


@contextlib.asynccontextmanager
async def listening(
    app: web.Application, *, host: str, port: int, cancel_abandoned: bool, tls: ssl.SSLContext | None = None
) -> AsyncIterator[int]:
    """Serve an application while the context lasts; yields the port (of the system's choice for port 0).

    Args:
        app: the application.
        host: address to listen on.
        port: port to listen on.
        cancel_abandoned: a client that goes away ends what it asked for.
        tls: speaks TLS, and nothing else, when given.

    Raises:
        BadRequest: the port cannot be had.
    """
    runner = web.AppRunner(
        app,
        handle_signals=False,
        access_log=None,
        handler_cancellation=cancel_abandoned,
        shutdown_timeout=SHUTDOWN_SECONDS,
    )
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port, reuse_address=True, ssl_context=tls).start()
        except OSError as error:
            raise BadRequest(
                f"port {port} on {host}: {error.strerror or error}", advice="choose another port, or stop its user"
            ) from None
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()
