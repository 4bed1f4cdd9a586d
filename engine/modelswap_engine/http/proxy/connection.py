"""One connection to the engine: aiohttp's protocol of a client, without the session around it.

A session works out for each request what never changes here: cookies, redirects, proxies, addresses. That took most of
what this process added to the time to the first token (ADR 19). What reads an answer stays aiohttp's: the parser with
its limits, and the buffer that stops reading when nobody takes what comes. Refuses to know when a connection is used
again.
"""

import asyncio
import re
from collections.abc import Iterable
from typing import Final

from aiohttp import ClientPayloadError, ServerDisconnectedError, StreamReader
from aiohttp.client_proto import ResponseHandler
from aiohttp.http import RawResponseMessage

from modelswap_engine.protocol.errors import BadRequest

_READ_AHEAD: Final = 1 << 16
"""Bytes of an answer that are read before the client has taken them (twice as many at most)."""
_JOINED: Final = 1 << 16
"""A body of more bytes is not copied to stand behind its head in one write."""
_CONTROL: Final = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_FINAL: Final = 200


class Connection(ResponseHandler):
    """A connection over which requests go one after another.

    Attributes:
        heard: something has come since the last request.
        idle_since: the loop's time since which nobody uses it, None while somebody does.
        waiting_since: the loop's time since which somebody waits for what comes next, None while nobody does.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self.heard = False
        self.idle_since: float | None = None
        self.waiting_since: float | None = None
        self._body: StreamReader | None = None

    def send(self, head: bytes, body: bytes) -> None:
        """Send a request.

        Raises:
            ServerDisconnectedError: the connection is closed.
        """
        if self.transport is None:
            raise ServerDisconnectedError
        self.heard, self.idle_since, self._body = False, None, None
        if len(body) <= _JOINED:
            self.transport.write(head + body)
        else:
            self.transport.write(head)
            self.transport.write(body)
        self.set_response_params(read_until_eof=True, auto_decompress=False, read_bufsize=_READ_AHEAD)

    async def head(self) -> RawResponseMessage:
        """Wait for the head of the answer.

        Raises:
            ClientConnectionError, HttpProcessingError: no answer came, or none that can be read.
        """
        self.waiting_since = self._loop.time()
        try:
            while True:
                message, body = await self.read()
                if message.code >= _FINAL:
                    self._body = body
                    return message
        finally:
            self.waiting_since = None

    async def piece(self) -> bytes:
        """Return what has come of the body, nothing at its end.

        Raises:
            ClientPayloadError: it does not come whole.
        """
        assert self._body is not None, "have the head first"  # noqa: S101
        self.waiting_since = self._loop.time()
        try:
            return await self._body.readany()
        finally:
            self.waiting_since = None

    def fail(self, error: Exception) -> None:
        """Have whoever waits for something fail."""
        (self if self._body is None else self._body).set_exception(error)

    @property
    def whole(self) -> bool:
        """True when request and answer have passed, and nothing else did: the next request may follow."""
        sent = self.transport is not None and not self.transport.get_write_buffer_size()
        return sent and self.is_connected() and self._body is not None and self._body.is_eof() and not self.should_close

    def data_received(self, data: bytes) -> None:
        """Take what came; what comes when nothing was asked for is no answer to the next request."""
        if self.idle_since is not None:
            self.abort()
            return
        self.heard = True
        super().data_received(data)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Tell whoever reads a body that no more of it comes; the parser does not when its protocol was broken."""
        super().connection_lost(exc)
        body = self._body
        if body is not None and not body.is_eof() and body.exception() is None:
            body.set_exception(ClientPayloadError("the answer broke off"))


def head_of(method: str, path: str, *, host: str, headers: Iterable[tuple[str, str]], length: int) -> bytes:
    """Return the head of a request.

    Raises:
        BadRequest: a header cannot be sent.
    """
    fields = [("Host", host), ("Content-Length", str(length)), *headers]
    lines = [f"{name}: {value}" for name, value in fields]
    if _CONTROL.search("".join(lines)) is not None:
        raise BadRequest("a header has control characters", advice="send it without them")
    return "\r\n".join((f"{method} {path} HTTP/1.1", *lines, "\r\n")).encode("utf-8", "surrogateescape")
