"""An external engine's pod on fakes: the real coordinator and ``ExternalBackend`` over an engine and sources in memory.

For unit tests of the sidecar's half; the system's clock, with bounds of milliseconds.
"""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from modelswap_engine.backends.external.backend import ExternalBackend
from modelswap_engine.backends.external.control import Requests
from modelswap_engine.backends.external.restart import RestartWish
from modelswap_engine.backends.external.settings import ExternalSettings
from modelswap_engine.backends.inprocess import wire
from modelswap_engine.backends.port import Load
from modelswap_engine.protocol.messages import CancelRequest, Fence, SwapRequest, SwapStatus, VersionRef
from modelswap_engine.protocol.policy import Checks, Traffic
from modelswap_engine.swap.clock import Offload, SystemClock
from modelswap_engine.swap.companion import Companion
from modelswap_engine.swap.coordinator import Coordinator
from modelswap_engine.swap.gate import Gate
from modelswap_engine.swap.journal import Journal
from modelswap_engine.swap.settings import SwapSettings
from tests.support.fake_control import Broken, FakeControl
from tests.support.fake_rank import FakeRank
from tests.support.fake_source import FakeCheckpoint, FakeSources
from tests.support.swapping import Unbounded, at_once, checkpoint, last, request

BOUNDS = ExternalSettings(
    call=5.0, load=5.0, stage=5.0, hash=5.0, reach=0.3, watch=0.01, answer=1.0, misses=2, forget=0.0
)


class FakeStarting:
    """What the engine's launcher would be told.

    Attributes:
        told: digests that were offered, "" for each withdrawal.
        start: the boot id that it tells, "" when it tells none.
    """

    def __init__(self) -> None:
        self.told: list[str] = []
        self.start = ""

    async def offer(self, order: Load) -> Path:
        self.told.append(order.digest)
        return Path("/checkpoints") / order.digest

    async def withdraw(self) -> None:
        self.told.append("")


class ExternalWorld:
    """One pod.

    ``look_seconds`` is how often the sidecar looks after the engine, and after its own state.

    Attributes:
        control: the engine's control side; ``ranks`` are its processes.
        loads: where the engine was told to load whole versions from.
    """

    def __init__(
        self,
        folder: Path,
        *,
        ranks: int = 2,
        loads_anew: bool = False,
        reach: float = BOUNDS.reach,
        call: float = BOUNDS.call,
        forget: float = BOUNDS.forget,
        prompts: float = BOUNDS.prompts,
        requests: Requests | None = None,
        companion: Companion | None = None,
        offload: Offload = at_once,
        look_seconds: float = BOUNDS.watch,
    ) -> None:
        self.sources = FakeSources()
        self.size = ranks
        self.one = self.publish("1.0", checkpoint())
        self.two = self.publish("1.1", checkpoint(q=b"QQQQ", norm=b"NN"))
        self.control = FakeControl(engine="vllm")
        self.restart = RestartWish()
        self.ranks: list[FakeRank] = []
        self.launcher = FakeStarting()
        self.boot(self.one)
        self.control.on_load = self._load
        bounds = dataclasses.replace(BOUNDS, reach=reach, call=call, watch=look_seconds, forget=forget, prompts=prompts)
        self.backend = ExternalBackend(
            self.control,
            settings=bounds,
            requests=requests or self.control.requests(),
            restart=self.restart,
            starting=self.launcher if loads_anew else None,
            launched=lambda: self.launcher.start,
        )
        clock = SystemClock()
        self.gate = Gate(clock=clock)
        self.coordinator = Coordinator(
            backend=self.backend,
            sources=self.sources,
            journal=Journal.open(folder / "journal", sync=lambda file: None),
            gate=self.gate,
            clock=clock,
            settings=SwapSettings(
                state_dir=folder,
                pod_uid="pod-1",
                poll_seconds=look_seconds,
                retry_seconds=(0.01, 0.02),
                memory_reserve=0,
            ),
            memory=Unbounded(),
            companion=companion,
            offload=offload,
            journal_offload=offload,
        )

    def publish(self, version: str, content: FakeCheckpoint) -> VersionRef:
        """Put a checkpoint at a source."""
        uri = f"file:///models/{version}"
        self.sources.checkpoints[uri] = content
        return VersionRef(version=version, uri=uri, digest=content.digest)

    def boot(self, version: VersionRef) -> None:
        """Another start of the engine, on this version."""
        tensors = self.sources.checkpoints[version.uri].tensors
        self.ranks = [
            FakeRank(tensors, read=self.sources.read, rank=rank, ranks=self.size) for rank in range(self.size)
        ]
        self.control.restart(self.ranks)

    def _load(self, digest: str) -> None:
        content = next(found for found in self.sources.checkpoints.values() if found.digest == digest)
        for rank in self.ranks:
            rank.live = dict(content.tensors)

    def holds(self, version: VersionRef) -> bool:
        """Say whether every rank's live bytes are exactly those of a version."""
        return all(rank.live == self.sources.checkpoints[version.uri].tensors for rank in self.ranks)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """The sidecar's process, started."""
        await self.coordinator.start(self.one, None)
        try:
            yield
        finally:
            await self.coordinator.stop()

    @asynccontextmanager
    async def starting(self) -> AsyncIterator[None]:
        """The sidecar's process while it starts, and after."""
        task = asyncio.create_task(self.coordinator.start(self.one, None))
        try:
            yield
        finally:
            await self.coordinator.stop()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def lose_at(self, step: str, broken: Broken) -> None:
        """The collective call that carries this step gets no answer."""
        self.control.lose = lambda text: (
            broken if type(wire.decode_call(text).call).__name__.lower() == f"{step}call" else None
        )

    @staticmethod
    def request(target: VersionRef, operation_id: str = "op-1") -> SwapRequest:
        return request(target, operation_id)

    async def cancel(self, operation_id: str) -> None:
        await self.coordinator.cancel(operation_id, CancelRequest(fence=Fence(pod_uid="pod-1", owner_uid="cli")))

    async def swap(
        self,
        target: VersionRef,
        operation_id: str = "op-1",
        *,
        traffic: Traffic | None = None,
        checks: Checks | None = None,
    ) -> SwapStatus:
        """Swap and return how it ended."""
        revision = self.coordinator.state().revision + 1
        await self.coordinator.swap(request(target, operation_id, traffic=traffic, checks=checks, revision=revision))
        return await last(self.coordinator, operation_id)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that a background task of the product brings about; it has no event to wait for."""
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0.002)
