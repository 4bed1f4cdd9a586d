"""A canned engine on a loopback socket: it answers what a test wrote, at the pace that the test sets.

It computes nothing, and stands in for an engine only where the proxy's own behaviour is looked at; end-to-end tests run
real engines. :func:`raw_engine` speaks bytes instead of HTTP, for answers that no HTTP library would send.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from modelswap_engine.http.app import listening

Step = bytes | asyncio.Event


@dataclass
class Canned:
    """One answer: bytes are sent, an event is waited for; ``cut`` breaks the connection off at the end."""

    steps: Sequence[Step] = (b'{"object":"text_completion","model":"tiny","choices":[{"text":"hello"}]}',)
    status: int = 200
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)
    before: asyncio.Event | None = None  # waited for before the head of the answer
    cut: bool = False


@dataclass
class Seen:
    """A request as the engine got it."""

    path: str
    body: dict[str, Any]
    headers: Mapping[str, str]
    raw: bytes
    begun: asyncio.Event = field(default_factory=asyncio.Event)  # the first bytes of the answer are out
    gone: asyncio.Event = field(default_factory=asyncio.Event)  # the client went away before the end
    sent: int = 0  # bytes of the answer that were handed to the socket


class CannedEngine:
    """See the module.

    Attributes:
        answers: what the next requests are answered, in order; then ``usual``.
        seen: the requests so far; ``arrived`` is set at each.
        connections: how many were opened.
    """

    def __init__(self) -> None:
        self.answers: list[Canned] = []
        self.usual = Canned()
        self.seen: list[Seen] = []
        self.arrived = asyncio.Event()
        self.peers: set[object] = set()

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._answer)
        return app

    async def next(self, number: int = 1) -> Seen:
        """Wait until so many requests have come, and return the last of them."""
        while len(self.seen) < number:
            self.arrived.clear()
            await self.arrived.wait()
        return self.seen[number - 1]

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        self.peers.add(request.transport.get_extra_info("peername") if request.transport else None)
        seen = Seen(path=request.path, body=json.loads(raw) if raw else {}, headers=request.headers.copy(), raw=raw)
        self.seen.append(seen)
        self.arrived.set()
        canned = self.answers.pop(0) if self.answers else self.usual
        try:
            return await self._play(request, canned, seen)
        except (asyncio.CancelledError, ConnectionResetError):
            seen.gone.set()
            raise

    async def _play(self, request: web.Request, canned: Canned, seen: Seen) -> web.StreamResponse:
        if canned.before is not None:
            await canned.before.wait()
        response = web.StreamResponse(
            status=canned.status, headers={"Content-Type": canned.content_type, **canned.headers}
        )
        await response.prepare(request)
        for step in canned.steps:
            if isinstance(step, asyncio.Event):
                await step.wait()
            else:
                await response.write(step)
                seen.sent += len(step)
                seen.begun.set()
        if canned.cut and request.transport is not None:
            request.transport.abort()
        return response


def event(**fields: Any) -> bytes:
    """Return one server-sent event."""
    return b"data: " + json.dumps(fields, separators=(",", ":")).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def stream(*steps: Step, cut: bool = False) -> Canned:
    """Return a stream of events."""
    return Canned(steps=steps, content_type="text/event-stream; charset=utf-8", cut=cut)


@contextlib.asynccontextmanager
async def canned_engine() -> AsyncIterator[tuple[CannedEngine, str]]:
    """Serve one; yields it and its URL."""
    engine = CannedEngine()
    async with listening(engine.app(), host="127.0.0.1", port=0, cancel_abandoned=True) as port:
        yield engine, f"http://127.0.0.1:{port}"


@contextlib.asynccontextmanager
async def raw_engine(
    answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[str]:
    """Serve a function that gets each connection; yields the URL."""

    answering: set[asyncio.Task[None] | None] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answering.add(asyncio.current_task())
        try:
            await answer(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()
            answering.discard(asyncio.current_task())

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in answering:
            if task is not None:
                task.cancel()
