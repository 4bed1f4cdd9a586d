"""A pod's two containers as processes of one machine: `modelswap proxy` and the launcher with the real vLLM.

The test is the kubelet: it starts what ended, asks the probes and runs the hook.
"""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from modelswap_engine.backends.external.handshake import read_boot, read_launch
from modelswap_engine.protocol.states import SwapState
from tests.support import engines
from tests.support.engine_pod import ONE_PROCESS, Pod
from tests.support.engine_ranks import Client
from tests.support.held import StoppableVllm, held
from tests.support.launcher import LIMIT, descendants
from tests.support.models import Pair

pytestmark = pytest.mark.engine

LONG_ANSWER = 400


@pytest.fixture
def pod(tmp_path: Path, pair: Pair) -> Iterator[Pod]:
    made = Pod(tmp_path, pair, options=ONE_PROCESS)
    yield made
    made.clear()


async def test_from_the_first_start_to_the_end(pod: Pod, pair: Pair, session: aiohttp.ClientSession) -> None:
    client = Client(session, pod.sidecar.data_url)

    # The engine's container is started first, and waits for what the sidecar decides.
    pod.start_engine()
    await asyncio.to_thread(pod.launcher.wait_until_it_waits)
    pod.sidecar.start()
    await asyncio.to_thread(pod.sidecar.wait_ready)
    assert (await client.text("hello")).islower()
    state = await asyncio.to_thread(pod.sidecar.state)
    assert state.live is not None
    first = state.live.digest
    assert await asyncio.to_thread(pod.starts_on) == first

    # A swap, inside the running engine.
    await asyncio.to_thread(pod.sidecar.begin, pair.new, "1.1", operation="to-1.1")
    status = await asyncio.to_thread(pod.sidecar.ended, "to-1.1")
    assert status.state is SwapState.SERVING, status.error
    assert (await client.text("hello")).isupper()
    assert (
        await asyncio.to_thread(read_launch, pod.launcher.runtime) is None
    )  # the first one is not to be started on now

    # The end of the pod: the hook returns when the last answer is whole, then the engine ends, then the sidecar.
    engine = StoppableVllm(f"http://127.0.0.1:{pod.port}")
    async with held(engine, lambda: client.stream("hello", tokens=LONG_ANSWER)) as stream:
        hook = asyncio.ensure_future(asyncio.to_thread(pod.hook))
        async with asyncio.timeout(LIMIT):
            while await asyncio.to_thread(pod.sidecar.probe, "/readyz") == 200:
                await asyncio.sleep(0.02)  # a probe is how a kubelet knows
        assert not hook.done()
        await engine.go_on()
        assert len("".join(await stream.whole())) >= LONG_ANSWER
    done = await hook
    assert (done.returncode, done.stderr) == (0, "modelswap drain: drained\n")
    pod.launcher.signal()
    assert await asyncio.to_thread(pod.launcher.ended) in {0, 143}
    pod.sidecar.terminate()
    assert await asyncio.to_thread(pod.sidecar.wait) == 0


@pytest.mark.full  # in each run one dies in SGLang's pod; what starts it again is the same
async def test_an_engine_that_dies_comes_back_on_the_assigned_version(
    pod: Pod, pair: Pair, session: aiohttp.ClientSession
) -> None:
    client = Client(session, pod.sidecar.data_url)
    await asyncio.to_thread(pod.start)
    first = await asyncio.to_thread(pod.starts_on)
    await asyncio.to_thread(pod.sidecar.begin, pair.new, "1.1", operation="to-1.1")
    status = await asyncio.to_thread(pod.sidecar.ended, "to-1.1")
    assert status.state is SwapState.SERVING, status.error

    (main,) = descendants(pod.launcher.pid, depth=1)
    os.kill(main, signal.SIGKILL)
    assert await asyncio.to_thread(pod.launcher.ended) == 128 + signal.SIGKILL
    pod.start_engine()
    async with asyncio.timeout(engines.START_SECONDS):
        while await asyncio.to_thread(read_boot, pod.launcher.runtime) is None:
            await asyncio.sleep(0.1)  # another process writes the file
    assert await asyncio.to_thread(pod.starts_on) == status.target.digest != first
    await asyncio.to_thread(pod.sidecar.wait_ready)
    assert (await client.text("hello")).isupper()
    assert await asyncio.to_thread(pod.sidecar.probe, "/engine-livez") == 200
