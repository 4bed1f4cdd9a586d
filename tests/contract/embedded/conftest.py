"""One worker process for most tests of the embedded backend; tiny checkpoints, made once."""

import dataclasses
import os
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import pytest_asyncio

from modelswap_engine.backends.embedded.backend import EmbeddedBackend
from modelswap_engine.backends.embedded.settings import EmbeddedSettings
from modelswap_engine.backends.port import RequestPolicy
from tests.support.custom_loaders import BROKEN, MISSING, RENAMED
from tests.support.orders import accepted, hashes_of, load_order, stage_order
from tests.support.pacing import slowly, variables
from tests.support.serve import ROOT

# With adapters installed in every test: the base has to be swapped, hashed and put back as if they were not there.
SETTINGS = EmbeddedSettings(
    page_size=16,
    num_blocks=64,
    max_batch_tokens=128,
    torch_threads=1,
    weight_loaders=(RENAMED, BROKEN, MISSING),
    lora_slots=2,
    lora_max_rank=8,
)


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """Folders of tiny checkpoints; ``v1`` only emits lower-case letters, ``v2`` only upper-case ones."""

    root: Path
    v1: Path
    v2: Path
    changed: tuple[str, ...]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    from tests.support import models

    root = tmp_path_factory.mktemp("checkpoints")
    pair = models.disjoint_pair(root)
    return Checkpoints(root=root, v1=pair.old, v2=pair.new, changed=pair.changed)


class Engine:
    """A started backend and the steps that every swap takes."""

    def __init__(self, backend: EmbeddedBackend, *, faults: Path | None = None) -> None:
        self.backend = backend
        self._faults = faults
        self._count = 0

    def slowly(self) -> AbstractContextManager[None]:
        """Have answers come slowly while the context lasts; see :mod:`tests.support.pacing`."""
        assert self._faults is not None
        return slowly(self._faults)

    def operation(self) -> str:
        self._count += 1
        return f"op{self._count}"

    async def load(self, directory: Path) -> None:
        accepted(await self.backend.load(load_order(directory)))

    async def prepared(self, old: Path, new: Path, **options: bool) -> str:
        """Stage and prepare what differs; return the operation."""
        operation = self.operation()
        groups = self.backend.layout().groups
        order = stage_order(old, new, operation_id=operation, groups=groups, **options)
        accepted(await self.backend.stage(order))
        accepted(await self.backend.prepare(operation))
        return operation

    async def swap(
        self, old: Path, new: Path, *, policy: RequestPolicy = RequestPolicy.NONE_RUNNING, **options: bool
    ) -> int:
        """Swap; return how many running requests were affected."""
        operation = await self.prepared(old, new, **options)
        affected = await self.commit(operation, policy)
        accepted(await self.backend.release(operation, previous=False))
        return affected

    async def commit(self, operation: str, policy: RequestPolicy = RequestPolicy.NONE_RUNNING) -> int:
        """Pause, commit, verify, resume."""
        accepted(await self.backend.pause(operation, timeout=20))
        reply = accepted(await self.backend.commit(operation, policy))
        accepted(await self.backend.verify(operation, strict=True))
        accepted(await self.backend.resume(operation))
        return reply.requests

    async def holds(self, directory: Path) -> bool:
        """Say whether the live bytes are exactly a checkpoint's."""
        return (await self.backend.hashes("*")).tensors == hashes_of(directory)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engine]:
    """Return an engine without a version, one for all modules."""
    faults = tmp_path_factory.mktemp("shared") / "faults"
    environ = {**os.environ, "PYTHONPATH": str(ROOT), **variables(faults)}
    backend = EmbeddedBackend(SETTINGS, environ=environ)
    await backend.start()
    yield Engine(backend, faults=faults)
    await backend.stop()


@pytest_asyncio.fixture(loop_scope="session")
async def engine(shared: Engine, checkpoints: Checkpoints) -> Engine:
    """Return the shared engine, freshly loaded with v1."""
    await shared.load(checkpoints.v1)
    return shared
