"""The real vLLM over its HTTP routes, with nothing asked of our half in it.

Where the backend wants another start of the engine, one is made, as by whoever looks after the engine's container.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from modelswap_engine.backends.external.handshake import read_launch
from modelswap_engine.backends.external.materialise import Materialiser
from modelswap_engine.backends.external.restart import RestartWish
from modelswap_engine.backends.external.start_point import StartPoint
from modelswap_engine.backends.vllm.control import VllmControl
from modelswap_engine.backends.vllm.plain import PlainVllm
from tests.conformance.candidates import Candidate, Versions
from tests.conformance.direct import Nobody
from tests.conformance.vllm import BOUNDS, Vllm
from tests.support.whole_folders import digest_in


class Plain(Vllm):
    def __init__(self, versions: Versions, folder: Path, session: aiohttp.ClientSession) -> None:
        super().__init__(versions, folder, session)
        self._run = folder / "run"
        self._run.mkdir()
        self._digest = ""
        self._wish = RestartWish()
        self.backend = PlainVllm(
            VllmControl(self.url, aiohttp.ClientSession()),
            folder=folder / "plain",
            requests=Nobody(),
            restart=self._wish,
            settings=BOUNDS,
            starting=StartPoint(Materialiser(folder / "checkpoints"), runtime=self._run),
            started_on=lambda: self._digest,
            unverifiable=True,
        )

    async def start_on(self, model: Path) -> None:
        self._digest = await asyncio.to_thread(digest_in, model)
        await super().start_on(model)

    async def look_after(self) -> None:
        """Start the engine again, on what is announced, whenever that is wanted."""
        while True:
            launch = await asyncio.to_thread(read_launch, self._run)
            if self._wish.wanted and launch is not None:
                await self.kill()
                await self.start_on(Path(launch.model).resolve())
            await asyncio.sleep(0.1)


@asynccontextmanager
async def begin(versions: Versions, folder: Path) -> AsyncIterator[Plain]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:
        plain = Plain(versions, folder, session)
        try:
            await plain.revive()
            await plain.backend.start()
            looking = asyncio.create_task(plain.look_after())
            yield plain
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)
            await plain.backend.stop()
        finally:
            await plain.kill()


def make() -> Candidate:
    return Candidate(
        begin=begin,
        exceptions={
            "memory_counts_what_is_staged_until_it_is_released": "what is staged lies on a disk",
            "every_tensor_can_be_seen_at_rest": "vLLM hides packed weights from its own checksums",
            "a_rollback_is_exact": "a commit is taken back by another start of the engine",
        },
    )
