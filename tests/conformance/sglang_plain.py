"""The real SGLang over its HTTP routes, with nothing of ours in it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from modelswap_engine.backends.external.restart import RestartWish
from modelswap_engine.backends.sglang.client import SglangClient
from modelswap_engine.backends.sglang.plain import PlainSglang
from modelswap_engine.backends.sglang.settings import PlainSettings
from tests.conformance.candidates import Candidate, Versions
from tests.support.sglang import Client, Sglang

BOUNDS = PlainSettings(start_seconds=120, call_seconds=30, update_seconds=60, hash_seconds=60, watch_seconds=0.2)


class Plain:
    def __init__(self, versions: Versions, folder: Path) -> None:
        self._versions = versions
        self._server = Sglang(folder)
        self._client = Client(self._server.url)
        self.backend = PlainSglang(
            SglangClient(self._server.url), folder=folder / "shared", wish=RestartWish(), settings=BOUNDS
        )

    async def revive(self) -> None:
        await asyncio.to_thread(lambda: self._server.start(self._versions.old).wait_ready())

    async def answer(self, text: str, *, tokens: int) -> list[int]:
        return (await self._client.ask(text, tokens=tokens)).tokens

    async def busy(self) -> bool:
        return await self._client.running() > 0

    async def kill(self) -> None:
        await asyncio.to_thread(self._server.kill)

    async def close(self) -> None:
        await self.backend.stop()
        await self._client.close()
        await self.kill()


@asynccontextmanager
async def begin(versions: Versions, folder: Path) -> AsyncIterator[Plain]:
    (folder / "shared").mkdir()
    plain = Plain(versions, folder)
    try:
        await plain.revive()
        yield plain
    finally:
        await plain.close()


def make() -> Candidate:
    return Candidate(
        begin=begin,
        exceptions={"memory_counts_what_is_staged_until_it_is_released": "what is staged lies on a disk"},
        dtype="bfloat16",
        hidden=64,
    )
