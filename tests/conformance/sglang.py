"""The real SGLang: with our half in its schedulers, and over its HTTP routes with nothing of ours in it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

from modelswap_engine.backends.external.backend import ExternalBackend
from modelswap_engine.backends.external.materialise import Materialiser
from modelswap_engine.backends.external.restart import RestartWish
from modelswap_engine.backends.external.settings import ExternalSettings
from modelswap_engine.backends.external.start_point import StartPoint
from modelswap_engine.backends.port import Backend
from modelswap_engine.backends.sglang.client import SglangClient
from modelswap_engine.backends.sglang.control import SglangControl
from modelswap_engine.backends.sglang.plain import plain_sglang
from modelswap_engine.backends.sglang.pulse import Pulse
from tests.conformance.candidates import Candidate, Versions
from tests.conformance.direct import Nobody
from tests.support.sglang import EXACT, SMALL, Client, Sglang, with_our_half

BOUNDS = ExternalSettings(watch=0.2, answer=5.0, misses=2, reach=120.0)


class Started:
    """The engine on one port, whichever start of it, and the backend over it."""

    def __init__(self, versions: Versions, server: Sglang, backend: Backend) -> None:
        self._versions, self._server = versions, server
        self._client = Client(server.url)
        self.backend = backend

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


def inside(folder: Path) -> tuple[Sglang, Backend]:
    (folder / "run").mkdir()
    server = Sglang(folder, options=EXACT, variables=with_our_half(folder / "beside"))
    routes = SglangClient(server.url)
    backend = ExternalBackend(
        SglangControl(routes, pulse=Pulse(routes, every=0.0)),  # all that is asked of it meets a token of ours
        requests=Nobody(),
        restart=RestartWish(),
        settings=BOUNDS,
        starting=StartPoint(Materialiser(folder / "checkpoints"), runtime=folder / "run"),
    )
    return server, backend


def plain(folder: Path) -> tuple[Sglang, Backend]:
    (folder / "shared").mkdir()
    server = Sglang(folder, options=SMALL)
    backend = plain_sglang(
        SglangClient(server.url), folder=folder / "shared", requests=Nobody(), restart=RestartWish(), settings=BOUNDS
    )
    return server, backend


def begins(
    assemble: Callable[[Path], tuple[Sglang, Backend]],
) -> Callable[[Versions, Path], AbstractAsyncContextManager[Started]]:
    """Have engine and backend started as they are assembled."""

    @asynccontextmanager
    async def begin(versions: Versions, folder: Path) -> AsyncIterator[Started]:
        started = Started(versions, *assemble(folder))
        try:
            await started.revive()
            await started.backend.start()
            yield started
        finally:
            await started.close()

    return begin


def make() -> Candidate:
    return Candidate(begin=begins(inside))


def make_plain() -> Candidate:
    return Candidate(
        begin=begins(plain),
        exceptions={"memory_counts_what_is_staged_until_it_is_released": "what is staged lies on a disk"},
        dtype="bfloat16",
        hidden=64,
    )
