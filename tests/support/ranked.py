"""The whole machinery around real worker processes, as it is served but without HTTP, with faults set by the test."""

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from modelswap_engine.backends.embedded.backend import EmbeddedBackend
from modelswap_engine.backends.embedded.settings import EmbeddedSettings
from modelswap_engine.protocol.engine_state import RankState
from modelswap_engine.protocol.messages import (
    CheckRequest,
    CheckResult,
    Fence,
    ReleaseRequest,
    SwapRequest,
    SwapStatus,
    VersionRef,
)
from modelswap_engine.protocol.policy import Traffic, TrafficMode
from modelswap_engine.sources.file import FileSource
from modelswap_engine.sources.registry import Sources
from modelswap_engine.swap.clock import SystemClock
from modelswap_engine.swap.coordinator import Coordinator
from modelswap_engine.swap.gate import Gate
from modelswap_engine.swap.journal import Journal
from modelswap_engine.swap.settings import SwapSettings
from tests.support.orders import answer, hashes_of


class Ranked:
    """One engine of several ranks.

    Args:
        folder: its state.
        settings: of the engine.
        models: where checkpoints may come from.
    """

    def __init__(self, folder: Path, settings: EmbeddedSettings, models: Path) -> None:
        self._faults = folder / "faults"
        self._faults.write_text("")
        self._numbers = iter(range(1, 1000))
        self.out = folder / "out"
        self.backend = EmbeddedBackend(settings, environ={**os.environ, "MODELSWAP_FAULT": f"file:{self._faults}"})
        clock = SystemClock()
        self.coordinator = Coordinator(
            backend=self.backend,
            sources=Sources({"file": FileSource(roots=[models], cache=folder / "manifests")}),
            journal=Journal.open(folder / "journal"),
            gate=Gate(clock=clock, max_queue=64),
            clock=clock,
            settings=SwapSettings(
                state_dir=folder,
                propagation_seconds=0.0,
                probe_seconds=0.0,
                poll_seconds=0.1,
                pause_seconds=5.0,
                export_roots=(self.out,),
            ),
            transfers=self.backend,
        )

    async def start(self, directory: Path, version: str) -> "Ranked":
        await self.coordinator.start(VersionRef(version=version, uri=directory.as_uri()), None)
        await self.whole()
        return self

    async def swap(self, directory: Path, version: str, *, fault: str = "") -> SwapStatus:
        """Swap while a fault is set, and return how it ended."""
        self._faults.write_text(fault)
        number = next(self._numbers)
        request = SwapRequest(
            operation_id=f"op-{number}",
            fence=Fence(owner_uid="cli", revision=number),
            target=VersionRef(version=version, uri=directory.as_uri()),
            traffic=Traffic(mode=TrafficMode.RECOMPUTE),
        )
        await self.coordinator.swap(request)
        status = [status async for status in self.coordinator.watch(request.operation_id)][-1]
        self._faults.write_text("")
        return status

    async def forget_previous(self) -> None:
        """Give up the version that is retained, so that a swap to it has something to read."""
        state = self.coordinator.state()
        if state.previous is not None:
            await self.coordinator.release(ReleaseRequest(fence=Fence(owner_uid="cli", revision=state.revision)))

    async def whole(self) -> None:
        """Return when every rank has proved what is live."""
        while True:
            state = self.coordinator.state()
            live = state.live.digest if state.live is not None else ""
            if state.ready and live and all(rank.digest == live for rank in state.ranks):
                return
            await asyncio.sleep(0.02)

    async def assert_holds(self, directory: Path) -> CheckResult:
        """All ranks hold exactly these bytes, and agree on it."""
        await self.whole()
        checked = await self.coordinator.check(CheckRequest())
        assert checked.ok, checked.mismatched
        assert (checked.disagreed, checked.ranks) == ({}, [rank.rank for rank in self.coordinator.state().ranks])
        assert {name: value.removeprefix("sha256:") for name, value in checked.tensors.items()} == hashes_of(directory)
        return checked

    async def assert_serves(self, directory: Path, version: str) -> None:
        """All ranks hold exactly these bytes, by their own proof and by the file's hashes, and answer from them."""
        await self.whole()
        state = self.coordinator.state()
        assert state.live is not None
        assert (state.live.version, state.gate.open) == (version, True)
        # As many at a time as there are ranks reach every replica.
        texts = await asyncio.gather(*(answer(self.backend, f"{version} {n}", tokens=6) for n in state.ranks))
        assert {max(text) < 132 for text in texts} == {version == "1.0"}
        await self.assert_holds(directory)


async def until_gone(victim: RankState, ranks: Callable[[], Sequence[RankState]]) -> None:
    """Wait until a killed process is no rank that answers, whether or not its successor already does."""
    while any(rank.alive and rank.boot_id == victim.boot_id for rank in ranks()):
        await asyncio.sleep(0.01)
