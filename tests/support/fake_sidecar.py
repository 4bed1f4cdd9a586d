"""A pod's control port without an engine: the protocol's real messages and the engine's real fencing, over HTTP.

A stand-in for tests of the operator's client and loops only. It holds one version, walks through the states of a swap
in small steps, and knows what each checkpoint URI "contains" from a table; its adapters are those of `sim_adapters`.
Tokens are read, not verified: that is tested where they are verified.
"""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec
from aiohttp import web

from modelswap_engine.protocol.adapter_calls import AssignAdaptersRequest, ResolveAdaptersRequest
from modelswap_engine.protocol.codec import decode, encode
from modelswap_engine.protocol.engine_state import AnswerCount, EngineState, RankState
from modelswap_engine.protocol.errors import (
    Busy,
    ErrorBody,
    ModelswapError,
    NotFound,
    SignatureMissing,
    SourceNotFound,
    Unauthenticated,
    from_body,
)
from modelswap_engine.protocol.holding import HoldState
from modelswap_engine.protocol.looking import LookRequest, SourceLook
from modelswap_engine.protocol.messages import (
    HoldRequest,
    Plan,
    PlanRequest,
    ProceedRequest,
    SwapRequest,
    SwapStatus,
    VersionRef,
)
from modelswap_engine.protocol.states import SwapState
from modelswap_engine.protocol.version import CONTROL_PREFIX, HOLDS_SINCE, OLDEST_SUPPORTED
from modelswap_engine.swap import fence as fences
from tests.support.sim_adapters import SimAdapters

PATH = (
    SwapState.FETCHING,
    SwapState.STAGED,
    SwapState.PREPARED,
    SwapState.PAUSING,
    SwapState.COMMITTING,
    SwapState.COMMITTED,
    SwapState.VERIFIED,
    SwapState.SERVING,
)


@dataclass(frozen=True)
class Content:
    """What is at a URI: a digest, or a refusal; `late` is refused by the swap only, and `signed_by` is who vouches."""

    digest: str = ""
    refused: ErrorBody | None = None
    late: ErrorBody | None = None
    signed_by: str = ""
    provenance: dict[str, str] = field(default_factory=dict)


