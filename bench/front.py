"""The whole front of `modelswap serve` but for its two ports, with clients that keep asking, all on one event loop.

Coordinator, gate, lock, journal, sources and the worker process are the product's own. What a client sees is written
down as it arrives: when it asked, when it was let in, when each token came.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

from bench.engine import prompt_of
from bench.models import BenchModel
from bench.seen import Asked, Record
from modelswap_engine.backends.embedded.backend import EmbeddedBackend
from modelswap_engine.backends.embedded.settings import EmbeddedSettings
from modelswap_engine.backends.port import Backend, Generate
from modelswap_engine.protocol.messages import Fence, SwapRequest, SwapStatus, VersionRef
from modelswap_engine.protocol.policy import Loading, Traffic, TrafficMode
from modelswap_engine.sources.file import FileSource
from modelswap_engine.sources.registry import Sources
from modelswap_engine.swap.clock import SystemClock
from modelswap_engine.swap.coordinator import Coordinator
from modelswap_engine.swap.gate import Gate
from modelswap_engine.swap.journal import Journal
from modelswap_engine.swap.listener import VersionListener
from modelswap_engine.swap.settings import SwapSettings


class Moments:
    """Notes when a version began to serve; see :class:`modelswap_engine.swap.listener.VersionListener`."""

    def __init__(self) -> None:
        self.activated = 0.0

    async def prepare(self, digest: str, directory: Path) -> None:
        """There is nothing to prepare."""

    def activate(self, version: VersionRef) -> None:
        """Note the time."""
        self.activated = time.monotonic()

    def discard(self, digest: str) -> None:
        """There is nothing to forget."""


class Front:
    """A coordinator that serves one of a model's two checkpoints."""

    def __init__(
        self, model: BenchModel, backend: EmbeddedBackend, coordinator: Coordinator, moments: Moments, gate: Gate
    ) -> None:
        self.model = model
        self.backend = backend
        self.moments = moments
        self.gate = gate
        self._coordinator = coordinator
        self._numbers = itertools.count(1)
        self._next = "other"

    async def swap(self, mode: TrafficMode) -> SwapStatus:
        """Swap to the other checkpoint; return how it ended."""
        name, number = self._next, next(self._numbers)
        self._next = "base" if name == "other" else "other"
        target = VersionRef(version=name, uri=(self.model.folder / name).as_uri())
        return await swapped(self._coordinator, target, number=number, mode=mode)

    async def ask(self, record: Record, *, prompt_tokens: int = 16, tokens: int = 64) -> Asked:
        """Ask once, as the data port does it."""
        number = next(self._numbers)
        asked = record.open(prompt_tokens)
        async with self._coordinator.admission() as admission:
            order = Generate(
                request_id=f"request-{number}",
                prompt=prompt_of(self.model, number, tokens=prompt_tokens),
                max_new_tokens=tokens,
                ignore_eos=True,
                version=admission.live.digest,
            )
            stream = self.backend.generate(order)
            admission.submitted()
            async with aclosing(stream) as answer:
                async for item in answer:
                    asked.take(len(item.tokens))
        return asked

    @asynccontextmanager
    async def clients(self, count: int, *, tokens: int = 64) -> AsyncIterator[Record]:
        """Have clients ask again and again; yields what they saw. Entered when each has its first token."""
        record = Record()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._keep_asking(record, tokens)) for _ in range(count)]
            await record.begun(count)
            yield record
            for task in tasks:
                task.cancel()

    async def _keep_asking(self, record: Record, tokens: int) -> None:
        while True:
            await self.ask(record, tokens=tokens)


@asynccontextmanager
async def serving(model: BenchModel, *, settings: EmbeddedSettings) -> AsyncIterator[Front]:
    """Start everything and serve the base."""
    moments, gate, backend = Moments(), Gate(clock=SystemClock()), EmbeddedBackend(settings)
    base = VersionRef(version="base", uri=(model.folder / "base").as_uri())
    async with coordinated(backend, base=base, roots=[model.folder], gate=gate, listeners=[moments]) as coordinator:
        yield Front(model, backend, coordinator, moments, gate)


@asynccontextmanager
async def coordinated(
    backend: Backend,
    *,
    base: VersionRef,
    roots: Sequence[Path],
    gate: Gate,
    listeners: Sequence[VersionListener] = (),
) -> AsyncIterator[Coordinator]:
    """Start a coordinator over a backend and serve a version.

    Raises:
        RuntimeError: it does not serve.
    """
    with tempfile.TemporaryDirectory(prefix="modelswap-bench-") as folder:
        coordinator = Coordinator(
            backend=backend,
            sources=Sources({"file": FileSource(roots=roots, cache=Path(folder) / "manifests")}),
            journal=Journal.open(Path(folder) / "journal"),
            gate=gate,
            clock=SystemClock(),
            settings=SwapSettings(state_dir=Path(folder), served_model_name="bench", propagation_seconds=0.0),
            listeners=listeners,
        )
        try:
            await coordinator.start(base, None)
            if not coordinator.ready():
                raise RuntimeError(f"the engine serves nothing: {coordinator.state().message}")
            yield coordinator
        finally:
            await coordinator.stop()


async def swapped(coordinator: Coordinator, target: VersionRef, *, number: int, mode: TrafficMode) -> SwapStatus:
    """Swap and return how it ended.

    Raises:
        RuntimeError: it failed.
    """
    request = SwapRequest(
        operation_id=f"swap-{number}",
        fence=Fence(owner_uid="bench", revision=number),
        target=target,
        traffic=Traffic(mode=mode, timeout_seconds=60),
        loading=Loading(keep_previous=False),
    )
    await coordinator.swap(request, if_match=None)
    last: SwapStatus | None = None
    async for status in coordinator.watch(request.operation_id):
        last = status
    if last is None or last.error is not None:
        raise RuntimeError(f"the swap by {mode} failed: {last.error if last is not None else 'no answer'}")
    return last
