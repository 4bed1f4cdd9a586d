"""The probes and the metrics page, on one port, without a token: they tell nothing but whether the loops turn."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest

SILENT_SECONDS = 30.0
STUCK_SECONDS = 180.0
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, kw_only=True)
class Pulse:
    """How the process is. A standby has no loops yet and is alive and ready as it is."""

    leading: bool
    listed: bool = False
    beat_age: float = 0.0
    oldest_pass: float = 0.0


def alive(pulse: Pulse) -> tuple[int, str]:
    """Return the answer of ``/livez``: progress, not existence."""
    if pulse.leading and pulse.beat_age > SILENT_SECONDS:
        return 503, f"the loop has been silent for {pulse.beat_age:.0f} s"
    if pulse.oldest_pass > STUCK_SECONDS:
        return 503, f"a pass has been going on for {pulse.oldest_pass:.0f} s"
    return 200, "ok"


def ready(pulse: Pulse) -> tuple[int, str]:
    """Return the answer of ``/readyz``: the first list of every kind is done, or this is a standby."""
    if pulse.leading and not pulse.listed:
        return 503, "the first list is not done"
    return 200, "ok" if pulse.leading else "standby"


@asynccontextmanager
async def served(
    *, host: str, port: int, pulse: Callable[[], Pulse], registry: CollectorRegistry
) -> AsyncIterator[int]:
    """Serve until the block ends; yields the port that was taken."""

    async def livez(_: web.Request) -> web.Response:
        status, text = alive(pulse())
        return web.Response(status=status, text=text)

    async def readyz(_: web.Request) -> web.Response:
        status, text = ready(pulse())
        return web.Response(status=status, text=text)

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": METRICS_TYPE})

    app = web.Application()
    app.add_routes([web.get("/livez", livez), web.get("/readyz", readyz), web.get("/metrics", metrics)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        await site.start()
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()
