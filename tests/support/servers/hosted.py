"""An aiohttp application on loopback in a thread of its own.

So neither a client that blocks nor a test's own event loop holds it up, and it outlives the loop of a single test.
Refuses to know what is served.
"""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

from aiohttp import web

_SECONDS = 10.0
T = TypeVar("T")


class Hosted:
    """One application, served until closed."""

    def __init__(self, app: web.Application, *, tls: ssl.SSLContext | None = None) -> None:
        """Start to serve on a port that the system chooses; who goes away cancels what is done for them."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="hosted", daemon=True)
        self._thread.start()
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1, access_log=None)
        self.port = self._run(lambda: self._start(tls))
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self.port}"

    def close(self) -> None:
        """Stop serving, and end what still hangs."""
        self._run(self._runner.cleanup)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_SECONDS)
        self._loop.close()

    async def _start(self, tls: ssl.SSLContext | None) -> int:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=tls).start()
        port: int = self._runner.addresses[0][1]
        return port

    def _run(self, work: Callable[[], Awaitable[T]]) -> T:
        async def done() -> T:
            return await work()

        return asyncio.run_coroutine_threadsafe(done(), self._loop).result(_SECONDS)
