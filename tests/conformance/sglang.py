"""The real SGLang with our half in its scheduler, and the sidecar's backend over it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from modelswap_engine.backends.external.backend import ExternalBackend
from modelswap_engine.backends.external.materialise import Materialiser
from modelswap_engine.backends.external.restart import RestartWish
from modelswap_engine.backends.external.settings import ExternalSettings
from modelswap_engine.backends.external.start_point import StartPoint
from modelswap_engine.backends.sglang.client import SglangClient
from modelswap_engine.backends.sglang.control import SglangControl
from modelswap_engine.backends.sglang.pulse import Pulse
from tests.conformance.candidates import Candidate, Versions
from tests.conformance.direct import Nobody
from tests.support.sglang import EXACT, Client, Sglang, with_our_half

BOUNDS = ExternalSettings(watch=0.2, answer=5.0, misses=2, reach=120.0)


class Started:
    """The engine on one port, whichever start of it, and the backend over it."""

    def __init__(self, versions: Versions, folder: Path) -> None:
        self._versions = versions
        self._server = Sglang(folder, options=EXACT, variables=with_our_half(folder / "beside"))
        self._client = Client(self._server.url)
        routes = SglangClient(self._server.url)
        (folder / "run").mkdir()
        self.backend = ExternalBackend(
            SglangControl(routes, pulse=Pulse(routes)),
            requests=Nobody(),
            restart=RestartWish(),
            settings=BOUNDS,
            starting=StartPoint(Materialiser(folder / "checkpoints"), runtime=folder / "run"),
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
        await self._client.close()
        await self.kill()


@asynccontextmanager
async def begin(versions: Versions, folder: Path) -> AsyncIterator[Started]:
    started = Started(versions, folder)
    try:
        await started.revive()
        await started.backend.start()
        yield started
        await started.backend.stop()
    finally:
        await started.close()


def make() -> Candidate:
    return Candidate(begin=begin)
