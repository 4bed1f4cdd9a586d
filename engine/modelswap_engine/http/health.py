"""Probes and metrics: the only routes of the control port that need no token.

``/livez`` says that the event loop turns, and that the engine has not given up: a paused, draining or recovering
engine is alive, and restarting it would lose requests; a quarantined one serves nobody, and a new process loads what
its assignment names, unless a person shall look at it first (``recovery.engineRestart: Never``). An engine with a
container of its own has a probe of its own (``http.engine``): then restarting this process helps nobody. ``/readyz`` is
the coordinator's word; it needs no token,
so it names the reason without its details.
"""

from aiohttp import web
from prometheus_client import exposition
from prometheus_client.openmetrics import exposition as openmetrics

from modelswap_engine.http.metrics import Metrics
from modelswap_engine.swap.coordinator import Coordinator

OPEN_PATHS = frozenset({"/livez", "/readyz", "/metrics"})


class Health:
    """Handlers of the open routes.

    Args:
        coordinator: whose state is told.
        metrics: what is shown.
        engine_apart: the engine has a container, and a probe, of its own.
    """

    def __init__(self, *, coordinator: Coordinator, metrics: Metrics, engine_apart: bool = False) -> None:
        self._coordinator = coordinator
        self._metrics = metrics
        self._engine_apart = engine_apart

    def routes(self) -> list[web.RouteDef]:
        """Return the route table of the control port."""
        return [web.get("/livez", self.livez), web.get("/readyz", self.readyz), web.get("/metrics", self.metrics)]

    async def livez(self, _: web.Request) -> web.Response:
        """Say that this process answers and has not given up."""
        if self._coordinator.stuck and not self._engine_apart and await self._coordinator.restart_allowed():
            return web.Response(text="quarantined: this process cannot serve again\n", status=503)
        return web.Response(text="ok\n")

    async def readyz(self, _: web.Request) -> web.Response:
        """Say whether traffic should come here; the coordinator learns that somebody was told."""
        ready = self._coordinator.ready()
        self._coordinator.probe_seen()
        if ready:
            return web.Response(text="ok\n")
        return web.Response(text=f"not ready: {self._coordinator.state().reason or 'Starting'}\n", status=503)

    async def health(self, _: web.Request) -> web.Response:
        """Say the same on the data port, as a fact for clients: it is not a probe."""
        return web.Response(status=200 if self._coordinator.ready() else 503)

    async def metrics(self, request: web.Request) -> web.Response:
        """Show the metrics, as OpenMetrics to those who ask for it."""
        if "application/openmetrics-text" in request.headers.get("Accept", ""):
            body, kind = openmetrics.generate_latest(self._metrics.registry), openmetrics.CONTENT_TYPE_LATEST  # type: ignore[no-untyped-call]
        else:
            body, kind = exposition.generate_latest(self._metrics.registry), exposition.CONTENT_TYPE_LATEST
        return web.Response(body=body, headers={"Content-Type": kind})
