"""The real vLLM: with our half in its worker, and over its HTTP routes with nothing asked of our half.

Where the backend of the second wants another start of the engine, one is made, as by whoever looks after the engine's
container.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import aiohttp

from modelswap_engine.backends.external.backend import ExternalBackend
from modelswap_engine.backends.external.handshake import read_launch
from modelswap_engine.backends.external.materialise import Materialiser
from modelswap_engine.backends.external.restart import RestartWish
from modelswap_engine.backends.external.settings import ExternalSettings
from modelswap_engine.backends.external.start_point import StartPoint
from modelswap_engine.backends.port import Backend
from modelswap_engine.backends.vllm.control import VllmControl
from modelswap_engine.backends.vllm.plain import plain_vllm
from tests.conformance.candidates import Candidate, Versions
from tests.conformance.direct import Nobody
from tests.support import engines
from tests.support.engine_ranks import Client
from tests.support.free_ports import free_port
from tests.support.whole_folders import digest_in

BOUNDS = ExternalSettings(watch=0.2, answer=5.0, misses=2, reach=120.0)
ONE_PROCESS = ("--distributed-executor-backend", "uni")


class Vllm:
    """The engine on one port, whichever start of it, and the backend over it."""

    def __init__(
        self,
        versions: Versions,
        folder: Path,
        session: aiohttp.ClientSession,
        assemble: "Callable[[Vllm], Backend]",
    ) -> None:
        self._versions, self.folder = versions, folder
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._session, self._client = session, Client(session, self.url)
        self._server: engines.EngineServer | None = None
        self.run = folder / "run"
        self.run.mkdir()
        self.digest, self.wish = "", RestartWish()
        self.backend = assemble(self)

    @property
    def starting(self) -> StartPoint:
        return StartPoint(Materialiser(self.folder / "checkpoints"), runtime=self.run)

    async def revive(self) -> None:
        await self.start_on(self._versions.old)

    async def start_on(self, model: Path) -> None:
        self.digest = await asyncio.to_thread(digest_in, model)
        self._server = engines.vllm(model, self.folder, *ONE_PROCESS, port=self._port)
        await asyncio.to_thread(self._server.wait_healthy)

    async def answer(self, text: str, *, tokens: int) -> list[int]:
        return await self._client.ids(text, tokens=tokens)

    async def busy(self) -> bool:
        """vLLM says so by not letting go of its cache."""
        async with self._session.post(f"{self.url}/reset_prefix_cache") as answer:
            return (await answer.json())["success"] is not True

    async def kill(self) -> None:
        if self._server is not None:
            if self._server.status is None:
                os.killpg(self._server.pid, signal.SIGKILL)
            await asyncio.to_thread(self._server.stop)
            self._server = None

    @asynccontextmanager
    async def looked_after(self) -> AsyncIterator[None]:
        """Have the engine started again, on what is announced, whenever that is wanted."""
        looking = asyncio.create_task(self._look_after())
        yield
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)

    async def _look_after(self) -> None:
        """One wish is one start: that the new one is there is seen by the backend a while after it has come up."""
        heard = ""
        while True:
            launch = await asyncio.to_thread(read_launch, self.run)
            if self.wish.wanted and self.wish.boot_id != heard and launch is not None:
                heard = self.wish.boot_id
                await self.kill()
                await self.start_on(Path(launch.model).resolve())
            await asyncio.sleep(0.1)


def inside(engine: Vllm) -> Backend:
    return ExternalBackend(
        VllmControl(engine.url, aiohttp.ClientSession()),
        requests=Nobody(),
        restart=engine.wish,
        settings=BOUNDS,
        starting=engine.starting,
    )


def plain(engine: Vllm) -> Backend:
    return plain_vllm(
        VllmControl(engine.url, aiohttp.ClientSession()),
        folder=engine.folder / "plain",
        requests=Nobody(),
        restart=engine.wish,
        settings=BOUNDS,
        starting=engine.starting,
        started_on=lambda: engine.digest,
        unverifiable=True,
    )


def begins(
    assemble: Callable[[Vllm], Backend], *, looked_after: bool
) -> Callable[[Versions, Path], AbstractAsyncContextManager[Vllm]]:
    """Have engine and backend started as they are assembled."""

    @asynccontextmanager
    async def begin(versions: Versions, folder: Path) -> AsyncIterator[Vllm]:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:
            engine = Vllm(versions, folder, session, assemble)
            try:
                await engine.revive()
                await engine.backend.start()
                async with engine.looked_after() if looked_after else contextlib.nullcontext():
                    yield engine
                await engine.backend.stop()
            finally:
                await engine.kill()

    return begin


def make() -> Candidate:
    return Candidate(
        begin=begins(inside, looked_after=False),
        exceptions={
            "every_tensor_can_be_seen_at_rest": "linear layers are packed, and reading one back takes an engine that "
            "computes nothing; a hash is taken beside requests",
        },
    )


def make_plain() -> Candidate:
    return Candidate(
        begin=begins(plain, looked_after=True),
        exceptions={
            "memory_counts_what_is_staged_until_it_is_released": "what is staged lies on a disk",
            "every_tensor_can_be_seen_at_rest": "vLLM hides packed weights from its own checksums",
            "a_rollback_is_exact": "a commit is taken back by another start of the engine",
            "a_version_that_fails_a_prompt_answers_nobody": "a commit is taken back by another start of the engine",
        },
    )
