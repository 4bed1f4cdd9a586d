"""A forward proxy on loopback: CONNECT, and requests in absolute form, one for each connection.

It knows names that nobody else does, as proxies at the edge of a network do, and notes what it is asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from urllib.parse import urlsplit

_READ = 1 << 16


class ConnectProxy:
    """One proxy.

    Attributes:
        names: ``host:port`` → the port on loopback that it leads to; others lead where they say.
        seen: what was asked for, as ``host:port``.
        known: the Proxy-Authorization that is asked for; "" for none.
    """

    def __init__(self) -> None:
        self.names: dict[str, int] = {}
        self.seen: list[str] = []
        self.known = ""
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        with contextlib.suppress(OSError, asyncio.IncompleteReadError), contextlib.closing(writer):
            head = await reader.readuntil(b"\r\n\r\n")
            method, target, _ = head.split(b"\r\n", 1)[0].decode().split(" ")
            tunnel = method == "CONNECT"
            place = target if tunnel else urlsplit(target).netloc
            self.seen.append(place)
            if f"proxy-authorization: {self.known}".lower().encode() not in head.lower() and self.known:
                writer.write(b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n")
                await writer.drain()
                return
            host, _, port = place.rpartition(":")
            there = self.names.get(place)
            upstream = await asyncio.open_connection("127.0.0.1" if there else host, there or int(port))
            if tunnel:
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            else:
                upstream[1].write(head.replace(target.encode(), target.partition(place)[2].encode(), 1))
            with contextlib.closing(upstream[1]):
                await _either(_copy(reader, upstream[1]), _copy(upstream[0], writer))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(_READ):
            writer.write(data)
            await writer.drain()


async def _either(*work: Coroutine[None, None, None]) -> None:
    tasks = [asyncio.ensure_future(item) for item in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def connect_proxy() -> AsyncIterator[ConnectProxy]:
    """Serve one in this event loop while the context lasts."""
    proxy = ConnectProxy()
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        yield proxy
