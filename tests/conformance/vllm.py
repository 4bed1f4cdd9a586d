"""The real vLLM with our half in its worker, and the sidecar's backend over it."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from modelswap_engine.backends.external.backend import ExternalBackend
from modelswap_engine.backends.external.materialise import Materialiser
from modelswap_engine.backends.external.restart import RestartWish
from modelswap_engine.backends.external.settings import ExternalSettings
from modelswap_engine.backends.external.start_point import StartPoint
from modelswap_engine.backends.vllm.control import VllmControl
from tests.conformance.candidates import Candidate, Versions
from tests.conformance.direct import Nobody
from tests.support import engines
from tests.support.engine_ranks import Client
from tests.support.free_ports import free_port

BOUNDS = ExternalSettings(watch=0.2, answer=5.0, misses=2, reach=600.0)
ONE_PROCESS = ("--distributed-executor-backend", "uni")


class Vllm:
    """The engine on one port, whichever start of it."""

    def __init__(self, versions: Versions, folder: Path, session: aiohttp.ClientSession) -> None:
        self._versions, self._folder = versions, folder
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._session, self._client = session, Client(session, self.url)
        self._server: engines.EngineServer | None = None

    async def revive(self) -> None:
        await self.start_on(self._versions.old)

    async def start_on(self, model: Path) -> None:
        self._server = engines.vllm(model, self._folder, *ONE_PROCESS, port=self._port)
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


class Started(Vllm):
    """The engine, and the backend over it."""

    def __init__(self, versions: Versions, folder: Path, session: aiohttp.ClientSession) -> None:
        super().__init__(versions, folder, session)
        (folder / "run").mkdir()
        self.backend = ExternalBackend(
            VllmControl(self.url, aiohttp.ClientSession()),
            requests=Nobody(),
            restart=RestartWish(),
            settings=BOUNDS,
            starting=StartPoint(Materialiser(folder / "checkpoints"), runtime=folder / "run"),
        )


@asynccontextmanager
async def begin(versions: Versions, folder: Path) -> AsyncIterator[Started]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:
        started = Started(versions, folder, session)
        try:
            await started.revive()
            await started.backend.start()
            yield started
            await started.backend.stop()
        finally:
            await started.kill()


def make() -> Candidate:
    return Candidate(
        begin=begin,
        exceptions={
            "every_tensor_can_be_seen_at_rest": "linear layers are packed, and reading one back takes an engine that "
            "computes nothing; a hash is taken beside requests",
        },
    )
