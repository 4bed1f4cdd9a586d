"""What an engine's own container asks of its sidecar: may it live on, and may it end now.

``GET /engine-livez``   the liveness probe of the engine's container. It fails only while a restart of the engine is
                        wanted and allowed, and the start that must end has not ended: a sidecar cannot restart its
                        neighbour, the kubelet can, and it would go on killing one that takes its time to come up.
``POST /engine-drain``  the preStop hook of the engine's container (``backends.drain``). It answers when no request is
                        left, so that the engine outlives them. It needs the engine's admin key, which only the
                        container itself can read: whoever else calls could take a pod out of service.

The kubelet runs a preStop hook before every end of a container, a failed liveness probe's too. So a hook drains the pod
unless the engine is to be replaced; and where a sidecar drained, or was quarantined, and the engine starts once more
after all, the sidecar ends as well and begins anew.
"""

import asyncio
import hmac
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Final

import structlog
from aiohttp import web

from modelswap_engine.backends.external.handshake import Boot, UntrustedError
from modelswap_engine.protocol.errors import Unauthenticated
from modelswap_engine.swap.clock import Clock

LIVEZ: Final = "/engine-livez"
DRAIN: Final = "/engine-drain"
_POLL_SECONDS: Final = 1.0

_log = structlog.get_logger("modelswap.http")


@dataclass(frozen=True, kw_only=True)
class EngineCase:
    """What is known of the engine when one of its routes is asked.

    Attributes:
        wanted: why a restart of the engine is wanted, "" while it is not.
        quarantined: True while neither version could be proved, and nobody is loading one.
        allowed: True unless ``recovery`` says that a person shall decide.
        start: the start of the engine that must end, by its own name; "" where it was not known.
    """

    wanted: str
    quarantined: bool
    allowed: bool
    start: str = ""

    @property
    def must_go(self) -> str:
        """Why the engine's container must be restarted, "" while it must not."""
        if not self.allowed:
            return ""
        return self.wanted or ("quarantined: neither version could be proved" if self.quarantined else "")

    @property
    def drains(self) -> bool:
        """True when the end of the engine's container means the end of the pod.

        An engine that is to be replaced has no requests worth waiting for: they were ended when it was given up.
        """
        return not self.must_go


def begins_anew(*, before: str, now: str) -> bool:
    """Say whether the engine was started again, given its boot ids ("" while it does not run) before and now."""
    return bool(now) and now != before


class EngineRoutes:
    """Handlers of both routes.

    Args:
        case: tells what is known of the engine.
        boot: reads the engine's present start, None while it does not run; may block.
        drain: leaves the endpoints, and returns when no request is left or the time is up.
        clock: time.
        start_seconds: how long a start of the engine may take to come up.
    """

    def __init__(
        self,
        *,
        case: Callable[[], Coroutine[None, None, EngineCase]],
        boot: Callable[[], Boot | None],
        drain: Callable[[], Coroutine[None, None, None]],
        clock: Clock,
        start_seconds: float,
    ) -> None:
        self._case, self._boot, self._drain, self._clock = case, boot, drain, clock
        self._draining: asyncio.Task[None] | None = None
        self._running = ""
        self._condemned: tuple[str, str] | None = None
        self._coming = ("", 0.0)
        self._start_seconds = start_seconds

    def routes(self) -> list[web.RouteDef]:
        """Return the route table."""
        return [web.get(LIVEZ, self.livez), web.post(DRAIN, self.drain)]

    async def livez(self, _: web.Request) -> web.Response:
        """Say whether the engine's container may go on."""
        boot = await self._started()
        case = await self._case()
        if not self._must_end(case, boot.boot_id if boot is not None else ""):
            return web.Response(text=f"started again, not up yet: {case.must_go}\n" if case.must_go else "ok\n")
        return web.Response(text=f"restart: {case.must_go}\n", status=503)

    def _must_end(self, case: EngineCase, now: str) -> bool:
        """Say whether the start that runs is the one that must end: the one that ran when that came to be wanted."""
        overdue = self._overdue(now)
        if not case.must_go:
            self._running, self._condemned = now, None
        elif self._condemned is None:
            self._condemned = (case.start, self._running or now)
        elif self._condemned[0] != case.start or overdue:
            self._condemned = (case.start, now)
        return self._condemned is not None and self._condemned[1] == now

    def _overdue(self, now: str) -> bool:
        """Say whether this start was there for so long that it had to come up, if something was still wanted of it."""
        if self._coming[0] != now:
            self._coming = (now, self._clock.monotonic())
        return bool(now) and self._clock.monotonic() - self._coming[1] > self._start_seconds

    async def drain(self, request: web.Request) -> web.Response:
        """Wait until the engine may end; a caller that goes away ends nothing."""
        boot = await self._started()
        given = request.headers.get("Authorization", "")
        if boot is None or not hmac.compare_digest(given.encode(), f"Bearer {boot.admin_key}".encode()):
            raise Unauthenticated(
                f"{DRAIN} needs the admin key of the running engine",
                advice="call it in the engine's container: python3 -m modelswap_engine.backends.drain",
            )
        if not (await self._case()).drains:
            _log.info("the engine ends because it is to be replaced; nothing is drained")
            return web.Response(text="not drained: the engine is to be replaced\n")
        if self._draining is None:
            _log.info("the engine is about to end: draining")
            self._draining = asyncio.create_task(self._drain())
        await asyncio.shield(self._draining)
        return web.Response(text="drained\n")

    async def begun_anew(self) -> None:
        """Return when this sidecar must end because the engine was started again after all."""
        before: str | None = None
        while True:
            boot = await self._started()
            now = boot.boot_id if boot is not None else ""
            case = await self._case()
            self._must_end(case, now)  # looked at now and then, so that it is known which start a wish came up in
            over = self._draining is not None or case.quarantined
            if not over or before is None:
                before = now
            elif begins_anew(before=before, now=now):
                return
            await self._clock.sleep(_POLL_SECONDS)

    async def _started(self) -> Boot | None:
        try:
            return await asyncio.to_thread(self._boot)
        except UntrustedError as error:
            _log.warning("the engine's start is not believed", reason=str(error))
            return None
