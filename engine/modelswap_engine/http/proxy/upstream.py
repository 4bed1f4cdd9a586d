"""Connections to the engine: a pool of them, every wait bounded, every failure typed.

A request whose answer is not read to its end loses its connection, by which the engine learns that nobody reads it.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Final

import aiohttp

from modelswap_engine.protocol.errors import Unavailable, WorkerLost

_READ_AHEAD: Final = 1 << 16
"""Bytes of an answer that are read before the client has taken them (twice as many at most)."""

_LOOK_SECONDS: Final = 1.0
"""How often bodies of which nothing comes are looked at."""


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
        silent_seconds: from one byte of an answer to the next, and to the first.
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
        self._session: aiohttp.ClientSession | None = None
        self._bodies: set[_Body] = set()
        self._looking: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Upstream":
        settings = self._settings
        self._session = aiohttp.ClientSession(
            base_url=settings.url,
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=settings.idle_seconds),
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=settings.connect_seconds, sock_read=settings.silent_seconds
            ),
            auto_decompress=False,
            read_bufsize=_READ_AHEAD,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        self._looking = asyncio.create_task(self._look())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    @asynccontextmanager
    async def ask(
        self, method: str, path: str, *, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Have the head of the answer to a request; its body is read within the context.

        Raises:
            WorkerLost: the engine is not there, or went away.
            BadAnswer, Silent: see there.
        """
        with typed():
            # An engine that sends heads without end is as silent as one that sends nothing.
            async with asyncio.timeout(self._settings.silent_seconds):
                response = await self._send(method, path, body, headers or {})
        try:
            yield response
        finally:
            response.close()

    async def pieces(self, found: aiohttp.ClientResponse) -> AsyncGenerator[bytes]:
        """Yield a body as it comes.

        Raises:
            WorkerLost, BadAnswer, Silent: it does not come whole.
        """
        body = _Body(found)
        self._bodies.add(body)
        try:
            with typed():
                while piece := await body.next():
                    yield piece
        finally:
            self._bodies.discard(body)

    async def _look(self) -> None:
        """Tell readers of bodies that will never end: one that breaks the protocol closes its connection in silence."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            for body in list(self._bodies):
                body.look()

    async def gathered(self, found: aiohttp.ClientResponse, *, limit: int) -> bytes:
        """Return a whole body.

        Raises:
            BadAnswer: it has more bytes than ``limit``; also what :meth:`pieces` raises.
        """
        body = bytearray()
        async for piece in self.pieces(found):
            body += piece
            if len(body) > limit:
                raise BadAnswer(f"the engine's answer has more than {limit} bytes", advice="look at the engine's log")
        return bytes(body)

    async def _send(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> aiohttp.ClientResponse:
        assert self._session is not None, "use it as a context"  # noqa: S101
        try:
            return await self._session.request(method, path, data=body, headers=headers, allow_redirects=False)
        except aiohttp.ServerDisconnectedError:
            # A kept connection was closed just as it was used: nothing of an answer came, and asking the engine to
            # compute something twice does no harm.
            return await self._session.request(method, path, data=body, headers=headers, allow_redirects=False)


class _Body:
    """The body of one answer, while it is read."""

    def __init__(self, found: aiohttp.ClientResponse) -> None:
        self._found = found
        self._waiting = False

    async def next(self) -> bytes:
        """Wait for more; how long nothing may come is the session's to bound."""
        self._waiting = True
        try:
            return await self._found.content.readany()
        finally:
            self._waiting = False

    def look(self) -> None:
        """Wake a reader for whom nothing can come any more."""
        transport = self._found.connection.transport if self._found.connection is not None else None
        if self._waiting and (transport is None or transport.is_closing()):
            self._found.content.set_exception(
                BadAnswer("the engine's answer broke off", advice="look at the engine's log")
            )


@contextmanager
def typed() -> Iterator[None]:
    """Turn what goes wrong on a connection to the engine into typed errors."""
    try:
        yield
    except aiohttp.ConnectionTimeoutError:
        raise WorkerLost("the engine does not take connections", advice="send it again") from None
    except TimeoutError:
        raise Silent("the engine has not answered for too long", advice="send it again") from None
    except (aiohttp.ClientConnectionError, ConnectionError) as error:
        raise WorkerLost(
            f"the connection to the engine was lost: {type(error).__name__}", advice="send it again"
        ) from None
    except (aiohttp.ClientPayloadError, aiohttp.ClientResponseError, ValueError) as error:
        raise BadAnswer(
            f"the engine's answer cannot be read: {type(error).__name__}", advice="look at the engine's log"
        ) from None
