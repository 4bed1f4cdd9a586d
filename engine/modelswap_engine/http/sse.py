"""Server-sent events with bounds: a reader that stops reading does not hold memory or a request for ever."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from typing import TypeVar

from aiohttp import web

T = TypeVar("T")

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class EventStream:
    """One open event stream.

    Each write waits until the client's socket took it (bounded by aiohttp's high-water mark), at most
    ``write_seconds``; then the client counts as gone and :class:`ConnectionResetError` is raised.
    """

    def __init__(self, request: web.Request, *, headers: dict[str, str] | None = None, write_seconds: float) -> None:
        self._request = request
        self._response = web.StreamResponse(headers={**HEADERS, **(headers or {})})
        self._write_seconds = write_seconds

    @property
    def response(self) -> web.StreamResponse:
        """The response to return from the handler."""
        return self._response

    async def open(self) -> None:
        """Send the headers."""
        await self._response.prepare(self._request)

    async def data(self, payload: bytes) -> None:
        """Send one event of one line of data."""
        await self._write(b"data: " + payload + b"\n\n")

    async def event(self, payload: bytes, *, identity: str, name: str) -> None:
        """Send one named event with an id."""
        await self._write(f"id: {identity}\nevent: {name}\ndata: ".encode() + payload + b"\n\n")

    async def comment(self, text: str) -> None:
        """Send a comment, which keeps proxies from closing a quiet stream."""
        await self._write(f": {text}\n\n".encode())

    async def close(self) -> None:
        """End the stream."""
        await self._bounded(self._response.write_eof())

    async def _write(self, data: bytes) -> None:
        await self._bounded(self._response.write(data))

    async def _bounded(self, writing: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(self._write_seconds):
                await writing
        except TimeoutError:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ConnectionResetError("the client stopped reading") from None


async def with_heartbeats(items: AsyncIterator[T], *, seconds: float) -> AsyncGenerator[T | None]:
    """Yield the items, and None whenever nothing came for ``seconds``."""
    pending: asyncio.Task[T] | None = None
    try:
        while True:
            if pending is None:
                pending = asyncio.ensure_future(_next(items))
            done, _ = await asyncio.wait({pending}, timeout=seconds)
            if not done:
                yield None
                continue
            task, pending = pending, None
            try:
                item = task.result()
            except StopAsyncIteration:
                return
            yield item
    finally:
        if pending is not None:
            pending.cancel()
            await asyncio.wait({pending})
        if isinstance(items, AsyncGenerator):
            await items.aclose()


async def _next(items: AsyncIterator[T]) -> T:
    return await anext(items)
