"""The embedded engine: transformers in worker processes that the backend starts by itself."""

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from modelswap_engine.backends.embedded.backend import EmbeddedBackend
from modelswap_engine.backends.embedded.settings import EmbeddedSettings
from tests.conformance.candidates import Candidate, Versions
from tests.support.orders import answer
from tests.support.serve import ROOT

SETTINGS = EmbeddedSettings(page_size=16, num_blocks=64, max_batch_tokens=128, torch_threads=1)


class Embedded:
    def __init__(self, backend: EmbeddedBackend) -> None:
        self.backend = backend

    async def answer(self, text: str, *, tokens: int) -> list[int]:
        return await answer(self.backend, text, tokens=tokens)

    async def busy(self) -> bool:
        return self.backend.running() > 0

    async def kill(self) -> None:
        for rank in self.backend.ranks():
            os.kill(rank.pid, signal.SIGKILL)

    async def revive(self) -> None:
        """The backend starts lost workers when it is told to load."""


@asynccontextmanager
async def begin(versions: Versions, folder: Path) -> AsyncIterator[Embedded]:
    backend = EmbeddedBackend(SETTINGS, environ={**os.environ, "PYTHONPATH": str(ROOT)})
    await backend.start()
    try:
        yield Embedded(backend)
    finally:
        await backend.stop()


def make() -> Candidate:
    return Candidate(begin=begin, hidden=64)