@dataclass
class FakeSidecar:
    """One pod's sidecar. `hold_at` stops a swap in a state until `go` is set; `audience` is checked in `tokens`."""

    pod_uid: str
    contents: dict[str, Content]
    live: VersionRef | None
    audience: str | None = None
    step_seconds: float = 0.005
    hold_at: SwapState | None = None
    reason: str = ""
    on_call: Callable[[str], None] = lambda call: None
    adapters: SimAdapters | None = None
    protocol: int = OLDEST_SUPPORTED
    calls: list[str] = field(default_factory=list)
    swaps: list[SwapRequest] = field(default_factory=list)
    boot_id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        self.go = asyncio.Event()
        self.tokens: set[str] = set()
        self.seq = 0
        self.accepted: fences.Accepted | None = None
        self.operations: dict[str, SwapStatus] = {}
        self.operation: SwapStatus | None = None
        self.answers: dict[str, AnswerCount] = {}
        self._cancelled: set[str] = set()
        self._told: dict[str, asyncio.Event] = {}
        self._until = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._runner: web.AppRunner | None = None

    # Life

    async def start(self, host: str, port: int, *, tls: ssl.SSLContext | None = None) -> int:
        app = web.Application(middlewares=[self._guard])
        app.add_routes(
            [
                web.get(f"{CONTROL_PREFIX}/state", self._state),
                web.post(f"{CONTROL_PREFIX}/plan", self._plan),
                web.post(f"{CONTROL_PREFIX}/look", self._look),
                web.post(f"{CONTROL_PREFIX}/swaps", self._swap),
                web.put(f"{CONTROL_PREFIX}/adapters", self._assign),
                web.post(f"{CONTROL_PREFIX}/adapters/resolve", self._resolve),
                web.post(f"{CONTROL_PREFIX}/adapters/look", self._look_at_adapter),
                web.post(f"{CONTROL_PREFIX}/swaps/{{id}}/cancel", self._cancel),
                web.post(f"{CONTROL_PREFIX}/swaps/{{id}}/hold", self._renew),
                web.post(f"{CONTROL_PREFIX}/swaps/{{id}}/proceed", self._proceed),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port, ssl_context=tls).start()
        return int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def restart(self, serving: VersionRef | None) -> None:
        """A new process: another boot id, nothing in flight."""
        self.boot_id = uuid.uuid4().hex
        self.seq += 1
        self.operation = None
        self.answers = {}
        self.live = serving

    def state(self) -> EngineState:
        proved = self.live.digest if self.live is not None else ""
        return EngineState(
            protocol_version=self.protocol,
            pod_uid=self.pod_uid,
            boot_id=self.boot_id,
            seq=self.seq,
            ready=self.live is not None,
            owner_uid=self.accepted.owner_uid if self.accepted else "",
            epoch=self.accepted.epoch if self.accepted else 0,
            revision=self.accepted.revision if self.accepted else 0,
            live=self.live,
            operation=self._shown(),
            answers=list(self.answers.values()),
            ranks=[RankState(rank=0, boot_id=self.boot_id, alive=True, digest=proved)],
            adapters=self.adapters.view(proved) if self.adapters is not None else None,
        )

    def answer(self, *, ok: int = 0, failed: int = 0) -> None:
        """Clients have asked for what is live."""
        assert self.live is not None
        before = self.answers.get(self.live.digest, AnswerCount(digest=self.live.digest))
        self.answers[self.live.digest] = msgspec.structs.replace(
            before, answered=before.answered + ok, failed=before.failed + failed
        )

    # Routes

    @web.middleware
    async def _guard(self, request: web.Request, handler: web.Handler) -> web.StreamResponse:
        call = f"{request.method} {request.path.removeprefix(CONTROL_PREFIX)}"
        self.calls.append(call)
        self.on_call(call)
        try:
            self._authenticate(request)
            return await handler(request)
        except ModelswapError as error:
            return web.Response(status=error.status, body=encode(error.envelope()), content_type="application/json")

    def _authenticate(self, request: web.Request) -> None:
        if self.audience is None:
            return
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        try:
            part = token.split(".")[1]
            claims = json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
        except (IndexError, ValueError):
            raise Unauthenticated("no token, or not one") from None
        self.tokens.add(token)
        if self.audience not in claims["aud"]:
            raise Unauthenticated(f"the token is for {claims['aud']}, this is {self.audience}")

    async def _state(self, request: web.Request) -> web.Response:
        if self.adapters is not None and self.live is not None:
            for _ in range(10):  # some loads between two looks
                self.adapters.tick(self.live.digest)
        return _json(self.state())

    async def _assign(self, request: web.Request) -> web.Response:
        assert self.adapters is not None
        self.seq += 1
        self.adapters.assign(decode(await request.read(), AssignAdaptersRequest))
        return _json(self.state().adapters)

    async def _resolve(self, request: web.Request) -> web.Response:
        assert self.adapters is not None
        return _json(self.adapters.resolve(decode(await request.read(), ResolveAdaptersRequest).sources))

    async def _look_at_adapter(self, request: web.Request) -> web.Response:
        assert self.adapters is not None
        return _json(self.adapters.look(decode(await request.read(), LookRequest)))

    async def _look(self, request: web.Request) -> web.Response:
        target = decode(await request.read(), LookRequest).target
        found = self._content(target).digest
        return _json(SourceLook(found=found if found != target.digest else ""))

    async def _plan(self, request: web.Request) -> web.Response:
        order = decode(await request.read(), PlanRequest)
        content = self._content(order.target)
        refusals = [content.refused] if content.refused is not None else []
        if order.target.digest not in ("", content.digest):
            refusals = [ErrorBody(code="DigestMismatch", message=f"{order.target.uri} is {content.digest}")]
        return _json(
            Plan(
                from_digest=self.live.digest if self.live else "",
                to_digest=content.digest,
                changed_tensors=2,
                changed_bytes=200,
                total_tensors=10,
                total_bytes=1000,
                bytes_to_fetch=200,
                refusals=refusals,
                signed_by=content.signed_by,
                provenance=content.provenance,
            )
        )

    async def _swap(self, request: web.Request) -> web.Response:
        order = decode(await request.read(), SwapRequest)
        known = self.operations.get(order.operation_id)
        if known is None:
            known = self._accept(order, request.headers.get("If-Match"))
        return web.Response(status=202, body=encode(known), content_type="application/json")

    def _accept(self, order: SwapRequest, if_match: str | None) -> SwapStatus:
        fences.check_pod(order.fence, self.pod_uid)
        fences.check_match(if_match, f'"{self.boot_id}.{self.seq}"')
        fences.check_order(order.fence, self.accepted, target=order.target)
        if self.operation is not None and not self.operation.state.terminal:
            raise Busy(f"operation {self.operation.operation_id} is in progress")
        self.swaps.append(order)
        self.accepted = fences.accept(order.fence, self.accepted, operation_id=order.operation_id, target=order.target)
        status = SwapStatus(operation_id=order.operation_id, revision=order.fence.revision, target=order.target)
        if order.hold is not None:
            assert self.protocol >= HOLDS_SINCE, "an old sidecar would not wait"
            self._told[order.operation_id] = asyncio.Event()
            self._until = time.monotonic() + order.hold.seconds
            status = msgspec.structs.replace(status, hold=HoldState(mark=order.hold.mark))
        self._show(status)
        task = asyncio.get_running_loop().create_task(self._walk(status))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return status

    async def _cancel(self, request: web.Request) -> web.Response:
        status = self.operations.get(request.match_info["id"])
        if status is None:
            raise NotFound("no such operation")
        if not status.state.terminal and not status.state.reversible:
            raise Busy(f"{status.operation_id} is {status.state}")
        self._cancelled.add(status.operation_id)
        self.go.set()
        if status.operation_id in self._told:
            self._told[status.operation_id].set()
        return _json(status)

    def _shown(self) -> SwapStatus | None:
        """Return the operation with what is left of its lease."""
        status = self.operation
        if status is None or status.hold is None or status.state.terminal:
            return status
        hold = msgspec.structs.replace(status.hold, seconds_left=max(0.0, self._until - time.monotonic()))
        return msgspec.structs.replace(status, hold=hold)

    def _found(self, request: web.Request) -> SwapStatus:
        status = self.operations.get(request.match_info["id"])
        if status is None:
            raise NotFound("no such operation")
        return status

    async def _renew(self, request: web.Request) -> web.Response:
        order, status = decode(await request.read(), HoldRequest), self._found(request)
        fences.check_pod(order.fence, self.pod_uid)
        fences.check_control(order.fence, self.accepted)
        self._until = time.monotonic() + order.seconds
        return _json(status)

    async def _proceed(self, request: web.Request) -> web.Response:
        order, status = decode(await request.read(), ProceedRequest), self._found(request)
        fences.check_pod(order.fence, self.pod_uid)
        if status.state.terminal or status.hold is None:
            return _json(status)
        fences.check_order(order.fence, self.accepted, target=status.target)
        self.accepted = fences.accept(
            order.fence, self.accepted, operation_id=status.operation_id, target=status.target
        )
        status = msgspec.structs.replace(status, hold=None, revision=order.fence.revision, seq=status.seq + 1)
        self._show(status)
        self._told[status.operation_id].set()
        return _json(status)

    # The swap

    async def _walk(self, status: SwapStatus) -> None:
        content = self._content(status.target)
        for state in PATH:
            if self.hold_at is state:
                await self.go.wait()
            await asyncio.sleep(self.step_seconds)
            if status.operation_id in self._cancelled and status.state.reversible:
                self._abort(status, ErrorBody(code="Cancelled", message="cancelled by a call", retryable=True))
                return
            if state is SwapState.STAGED and (error := content.refused or content.late) is not None:
                self._abort(status, error)
                return
            if state is SwapState.PREPARED and not await self._wait(status.operation_id):
                return
            status = self.operations[status.operation_id]
            if state is SwapState.SERVING:
                self.live = status.target
            status = msgspec.structs.replace(
                status,
                state=state,
                bytes_fetched=200,
                staging_seconds=2.0,
                commit_window_microseconds=120.4,
                seq=status.seq + 1,
            )
            self._show(status)

    async def _wait(self, operation_id: str) -> bool:
        """Wait, where that was asked for, until it is told to go on; False when it was given up."""
        status, told = self.operations[operation_id], self._told.get(operation_id)
        if told is None:
            return True
        if status.hold is not None:
            hold = msgspec.structs.replace(status.hold, held=True)
            self._show(msgspec.structs.replace(status, hold=hold, seq=status.seq + 1))
        while not told.is_set() and time.monotonic() < self._until:
            with suppress(TimeoutError):
                await asyncio.wait_for(told.wait(), self._until - time.monotonic())
        status = self.operations[operation_id]
        if operation_id in self._cancelled:
            self._abort(status, ErrorBody(code="Cancelled", message="cancelled by a call", retryable=True))
        elif not told.is_set():
            self._abort(status, ErrorBody(code="HoldEnded", message="nobody renewed the lease", retryable=True))
        return not self.operations[operation_id].state.terminal

    def _abort(self, status: SwapStatus, error: ErrorBody) -> None:
        self._show(msgspec.structs.replace(status, state=SwapState.ABORTED, error=error, seq=status.seq + 1))

    def _content(self, target: VersionRef) -> Content:
        content = self.contents.get(target.uri)
        if content is None:
            raise SourceNotFound(f"nothing is at {target.uri}", advice="check spec.source.uri")
        if content.refused is not None and not content.digest:
            raise from_body(content.refused)
        if target.verification is not None and target.verification.required and not content.signed_by:
            raise SignatureMissing(f"{target.uri} has no signature beside its manifest", advice="sign it")
        return content

    def _show(self, status: SwapStatus) -> None:
        self.seq += 1
        self.operation = self.operations[status.operation_id] = status


def _json(message: object) -> web.Response:
    return web.Response(body=encode(message), content_type="application/json")
