"""Answers of a real engine that stay under way: the engine stands still in the middle of one until a test is done.

A tiny model may have answered before a busy machine comes to do anything about it, however long the answer. So the
engine is stopped between two steps, and is asked, stopped, whether a request is in it; where there is none any more,
another answer is begun. Refuses to know what a test does meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Generic, Protocol, TypeVar

import aiohttp

ATTEMPTS = 20
QUIET_SECONDS = 0.1

PieceT = TypeVar("PieceT")


class Stoppable(Protocol):
    """An engine as somebody with access to its own routes has it."""

    async def stop_inside(self) -> bool:
        """Stop it between two steps; say whether a request is in it, which then stays there."""

    async def go_on(self) -> None:
        """Let it make steps again."""


class Under(Generic[PieceT]):
    """An answer that comes in pieces, read as it comes.

    Attributes:
        pieces: what has come so far.
    """

    def __init__(self, coming: AsyncGenerator[PieceT, None]) -> None:
        self.pieces: list[PieceT] = []
        self._coming = coming
        self._over = False
        self._news = asyncio.Condition()
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            async for piece in self._coming:
                self.pieces.append(piece)
                await self._tell()
        finally:
            self._over = True
            await self._tell()

    async def _tell(self) -> None:
        async with self._news:
            self._news.notify_all()

    async def more(self, count: int = 1) -> bool:
        """Return once so many more pieces are there, or False once there will be none; a failure is raised."""
        wanted = len(self.pieces) + count
        async with self._news:
            await self._news.wait_for(lambda: len(self.pieces) >= wanted or self._over)
        if self._over:
            await self._reading
        return len(self.pieces) >= wanted

    async def open(self) -> bool:
        """Say whether it has not ended, once nothing more comes of what was on its way here."""
        seen = -1
        while seen != len(self.pieces) and not self._over:
            seen = len(self.pieces)
            await asyncio.sleep(QUIET_SECONDS)  # what the engine has said takes a while to be heard
        return not self._over

    async def whole(self) -> list[PieceT]:
        """Return all of it, once it has ended."""
        await self._reading
        return self.pieces

    async def leave(self) -> None:
        """Hear no more of it."""
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        await self._coming.aclose()


@asynccontextmanager
async def held(
    engine: Stoppable, ask: Callable[[], AsyncGenerator[PieceT, None]], *, after: int = 1
) -> AsyncIterator[Under[PieceT]]:
    """Ask, and yield an answer after some pieces of which the engine stands still, until told to go on, or left."""
    for _ in range(ATTEMPTS):
        answer = Under(ask())
        try:
            if await answer.more(after) and await engine.stop_inside() and await answer.open():
                yield answer
                return
        finally:
            await engine.go_on()
            await answer.leave()
    raise AssertionError(f"each of {ATTEMPTS} answers had ended before the engine could be stopped")


class StoppableVllm:
    """vLLM at an address, by its routes for developers."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def _post(self, path: str, **params: str) -> Any:
        async with aiohttp.ClientSession() as session, session.post(self._url + path, params=params) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()

    async def stop_inside(self) -> bool:
        await self._post("/pause", mode="keep", clear_cache="false")
        return (await self._post("/reset_prefix_cache"))["success"] is False  # a request holds some of it

    async def go_on(self) -> None:
        await self._post("/resume")


async def beginning_and_end(
    ask: Callable[[asyncio.Event], Coroutine[Any, Any, PieceT]],
) -> AsyncGenerator[PieceT | None, None]:
    """Turn a call that sets an event at its first token into pieces: None for that, and what it returns."""
    begun = asyncio.Event()
    task, waiting = asyncio.create_task(ask(begun)), asyncio.create_task(begun.wait())
    try:
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if begun.is_set():
            yield None
        yield await task
    finally:
        waiting.cancel()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
