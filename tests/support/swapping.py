"""A whole swap machinery on fakes: sources and engine in memory, time by hand, a real journal in a folder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from modelswap_engine.limits import Memory
from modelswap_engine.protocol.adapters import AdapterChange
from modelswap_engine.protocol.assignment import Assignment
from modelswap_engine.protocol.engine_state import EngineState
from modelswap_engine.protocol.errors import ModelswapError
from modelswap_engine.protocol.holding import Hold
from modelswap_engine.protocol.messages import Fence, SwapRequest, SwapStatus, VersionRef
from modelswap_engine.protocol.policy import Checks, Loading, Traffic
from modelswap_engine.signing.policy import Signatures
from modelswap_engine.swap.companion import Companion
from modelswap_engine.swap.coordinator import Coordinator
from modelswap_engine.swap.gate import Gate
from modelswap_engine.swap.journal import Journal
from modelswap_engine.swap.settings import SwapSettings
from tests.support.clock import ManualClock
from tests.support.fake_backend import FakeBackend
from tests.support.fake_source import FakeCheckpoint, FakeSources

POD = "pod-1"
OWNER = "owner-1"


async def at_once(call: Callable[..., Any], *arguments: Any) -> Any:
    """Stands in for a thread: blocking calls in tests are short."""
    return call(*arguments)


class Unbounded:
    """A container without limits."""

    def read(self) -> Memory:
        return Memory()


class Listener:
    """Keeps what it was told; can be told to refuse a digest."""

    def __init__(self) -> None:
        self.prepared: set[str] = set()
        self.active = VersionRef()
        self.refuse: dict[str, ModelswapError] = {}

    async def prepare(self, digest: str, directory: Path) -> None:
        assert (directory / "config.json").is_file()
        if digest in self.refuse:
            raise self.refuse[digest]
        self.prepared.add(digest)

    def activate(self, version: VersionRef) -> None:
        assert version.digest in self.prepared, "activated without having been prepared"
        self.active = version

    def discard(self, digest: str) -> None:
        self.prepared.discard(digest)


def checkpoint(**changed: bytes) -> FakeCheckpoint:
    """The base checkpoint with some tensors changed."""
    base = {"embed": b"e" * 8, "q": b"q" * 4, "k": b"k" * 4, "norm": b"n" * 2}
    return FakeCheckpoint(base | changed)


class World:
    """One pod: what survives its process, and the process."""

    def __init__(self, folder: Path, *, replicas: bool = False, **bounds: Any) -> None:
        self.folder = folder
        self.bounds = bounds
        self.clock = ManualClock()
        self.sources = FakeSources()
        self.backend = FakeBackend(read=self.sources.read, replicas=replicas)
        self.assignment: Assignment | None = None
        self.signatures: Signatures | None = None
        self.template = self.publish("1.0", checkpoint())
        self.boots = 0
        self.build()

    def publish(self, version: str, content: FakeCheckpoint) -> VersionRef:
        """Put a checkpoint at a source."""
        uri = f"file:///models/{version}"
        self.sources.checkpoints[uri] = content
        return VersionRef(version=version, uri=uri, digest=content.digest)

    def build(self) -> None:
        """Make a process of it, not started."""
        self.boots += 1
        self.listener = Listener()
        self.gate = Gate(clock=self.clock, max_queue=4, queue_seconds=120)
        self.journal = Journal.open(self.folder / "journal", sync=lambda file: None)
        self.coordinator = Coordinator(
            backend=self.backend,
            sources=self.sources,
            journal=self.journal,
            gate=self.gate,
            clock=self.clock,
            settings=SwapSettings(
                state_dir=self.folder,
                pod_uid=POD,
                boot_id=f"front-{self.boots}",
                **{"propagation_seconds": 0.0, "memory_reserve": 0} | self.bounds,
            ),
            listeners=[self.listener],
            companion=self.companion(),
            encode=lambda digest, text: tuple(text.encode()),
            memory=Unbounded(),
            offload=at_once,
            journal_offload=at_once,
            transfers=self.backend,
            signatures=self.signatures,
        )

    def companion(self) -> Companion | None:
        """Return what lives on the base; nothing unless a test says so."""
        return None

    async def start(self) -> None:
        await self.clock.run(self.coordinator.start(self.template, self.assignment, reread=lambda: self.assignment))

    async def stop(self) -> None:
        await self.clock.run(self.coordinator.stop())

    async def crash(self, *, engine_survives: bool = False) -> None:
        """SIGKILL of the process: nothing of it runs on; the engine dies with it unless it survives."""
        await self.coordinator._core.tasks.end()
        self.journal.close()
        if not engine_survives:
            self.backend.kill()
        self.backend._busy = ""
        self.build()

    async def swap(self, target: VersionRef, operation_id: str = "op-1", **options: Any) -> SwapStatus:
        """Swap and return how it ended."""
        await self.clock.run(self.coordinator.swap(request(target, operation_id, **options)))
        return await self.ended(operation_id)

    async def ended(self, operation_id: str) -> SwapStatus:
        return await self.clock.run(last(self.coordinator, operation_id))

    @property
    def state(self) -> EngineState:
        return self.coordinator.state()

    def holds(self, version: VersionRef) -> bool:
        """Say whether the live bytes are exactly those of a version."""
        content = self.sources.checkpoints[version.uri]
        return content.digest == version.digest and self.backend.live == content.tensors

    def assert_serves(self, version: VersionRef) -> None:
        """Everything says that this version serves, and its bytes are there."""
        assert self.holds(version)
        assert self.state.live == version
        assert self.state.ready, (self.state.reason, self.state.message)
        assert self.state.gate.open
        assert self.coordinator._core.lock.claimed is False
        assert self.listener.active == version
        assert self.backend.paused == ""
        assert self.backend.staged is None
        assert self.backend.violations == []


def request(
    target: VersionRef,
    operation_id: str = "op-1",
    *,
    revision: int = 1,
    epoch: int = 1,
    owner: str = OWNER,
    pod: str = POD,
    traffic: Traffic | None = None,
    loading: Loading | None = None,
    adapters: AdapterChange | None = None,
    checks: Checks | None = None,
    hold: Hold | None = None,
) -> SwapRequest:
    return SwapRequest(
        operation_id=operation_id,
        fence=Fence(pod_uid=pod, owner_uid=owner, epoch=epoch, revision=revision),
        target=target,
        traffic=traffic or Traffic(),
        loading=loading or Loading(),
        adapters=adapters or AdapterChange(),
        checks=checks or Checks(),
        hold=hold,
    )


async def last(coordinator: Coordinator, operation_id: str) -> SwapStatus:
    """Return the terminal status."""
    seen = [status async for status in coordinator.watch(operation_id)]
    return seen[-1]
