"""The routes of the control port under ``/modelswap/v1``: parse, call the coordinator, answer.

Decisions are the coordinator's; this module only speaks HTTP for it. A client that goes away cancels nothing:
cancelling is a call of its own.
"""

import asyncio
from collections.abc import Callable
from contextlib import aclosing, closing

import structlog
from aiohttp import web
from msgspec import structs

from modelswap_engine.http.bodies import json_response, read_body
from modelswap_engine.http.metrics import Metrics
from modelswap_engine.http.sse import EventStream, with_heartbeats
from modelswap_engine.http.telemetry import SwapSpans
from modelswap_engine.protocol.codec import encode
from modelswap_engine.protocol.errors import BadRequest
from modelswap_engine.protocol.looking import LookRequest
from modelswap_engine.protocol.messages import (
    CancelRequest,
    CheckRequest,
    HoldRequest,
    PauseRequest,
    PlanRequest,
    ProceedRequest,
    ReleaseRequest,
    ResumeRequest,
    RollbackRequest,
    SwapRequest,
    SwapStatus,
)
from modelswap_engine.protocol.prefetch import PrefetchRequest
from modelswap_engine.protocol.version import CONTROL_PREFIX
from modelswap_engine.swap.coordinator import Coordinator

HEARTBEAT_SECONDS = 15.0
WRITE_SECONDS = 30.0
MAX_BODY_BYTES = 1024 * 1024

_log = structlog.get_logger("modelswap.control")


