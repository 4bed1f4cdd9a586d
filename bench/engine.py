"""The real embedded engine with a bench model: loads, swaps and times what is asked for; decides nothing.

Everything below the backend port is the product's own: worker process, staging, pause, commit, verification.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

import msgspec

from bench.models import BenchModel
from bench.seen import Record
from modelswap_engine.backends.embedded.backend import EmbeddedBackend
from modelswap_engine.backends.embedded.settings import EmbeddedSettings
from modelswap_engine.backends.port import Generate, Load, Reply, RequestPolicy, Stage, TensorRange
from modelswap_engine.protocol.engine_state import MemoryState
from modelswap_engine.protocol.errors import from_body

SETTINGS = EmbeddedSettings(page_size=32, num_blocks=64, max_batch_tokens=128)


def unthrottled(settings: EmbeddedSettings) -> EmbeddedSettings:
    """Return settings for what staging can do at best; in service it gives way to decoding, and is tried out."""
    return msgspec.structs.replace(settings, stage_share=1.0, stage_niceness=0, trial_tokens=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapTime:
    """One swap: seconds but for the commit window."""

    changed_bytes: int
    stop_latency: float
    commit_microseconds: float
    total: float


class BenchEngine:
    """A started backend that serves a model's base version."""

    def __init__(self, backend: EmbeddedBackend, model: BenchModel) -> None:
        self._backend = backend
        self.model = model
        self._numbers = itertools.count()

    async def load(self) -> float:
        """Load the base; return the seconds it took."""
        started = time.monotonic()
        _accepted(await self._backend.load(load_order(self.model, self._operation())))
        return time.monotonic() - started

    async def restart(self) -> float:
        """End the worker, start another, load, answer one token; return the seconds that nothing was served."""
        started = time.monotonic()
        await self._backend.stop()
        await self._backend.start()
        await self.load()
        await self.one_token()
        return time.monotonic() - started

    async def swap(self, tensors: Iterable[TensorRange], *, name: str, keep_previous: bool = False) -> SwapTime:
        """Swap some tensors; requests that run are continued on the new ones."""
        operation, chosen = self._operation(), tuple(tensors)
        started = time.monotonic()
        order = Stage(
            operation_id=operation,
            digest=_digest(name),
            directory=str(self.model.folder),
            tensors=chosen,
            drop_previous=not keep_previous,
            keep_previous=keep_previous,
        )
        _accepted(await self._backend.stage(order))
        _accepted(await self._backend.prepare(operation))
        paused = _accepted(await self._backend.pause(operation, timeout=60.0))
        committed = _accepted(await self._backend.commit(operation, RequestPolicy.RECOMPUTE))
        _accepted(await self._backend.verify(operation, strict=False))
        _accepted(await self._backend.resume(operation))
        total = time.monotonic() - started
        _accepted(await self._backend.release(operation, previous=not keep_previous))
        return SwapTime(
            changed_bytes=sum(item.nbytes for item in chosen),
            stop_latency=paused.seconds,
            commit_microseconds=committed.commit_microseconds,
            total=total,
        )

    async def stage_only(self, tensors: Iterable[TensorRange]) -> tuple[MemoryState, MemoryState]:
        """Stage some tensors and drop them; return memory while they were staged, and after."""
        operation = self._operation()
        order = Stage(
            operation_id=operation, digest=_digest("staged"), directory=str(self.model.folder), tensors=tuple(tensors)
        )
        _accepted(await self._backend.stage(order))
        during = await self.memory()
        _accepted(await self._backend.release(operation, previous=False))
        return during, await self.memory()

    async def stage_speed(self, tensors: Iterable[TensorRange]) -> float:
        """Stage some tensors and drop them; return bytes per second, as the worker measured it."""
        operation = self._operation()
        order = Stage(
            operation_id=operation, digest=_digest("speed"), directory=str(self.model.folder), tensors=tuple(tensors)
        )
        reply = _accepted(await self._backend.stage(order))
        _accepted(await self._backend.release(operation, previous=False))
        return reply.fetched_bytes / reply.seconds

    async def stage_bytes(self, tensors: Iterable[TensorRange]) -> int:
        """Stage some tensors and drop them; return how many bytes."""
        chosen = tuple(tensors)
        await self.stage_speed(chosen)
        return sum(item.nbytes for item in chosen)

    async def check_speed(self) -> float:
        """Hash all live tensors again; return bytes per second, as the worker measured it."""
        found = await self._backend.hashes("*")
        return found.bytes / found.seconds

    async def memory(self) -> MemoryState:
        """Return where the worker's memory is."""
        return await self._backend.memory()

    async def holds(self, wanted: Mapping[str, TensorRange]) -> bool:
        """Hash all live tensors; say whether they are exactly these, those that are not named as in the base."""
        found = await self._backend.hashes("*")
        return found.tensors == {name: item.sha256 for name, item in {**self.model.base, **wanted}.items()}

    async def one_token(self) -> None:
        """Answer a prompt with one token."""
        async for _ in self._backend.generate(self._prompt(tokens=1)):
            pass

    @asynccontextmanager
    async def busy(self) -> AsyncIterator[Record]:
        """Keep one request running, so that a pause has to wait for a step; yields what its client sees."""
        record = Record()
        async with asyncio.TaskGroup() as group:
            task = group.create_task(self._keep_generating(record))
            await record.begun(1)
            yield record
            task.cancel()

    async def _keep_generating(self, record: Record) -> None:
        while True:
            request = self._prompt(tokens=64)
            asked = record.open(len(request.prompt))
            async with aclosing(self._backend.generate(request)) as answer:
                async for item in answer:
                    asked.take(len(item.tokens))

    def _prompt(self, *, tokens: int) -> Generate:
        number = next(self._numbers)
        prompt = prompt_of(self.model, number, tokens=16)
        return Generate(request_id=f"request-{number}", prompt=prompt, max_new_tokens=tokens, ignore_eos=True)

    def _operation(self) -> str:
        return f"bench-{next(self._numbers)}"


@asynccontextmanager
async def running(
    model: BenchModel, *, settings: EmbeddedSettings = SETTINGS
) -> AsyncIterator[tuple[BenchEngine, float]]:
    """Start a worker and load the model; yields the engine and the seconds until its first token."""
    started = time.monotonic()
    backend = EmbeddedBackend(settings)
    try:
        await backend.start()
        engine = BenchEngine(backend, model)
        await engine.load()
        await engine.one_token()
        yield engine, time.monotonic() - started
    finally:
        await backend.stop()


def load_order(model: BenchModel, operation_id: str) -> Load:
    """Return the order to load a model's base."""
    return Load(
        operation_id=operation_id,
        digest=_digest("base"),
        directory=str(model.folder),
        tensors=tuple(model.base.values()),
    )


def prompt_of(model: BenchModel, number: int, *, tokens: int) -> tuple[int, ...]:
    """Return a prompt that begins like no other, so that no cached prefix makes it shorter."""
    size = model.shape.vocabulary - 2
    return tuple((number * 31 + place * (1 + number % 7)) % size + 2 for place in range(tokens))


def _digest(name: str) -> str:
    # The backend takes any identity; which bytes are behind it is told by the hashes of the tensors.
    return "sha256:" + name.encode().hex().ljust(64, "0")[:64]


def _accepted(replies: Sequence[Reply]) -> Reply:
    for reply in replies:
        if reply.error is not None:
            raise from_body(reply.error)
    return max(replies, key=lambda reply: reply.seconds)
