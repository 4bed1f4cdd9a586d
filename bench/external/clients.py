"""Clients of an engine's OpenAI-compatible server: streamed answers, each token noted as it arrives."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp

from bench.seen import Record

_PROMPT_TOKENS = 16


class Clients:
    """Asks a server, or what stands before one.

    Args:
        url: of the server.
        session: used by nobody else.
        model: the name to ask for.
    """

    def __init__(self, url: str, session: aiohttp.ClientSession, *, model: str) -> None:
        self._url, self._session, self._model = url, session, model
        self._numbers = itertools.count(1)

    async def ask(self, record: Record, *, tokens: int) -> float:
        """Ask once; return the seconds until the first token.

        Raises:
            RuntimeError: there was no answer.
        """
        asked, started, first = record.open(_PROMPT_TOKENS), time.monotonic(), 0.0
        body = {
            "model": self._model,
            "prompt": self._prompt(),
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        async with self._session.post(f"{self._url}/v1/completions", json=body) as answer:
            if answer.status != 200:
                raise RuntimeError(f"{self._url}: {answer.status} {await answer.text()}")
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    first = first or time.monotonic() - started
                    asked.take(1)
        return first

    @asynccontextmanager
    async def asking(self, count: int, *, tokens: int = 64) -> AsyncIterator[Record]:
        """Have so many clients ask again and again; entered when each has its first token."""
        record = Record()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._again(record, tokens)) for _ in range(count)]
            await record.begun(count)
            yield record
            for task in tasks:
                task.cancel()

    async def _again(self, record: Record, tokens: int) -> None:
        while True:
            await self.ask(record, tokens=tokens)

    def _prompt(self) -> list[int]:
        """Return a prompt that begins like no other."""
        number = next(self._numbers)
        return [(number * 31 + place * (1 + number % 7)) % 4000 + 8 for place in range(_PROMPT_TOKENS)]


@asynccontextmanager
async def clients(url: str, *, model: str = "tiny") -> AsyncIterator[Clients]:
    """Open connections to a server."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=600)) as session:
        yield Clients(url, session, model=model)
