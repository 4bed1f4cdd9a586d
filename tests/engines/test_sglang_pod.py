"""A pod's two containers as processes of one machine: `modelswap proxy` and the launcher with the real SGLang.

What the two tell each other, and what the engine is restarted on; the hooks are tested with vLLM.
"""

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from modelswap_engine.backends.external.handshake import Boot, read_boot
from modelswap_engine.protocol.states import SwapState
from tests.support import engines
from tests.support.engine_pod import Pod
from tests.support.engine_ranks import Client
from tests.support.models import Pair

pytestmark = pytest.mark.engine


@pytest.fixture(params=["in-process", pytest.param("plain", marks=pytest.mark.full)])
def pod(tmp_path: Path, pair: Pair, request: pytest.FixtureRequest) -> Iterator[Pod]:
    made = Pod(tmp_path, pair, engine="sglang", route=("--route", request.param))
    yield made
    made.clear()


async def started(pod: Pod, *, after: str = "") -> Boot:
    """Wait for a start of the engine other than this one; another process writes the file."""
    async with asyncio.timeout(engines.START_SECONDS):
        while True:
            boot = await asyncio.to_thread(read_boot, pod.launcher.runtime)
            if boot is not None and boot.boot_id != after:
                return boot
            await asyncio.sleep(0.1)


async def test_an_engine_that_dies_comes_back_on_the_assigned_version(
    pod: Pod, pair: Pair, session: aiohttp.ClientSession
) -> None:
    client = Client(session, pod.sidecar.data_url)
    pod.start_engine()
    pod.sidecar.start()
    await asyncio.to_thread(pod.sidecar.wait_ready)
    first = await started(pod)
    assert "".join(await client.texts()).islower()

    # Nobody but the sidecar has the key of its admin routes.
    async with session.post(f"http://127.0.0.1:{pod.port}/flush_cache") as answer:
        assert answer.status == 401

    await asyncio.to_thread(pod.sidecar.begin, pair.new, "1.1", operation="to-1.1")
    status = await asyncio.to_thread(pod.sidecar.ended, "to-1.1")
    assert status.state is SwapState.SERVING, status.error
    swapped = await client.texts()
    assert "".join(swapped).isupper()

    pod.kill_engine()
    assert await asyncio.to_thread(pod.launcher.ended) == 128 + signal.SIGKILL
    pod.start_engine()
    second = await started(pod, after=first.boot_id)
    await asyncio.to_thread(pod.sidecar.wait_ready)
    assert second.admin_key != first.admin_key
    assert second.digest == status.target.digest != first.digest
    assert await client.texts() == swapped  # what a fresh server on these weights says
    state = await asyncio.to_thread(pod.sidecar.state)
    assert state.live is not None
    assert [rank.digest for rank in state.ranks] == [state.live.digest] == [second.digest]
    assert await asyncio.to_thread(pod.sidecar.probe, "/engine-livez") == 200