class ControlPort:
    """Handlers of the control routes."""

    def __init__(self, *, coordinator: Coordinator, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._coordinator = coordinator
        self._metrics = metrics
        self._clock = clock
        self._followed: dict[str, asyncio.Task[None]] = {}

    def routes(self) -> list[web.RouteDef]:
        """Return the route table."""
        return [
            web.get(f"{CONTROL_PREFIX}/state", self.state),
            web.post(f"{CONTROL_PREFIX}/plan", self.plan),
            web.post(f"{CONTROL_PREFIX}/look", self.look),
            web.post(f"{CONTROL_PREFIX}/swaps", self.swap),
            web.get(f"{CONTROL_PREFIX}/swaps/{{id}}", self.operation),
            web.get(f"{CONTROL_PREFIX}/swaps/{{id}}/events", self.events),
            web.post(f"{CONTROL_PREFIX}/swaps/{{id}}/cancel", self.cancel),
            web.post(f"{CONTROL_PREFIX}/swaps/{{id}}/hold", self.hold),
            web.post(f"{CONTROL_PREFIX}/swaps/{{id}}/proceed", self.proceed),
            web.post(f"{CONTROL_PREFIX}/rollback", self.rollback),
            web.post(f"{CONTROL_PREFIX}/prefetch", self.prefetch),
            web.post(f"{CONTROL_PREFIX}/check", self.check),
            web.post(f"{CONTROL_PREFIX}/release", self.release),
            web.post(f"{CONTROL_PREFIX}/pause", self.pause),
            web.post(f"{CONTROL_PREFIX}/resume", self.resume),
        ]

    async def state(self, request: web.Request) -> web.Response:
        """Show everything; ``If-None-Match`` with the current ETag gets 304."""
        etag = self._coordinator.etag()
        if request.headers.get("If-None-Match") == etag:
            return web.Response(status=304, headers={"ETag": etag})
        state = structs.replace(self._coordinator.state(), answers=self._metrics.answers.counts())
        return json_response(state, headers={"ETag": etag, "Cache-Control": "no-store"})

    async def plan(self, request: web.Request) -> web.Response:
        """Compute what a swap would do."""
        return json_response(await self._coordinator.plan(await read_body(request, PlanRequest)))

    async def look(self, request: web.Request) -> web.Response:
        """Look whether the source of the live version still holds it."""
        return json_response(await self._coordinator.look(await read_body(request, LookRequest)))

    async def swap(self, request: web.Request) -> web.Response:
        """Accept a swap; it goes on after the answer."""
        order = await read_body(request, SwapRequest)
        return self._accepted(await self._coordinator.swap(order, if_match=_if_match(request)))

    async def rollback(self, request: web.Request) -> web.Response:
        """Accept going back to the retained previous version."""
        order = await read_body(request, RollbackRequest)
        return self._accepted(await self._coordinator.rollback(order, if_match=_if_match(request)))

    async def operation(self, request: web.Request) -> web.Response:
        """Show one operation."""
        return json_response(self._coordinator.operation(request.match_info["id"]))

    async def cancel(self, request: web.Request) -> web.Response:
        """Cancel one operation while it can still be cancelled."""
        order = await read_body(request, CancelRequest, empty=True)
        return json_response(await self._coordinator.cancel(request.match_info["id"], order))

    async def hold(self, request: web.Request) -> web.Response:
        """Renew the lease of an operation that waits."""
        order = await read_body(request, HoldRequest)
        return json_response(await self._coordinator.hold(request.match_info["id"], order))

    async def proceed(self, request: web.Request) -> web.Response:
        """Let an operation that waits go on."""
        order = await read_body(request, ProceedRequest, empty=True)
        return json_response(await self._coordinator.proceed(request.match_info["id"], order))

    async def prefetch(self, request: web.Request) -> web.Response:
        """Have versions fetched ahead of their time; what is told is how far each has come."""
        return json_response(self._coordinator.prefetch(await read_body(request, PrefetchRequest)))

    async def check(self, request: web.Request) -> web.Response:
        """Re-hash live tensors."""
        return json_response(await self._coordinator.check(await read_body(request, CheckRequest, empty=True)))

    async def release(self, request: web.Request) -> web.Response:
        """Give up the retained previous version."""
        return json_response(await self._coordinator.release(await read_body(request, ReleaseRequest, empty=True)))

    async def pause(self, request: web.Request) -> web.Response:
        """Hold new requests by lease."""
        return json_response(await self._coordinator.leases.take(await read_body(request, PauseRequest)))

    async def resume(self, request: web.Request) -> web.Response:
        """Give a lease back."""
        return json_response(await self._coordinator.leases.give_back(await read_body(request, ResumeRequest)))

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Stream the states of one operation until it ends; ``Last-Event-ID`` skips what was seen."""
        identity = request.match_info["id"]
        self._coordinator.operation(identity)
        seen = _last_seen(request)
        stream = EventStream(request, write_seconds=WRITE_SECONDS)
        await stream.open()
        async with aclosing(with_heartbeats(self._coordinator.watch(identity), seconds=HEARTBEAT_SECONDS)) as items:
            async for status in items:
                if status is None:
                    await stream.comment("waiting")
                elif status.seq > seen or status.state.terminal:
                    await stream.event(encode(status), identity=str(status.seq), name="status")
        await stream.close()
        return stream.response

    async def close(self, _: web.Application) -> None:
        """Stop following operations."""
        for task in list(self._followed.values()):
            task.cancel()
        await asyncio.gather(*self._followed.values(), return_exceptions=True)

    def _accepted(self, status: SwapStatus) -> web.Response:
        identity = status.operation_id
        if not status.state.terminal and identity not in self._followed:
            task = asyncio.create_task(self._follow(identity))
            self._followed[identity] = task
            task.add_done_callback(lambda _: self._followed.pop(identity, None))
        return json_response(status, status=202, headers={"Location": f"{CONTROL_PREFIX}/swaps/{identity}"})

    async def _follow(self, identity: str) -> None:
        """Measure and trace the phases of one operation, and log how it ended."""
        before: SwapStatus | None = None
        since = self._clock()
        with closing(SwapSpans()) as spans:
            async for status in self._coordinator.watch(identity):
                spans.see(status)
                waited = before is not None and before.hold is not None and before.hold.held
                if before is not None and (waited or status.state is not before.state):
                    now = self._clock()
                    if not waited:  # how long it was held says nothing about the engine
                        self._metrics.phase(before.state, now - since)
                    since = now
                before = status
        if before is not None and before.state.terminal:
            self._metrics.finished(before)
            error = before.error.code if before.error is not None else ""
            _log.info(
                "operation ended",
                operation=identity,
                state=before.state.value,
                digest=before.target.digest,
                error=error,
                seconds=before.total_seconds,
            )


def _if_match(request: web.Request) -> str | None:
    """Return the state the caller decided on; ``*`` asks for nothing."""
    value = request.headers.get("If-Match")
    return None if value is None or value.strip() == "*" else value.strip()


def _last_seen(request: web.Request) -> int:
    value = request.headers.get("Last-Event-ID")
    if value is None:
        return -1
    if not value.isascii() or not value.isdigit() or len(value) > 18:
        raise BadRequest("Last-Event-ID is not a sequence number", advice="leave it out to see everything")
    return int(value)
