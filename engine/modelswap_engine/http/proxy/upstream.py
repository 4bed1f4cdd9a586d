"""Requests to the engine: a pool of connections, every wait bounded, every failure typed.

A request whose answer is not read to its end loses its connection, by which the engine learns that nobody reads it.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from aiohttp import ClientError, ClientPayloadError
from aiohttp.http import RawResponseMessage
from aiohttp.http_exceptions import HttpProcessingError
from multidict import CIMultiDictProxy

from modelswap_engine.http.proxy.connection import Connection, head_of
from modelswap_engine.protocol.errors import ModelswapError, Unavailable, WorkerLost

_LOOK_SECONDS: Final = 1.0
"""How often silent bodies and idle connections are looked at, at least."""
_LOOKS: Final = 4
"""How often at least within the time that a body may be silent."""


class BadAnswer(Unavailable):
    """The engine's answer is not HTTP, or not whole."""

    code = "bad_gateway"
    status = 502


class Silent(Unavailable):
    """The engine has said nothing for too long."""

    code = "gateway_timeout"
    status = 504


@dataclass(frozen=True, kw_only=True)
class UpstreamSettings:
    """Where the engine is, and how long it may take.

    Attributes:
        url: of its port, without a path.
        connect_seconds: until it takes a connection.
        silent_seconds: from one byte of an answer to the next, and to the end of the head.
        idle_seconds: how long an unused connection is kept; shorter than the engine keeps it, so that it is the side
            which closes.
    """

    url: str
    connect_seconds: float = 5.0
    silent_seconds: float = 600.0
    idle_seconds: float = 2.0


class Upstream:
    """The engine's port; use it as a context.

    Args:
        settings: where and how long.
    """

    def __init__(self, settings: UpstreamSettings) -> None:
        self._settings = settings
        parts = urlsplit(settings.url)
        self.host = parts.netloc
        self._address = (parts.hostname or "", parts.port or 80)
        self._idle: list[Connection] = []
        self._used: set[Connection] = set()
        self._looking: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Upstream":
        self._looking = asyncio.create_task(self._look())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        while self._idle:
            self._idle.pop().abort()

    def call(self) -> "Call":
        """Return a context for one request."""
        return Call(self)

    def kept(self) -> Connection | None:
        """Take an idle connection that still stands, if there is one."""
        while self._idle:
            connection = self._idle.pop()
            if connection.whole:
                self._used.add(connection)
                return connection
            connection.abort()
        return None

    async def connect(self) -> Connection:
        """Take a new connection.

        Raises:
            WorkerLost: the engine does not take one.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._settings.connect_seconds):
                _, connection = await loop.create_connection(lambda: Connection(loop), *self._address)
        except TimeoutError:
            raise WorkerLost("the engine does not take connections", advice="send it again") from None
        except OSError as error:
            raise _typed(error) from None
        self._used.add(connection)
        return connection

    def give_back(self, connection: Connection) -> None:
        """Keep a connection for the next request, if another may follow on it."""
        self._used.discard(connection)
        if connection.whole:
            connection.idle_since = asyncio.get_running_loop().time()
            self._idle.append(connection)
        else:
            connection.abort()

    async def _look(self) -> None:
        """End waits that last too long, and connections that nobody uses."""
        loop, silent = asyncio.get_running_loop(), self._settings.silent_seconds
        while True:
            await asyncio.sleep(min(_LOOK_SECONDS, silent / _LOOKS))
            now = loop.time()
            for connection in self._used:
                if connection.waiting_since is not None and now - connection.waiting_since >= silent:
                    connection.fail(Silent("the engine has not answered for too long", advice="send it again"))
            # The oldest come first, and the last one is used first.
            while self._idle and now - (self._idle[0].idle_since or 0.0) >= self._settings.idle_seconds:
                self._idle.pop(0).abort()


class Call:
    """One request and its answer: a context that has a connection of its own from :meth:`send` on.

    Args:
        upstream: where it goes.
    """

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._connection: Connection | None = None
        self._request = (b"", b"")
        self._kept = False

    def __enter__(self) -> "Call":
        return self

    def __exit__(self, *_: object) -> None:
        if self._connection is not None:
            self._upstream.give_back(self._connection)

    async def send(self, method: str, path: str, *, headers: Iterable[tuple[str, str]] = (), body: bytes = b"") -> None:
        """Send the request.

        Raises:
            BadRequest: a header cannot be sent.
            WorkerLost: the engine is not there.
        """
        head = head_of(method, path, host=self._upstream.host, headers=headers, length=len(body))
        self._request = head, body
        self._connection = self._upstream.kept()
        self._kept = self._connection is not None
        await self._hand_over()

    async def answer(self) -> "Answer":
        """Wait for the head of the answer; its body is read within the context.

        Raises:
            WorkerLost: the engine went away.
            BadAnswer, Silent: see there.
        """
        assert self._connection is not None, "send the request first"  # noqa: S101
        try:
            message = await self._connection.head()
        except (ClientError, HttpProcessingError, OSError) as error:
            if not self._kept or self._connection.heard:
                raise _typed(error) from None
        else:
            self._request = b"", b""
            return Answer(message, self._connection)
        # A kept connection was closed just as it was used: nothing of an answer came, and asking the engine to compute
        # something twice does no harm.
        self._upstream.give_back(self._connection)
        self._kept, self._connection = False, None
        await self._hand_over()
        return await self.answer()

    async def _hand_over(self) -> None:
        if self._connection is None:
            self._connection = await self._upstream.connect()
        try:
            self._connection.send(*self._request)
        except ClientError as error:
            raise _typed(error) from None


class Answer:
    """An answer of which the head is here.

    Attributes:
        status: its status.
        headers: its headers.
    """

    def __init__(self, message: RawResponseMessage, connection: Connection) -> None:
        self.status = message.code
        self.headers: CIMultiDictProxy[str] = message.headers
        self._connection = connection

    async def piece(self) -> bytes:
        """Return what has come of the body, nothing at its end.

        Raises:
            WorkerLost, BadAnswer, Silent: it does not come whole.
        """
        try:
            return await self._connection.piece()
        except (ClientError, OSError) as error:
            raise _typed(error) from None

    async def gathered(self, *, limit: int) -> bytes:
        """Return the whole body.

        Raises:
            BadAnswer: it has more bytes than ``limit``; also what :meth:`piece` raises.
        """
        body = bytearray()
        while piece := await self.piece():
            body += piece
            if len(body) > limit:
                raise BadAnswer(f"the engine's answer has more than {limit} bytes", advice="look at the engine's log")
        return bytes(body)


def _typed(error: Exception) -> ModelswapError:
    """Return what went wrong on a connection to the engine as an error with a meaning."""
    if isinstance(error, ClientPayloadError | HttpProcessingError):
        return BadAnswer(
            f"the engine's answer cannot be read: {type(error).__name__}", advice="look at the engine's log"
        )
    return WorkerLost(f"the connection to the engine was lost: {type(error).__name__}", advice="send it again")
