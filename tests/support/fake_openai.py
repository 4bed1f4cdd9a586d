"""An OpenAI-compatible server that misbehaves on purpose, one scripted reply after another.

Refuses to know what a client makes of it.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web
from aiohttp.test_utils import TestServer

OLD, NEW = "sha256:" + "a" * 64, "sha256:" + "b" * 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What one request gets.

    Attributes:
        status: an HTTP error instead of an answer, unless 200.
        fingerprints: per piece of text, the digest that its chunk names; the header's when empty.
        spans: digests listed by the last chunk.
        error: sent as an event in the stream after the text.
        cut: ``reset`` ends the connection, ``early`` ends the body, both after the text and before the last chunk.
        close: asks the client to open another connection next time.
    """

    pieces: tuple[str, ...] = ("Hello", " there")
    version: str = "1.0"
    digest: str = OLD
    status: int = 200
    fingerprints: tuple[str, ...] = ()
    spans: tuple[str, ...] = ()
    error: str = ""
    cut: str = ""
    close: bool = False


@dataclass(slots=True)
class Script:
    """The replies, in order; the last one is given again and again."""

    replies: Sequence[Reply]
    asked: list[dict[str, object]] = field(default_factory=list)
    connections: set[int] = field(default_factory=set)

    def next(self) -> Reply:
        """Return the reply to the request that was just noted."""
        return self.replies[min(len(self.asked), len(self.replies)) - 1]

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Handle one chat completion."""
        self.asked.append(await request.json())
        self.connections.add(id(request.transport))
        reply = self.next()
        if reply.status != 200:
            body = {"error": {"message": "the gate is closed", "code": "paused"}}
            return web.json_response(body, status=reply.status)
        response = web.StreamResponse(
            headers={
                "content-type": "text/event-stream",
                "x-modelswap-version": reply.version,
                "x-modelswap-digest": reply.digest,
            }
        )
        if reply.close:
            response.force_close()
        await response.prepare(request)
        for event in _events(reply):
            await response.write(f"data: {event}\n\n".encode())
        if reply.cut == "reset" and request.transport is not None:
            request.transport.abort()
        return response


def _events(reply: Reply) -> Iterator[str]:
    marks = reply.fingerprints or (reply.digest,) * len(reply.pieces)
    for piece, mark in zip(reply.pieces, marks, strict=True):
        yield _chunk(piece, mark)
    if reply.error:
        yield json.dumps({"error": {"message": reply.error, "code": "Interrupted"}})
    elif not reply.cut:
        yield _chunk("", marks[-1], finish="stop", spans=reply.spans)
    if not reply.cut:
        yield "[DONE]"


def _chunk(text: str, digest: str, *, finish: str | None = None, spans: Sequence[str] = ()) -> str:
    body: dict[str, object] = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "fake",
        "system_fingerprint": f"fp_{digest.removeprefix('sha256:')[:12]}",
        "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}],
    }
    if spans:
        body["modelswap"] = {"spans": [{"version": "", "digest": span, "tokens": 1} for span in spans]}
    return json.dumps(body)


@asynccontextmanager
async def fake_openai(*replies: Reply) -> AsyncIterator[tuple[str, Script]]:
    """Serve the replies on loopback; yields the URL and the script with what was asked."""
    script = Script(replies)
    app = web.Application()
    app.router.add_post("/v1/chat/completions", script.answer)
    async with TestServer(app) as server:
        yield str(server.make_url("/")), script
