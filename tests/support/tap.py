"""A pass-through between a sidecar and its engine, at which a test can act just before or just after one message.

It carries what is sent, both ways, as it comes; the engine behind it is the real one. What it knows of the messages is
their names: the steps of a swap that go to the engine's ranks, and paths of its other routes.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import AsyncExitStack

import aiohttp
from aiohttp import web

from modelswap_engine.backends.inprocess import wire
from modelswap_engine.backends.sglang.words import ACTION
from modelswap_engine.backends.vllm.control import METHOD

_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "host"}
RANKS = ("/collective_rpc", "/weights_checker")


class Tap:
    """Listens on a loopback port while its context lasts.

    Attributes:
        seen: the names of all messages so far, in order.
    """

    def __init__(self, upstream: str) -> None:
        self._upstream = upstream
        self._stack = AsyncExitStack()
        self._before: dict[str, Callable[[], None]] = {}
        self._after: dict[str, Callable[[], None]] = {}
        self._acted = asyncio.Event()
        self.seen: list[str] = []
        self.url = ""

    def before(self, message: str, act: Callable[[], None]) -> None:
        """Act, once, when a message is about to reach the engine."""
        self._before[message] = act
        self._acted.clear()

    def after(self, message: str, act: Callable[[], None]) -> None:
        """Act, once, when the engine has answered a message, and before the sidecar knows."""
        self._after[message] = act
        self._acted.clear()

    async def acted(self, *, seconds: float = 120.0) -> None:
        """Return once what was asked for has been done."""
        async with asyncio.timeout(seconds):
            await self._acted.wait()

    async def __aenter__(self) -> Tap:
        self._session = await self._stack.enter_async_context(
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(force_close=True, limit=0), timeout=aiohttp.ClientTimeout(total=None)
            )
        )
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._carry)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1)
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    async def _carry(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        message = _name(request.path, body)
        self.seen.append(message)
        self._act(self._before, message)
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP}
        try:
            async with self._session.request(
                request.method, f"{self._upstream}{request.path_qs}", data=body, headers=headers, auto_decompress=False
            ) as answer:
                return await self._answered(request, answer, message)
        except aiohttp.ClientError:
            # As the engine did it: no answer, and the connection is gone.
            if request.transport is not None:
                request.transport.abort()
            raise

    async def _answered(self, request: web.Request, answer: aiohttp.ClientResponse, message: str) -> web.StreamResponse:
        if message in self._after:
            await answer.read()
            self._act(self._after, message)
        kept = {name: value for name, value in answer.headers.items() if name.lower() not in _HOP}
        passed = web.StreamResponse(status=answer.status, headers=kept)
        await passed.prepare(request)
        async for piece in answer.content.iter_any():
            await passed.write(piece)
        await passed.write_eof()
        return passed

    def _act(self, when: dict[str, Callable[[], None]], message: str) -> None:
        act = when.pop(message, None)
        if act is not None:
            act()
            self._acted.set()


def _name(path: str, body: bytes) -> str:
    if path not in RANKS:
        return path
    asked = json.loads(body)
    done = str(asked.get("method", asked.get("action")))
    text = asked["args"][0] if done == METHOD else done.removeprefix(ACTION) if done.startswith(ACTION) else ""
    if not text:
        return done
    step = type(wire.decode_call(text).call).__name__.removesuffix("Call").lower()
    return "stage" if step == "stageretained" else step  # which of the two it is depends on what was live before
