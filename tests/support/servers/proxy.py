"""A reverse proxy that stands before a real server, counts what it hands out, and does wrong where a rule says so.

Everything else passes unchanged, the Host header too: S3 requests are signed over it, so the endpoint of a client is
the proxy's own address, and the server checks the name that was signed, not its own. Counted are requests, and bytes
of bodies as they go to the client. Refuses to know the protocol that is spoken.
"""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass
from urllib.parse import unquote

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from tests.support.servers.faults import Answer, Dripping, Fault, Reset, Rule, Stalled, Truncated
from tests.support.servers.hosted import Hosted
from tests.support.servers.spoiling import spoiled

_HOP = ("Connection", "Keep-Alive", "Transfer-Encoding", "Upgrade", "Date", "Server")
_SELF_SET = ("Accept", "Accept-Encoding", "User-Agent", "Content-Type")


@dataclass(slots=True)
class Seen:
    """One request and its answer."""

    method: str
    path: str
    """With the query, as it was sent."""
    headers: CIMultiDict[str]
    status: int = 0
    sent: int = 0
    """Bytes of the body that went to the client."""

    @property
    def plain(self) -> str:
        """Return the path and query without quoting: clients quote as they like."""
        return unquote(self.path)

    @property
    def range(self) -> str:
        """Return the range that was asked for."""
        return self.headers.get("Range", "")


class FaultProxy:
    """One proxy before one server, on a port of its own.

    Args:
        upstream: the server's address, without a path.
        tls: serves https with this context.
    """

    def __init__(self, upstream: str, *, tls: ssl.SSLContext | None = None) -> None:
        self._upstream = upstream
        self._rules: list[Rule] = []
        self.seen: list[Seen] = []
        app = web.Application(client_max_size=0)
        app.cleanup_ctx.append(self._client)
        app.router.add_route("*", "/{anything:.*}", self._handle)
        self._hosted = Hosted(app, tls=tls)
        self.url = self._hosted.url
        self.host = f"127.0.0.1:{self._hosted.port}"

    def inject(
        self, fault: Fault, *, path: str = "", method: str = "GET", skip: int = 0, times: int | None = None
    ) -> None:
        """Let requests meet a fault.

        Args:
            fault: what goes wrong.
            path: a pattern that is searched for in the path and query.
            method: of the request.
            skip: so many such requests pass first.
            times: so many meet it; None: all that follow.
        """
        self._rules.append(Rule(fault, method, re.compile(path), skip, times))

    def heal(self) -> None:
        """Do nothing wrong any more."""
        self._rules.clear()

    def forget(self) -> None:
        """Start to count anew."""
        self.seen.clear()

    def asked(self, path: str = "", *, method: str = "GET") -> list[Seen]:
        """Return the requests whose path and query hold a pattern."""
        return [seen for seen in tuple(self.seen) if seen.method == method and re.search(path, seen.plain)]

    def sent(self, path: str = "") -> int:
        """Return how many bytes of bodies went to clients that asked (GET) for such paths."""
        return sum(seen.sent for seen in self.asked(path))

    def close(self) -> None:
        """Stop."""
        self._hosted.close()

    async def _client(self, _: web.Application) -> AsyncIterator[None]:
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=_SELF_SET,
            timeout=aiohttp.ClientTimeout(total=None),
        ) as self._session:
            yield

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        seen = Seen(request.method, request.raw_path, CIMultiDict(request.headers))
        self.seen.append(seen)
        fault = next((rule.fault for rule in tuple(self._rules) if rule.takes(seen.method, seen.plain)), None)
        if isinstance(fault, Answer):
            await request.read()  # who is answered before all is sent may see a reset instead of the answer
            seen.status, seen.sent = fault.status, len(fault.body)
            return web.Response(status=fault.status, headers=fault.headers, body=fault.body)
        if isinstance(fault, Stalled | Reset) and fault.after < 0:
            await _end(request, fault)
        async with self._session.request(
            request.method,
            URL(self._upstream + request.raw_path, encoded=True),
            headers=_passed_on(seen.headers),
            data=request.content if request.can_read_body else None,
            allow_redirects=False,
        ) as answer:
            return await _hand_on(request, answer, seen, fault)


def _passed_on(asked: CIMultiDict[str]) -> CIMultiDict[str]:
    headers = CIMultiDict(asked)
    for name in ("Connection", "Keep-Alive", "Transfer-Encoding"):
        headers.popall(name, None)
    return headers


async def _hand_on(
    request: web.Request, answer: aiohttp.ClientResponse, seen: Seen, fault: Fault | None
) -> web.StreamResponse:
    headers = CIMultiDict(answer.headers)
    for name in _HOP:
        headers.popall(name, None)
    response = web.StreamResponse(status=answer.status, reason=answer.reason, headers=headers)
    body = spoiled(response, answer.content.iter_any(), fault)
    seen.status = response.status
    await response.prepare(request)
    left = fault.after if isinstance(fault, Truncated | Reset | Stalled) else None
    async for data in body:
        piece = data[:left]
        seen.sent += len(piece)  # before who gets it can look
        await response.write(piece)
        if isinstance(fault, Dripping):
            await asyncio.sleep(fault.seconds)
        left = None if left is None else left - len(piece)
        if left == 0:
            await _end(request, fault)
    await response.write_eof()
    return response


async def _end(request: web.Request, fault: Fault | None) -> None:
    """Leave the client alone with what it has, or take the connection away."""
    if isinstance(fault, Stalled):
        await asyncio.Event().wait()  # the handler is cancelled when the client goes away or the proxy is closed
    transport = request.transport
    if transport is not None and isinstance(fault, Reset):
        line = transport.get_extra_info("socket")
        line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()
    elif transport is not None:
        transport.close()
    raise asyncio.CancelledError
