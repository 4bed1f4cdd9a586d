"""A pod with an external engine, a tap between its two containers, and a kubelet: for tests of what is survived."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from modelswap_engine.protocol.messages import CheckRequest, CheckResult, SwapStatus
from modelswap_engine.protocol.policy import Checks, VerifyMode
from modelswap_engine.protocol.states import SwapState
from tests.support.engine_pod import Kubelet, Pod
from tests.support.engine_ranks import Client
from tests.support.free_ports import free_port
from tests.support.models import LOWER, UPPER, Pair
from tests.support.tap import Tap

SERVED = {"1.0": LOWER, "1.1": UPPER}


@dataclass
class World:
    """A pod, the tap between its containers, and who restarts them."""

    folder: Path
    pod: Pod
    tap: Tap
    kubelet: Kubelet
    pair: Pair
    client: Client
    swaps: int = 0

    @staticmethod
    @asynccontextmanager
    async def running(
        folder: Path,
        pair: Pair,
        *,
        engine: str = "vllm",
        options: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
        route: Sequence[str] = (),
    ) -> AsyncIterator[World]:
        """Start everything, and end it with the context."""
        port = free_port()
        async with (
            Tap(f"http://127.0.0.1:{port}") as tap,
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session,
        ):
            pod = Pod(
                folder,
                pair,
                engine=engine,
                options=options,
                port=port,
                upstream=tap.url,
                variables=variables,
                route=route,
            )
            try:
                await asyncio.to_thread(pod.start)
                async with Kubelet(pod).watching() as kubelet:
                    yield World(folder, pod, tap, kubelet, pair, Client(session, pod.sidecar.data_url))
            finally:
                await asyncio.to_thread(pod.clear)

    async def begin(
        self,
        version: str,
        *,
        verify: VerifyMode = VerifyMode.STANDARD,
        checks: Checks | None = None,
        folder: Path | None = None,
    ) -> str:
        """Begin a swap to a version, and return its operation; one that is not of the pair is in a folder."""
        self.swaps += 1
        operation, begin = f"op-{self.swaps}", self.pod.sidecar.begin
        folder = folder or {"1.0": self.pair.old, "1.1": self.pair.new}[version]
        await asyncio.to_thread(begin, folder, version, operation=operation, verify=verify, checks=checks)
        return operation

    async def ended(self, operation: str) -> SwapState:
        status: SwapStatus = await asyncio.to_thread(self.pod.sidecar.ended, operation)
        return status.state

    async def on_one(self) -> None:
        """Have 1.0 serve."""
        state = await asyncio.to_thread(self.pod.sidecar.state)
        if state.live is None or state.live.version != "1.0":
            assert await self.ended(await self.begin("1.0")) is SwapState.SERVING

    async def serves(self, version: str) -> None:
        """See that a version serves, as a whole, and proved."""
        await asyncio.to_thread(self.pod.sidecar.wait_ready)
        state = await asyncio.to_thread(self.pod.sidecar.state)
        assert state.live is not None
        assert state.live.version == version
        assert {rank.digest for rank in state.ranks} == {state.live.digest}
        assert state.gate.open
        assert set("".join(await self.client.texts())) <= set(SERVED[version])
        checked = await asyncio.to_thread(self.pod.sidecar.control.post, "/check", CheckRequest(), CheckResult)
        assert checked.ok


def long(*values: object) -> object:
    """A row that only runs with the whole matrices."""
    return pytest.param(*values, marks=pytest.mark.full)
