"""What a silence of the engine's means. Its routes are a canned server here, which makes a token, or none."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web
from aiohttp.test_utils import TestServer

from modelswap_engine.backends.sglang.client import SglangClient
from modelswap_engine.backends.sglang.pulse import Pulse


class Canned:
    """Answers a question for a token with ``status``; ``asked`` is released by each question."""

    def __init__(self) -> None:
        self.status, self.count = 200, 0
        self.asked = asyncio.Semaphore(0)
        self.now = 0.0

    async def token(self, request: web.Request) -> web.Response:
        self.count += 1
        self.asked.release()
        return web.Response(status=self.status)

    @asynccontextmanager
    async def pulse(self) -> AsyncIterator[Pulse]:
        app = web.Application()
        app.router.add_get("/health_generate", self.token)
        async with TestServer(app) as server:
            client = SglangClient(str(server.make_url("")))
            made = Pulse(client, every=10, silent=100, clock=lambda: self.now)
            yield made
            await made.end()
            await client.close()

    async def answered(self, pulse: Pulse) -> None:
        """Wait until the question that is under way has its answer."""
        await self.asked.acquire()
        assert pulse._task is not None
        await pulse._task


async def test_a_token_now_and_then_is_life() -> None:
    canned = Canned()
    async with canned.pulse() as pulse:
        for canned.now in (0, 5, 11, 15, 22):
            assert pulse.beats(paused=False)
            if canned.now in (0, 11, 22):
                await canned.answered(pulse)
        assert canned.count == 3


async def test_only_a_long_silence_is_death_and_another_start_begins_anew() -> None:
    canned = Canned()
    canned.status = 503
    async with canned.pulse() as pulse:
        assert pulse.beats(paused=False)
        await canned.answered(pulse)
        canned.now = 99
        assert pulse.beats(paused=False)
        await canned.answered(pulse)
        canned.now = 101
        assert not pulse.beats(paused=False)
        pulse.reset()
        assert pulse.beats(paused=False)


async def test_a_paused_engine_is_not_asked() -> None:
    canned = Canned()
    async with canned.pulse() as pulse:
        for canned.now in (0, 500, 1000):
            assert pulse.beats(paused=True)
        assert canned.count == 0
        canned.now = 1050
        assert pulse.beats(paused=False)
