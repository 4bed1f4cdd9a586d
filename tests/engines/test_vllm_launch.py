"""The real vLLM started by the launcher on a checkpoint that was written for it, and ended in each way it can end."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from modelswap_engine.backends.external.handshake import read_boot
from modelswap_engine.backends.external.materialise import Materialiser
from modelswap_engine.backends.external.start_point import StartPoint
from modelswap_engine.backends.vllm.control import VllmControl
from tests.support import engines
from tests.support.cache import HACK
from tests.support.engine_ranks import SECONDS, Client, Ranks, good
from tests.support.free_ports import free_port
from tests.support.launcher import Launcher, alive, descendants, until
from tests.support.models import Pair
from tests.support.orders import digest_of
from tests.support.whole_folders import order

pytestmark = [pytest.mark.engine, pytest.mark.full]  # test_vllm_pod starts engines by the launcher, too


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    made = Launcher(tmp_path)
    yield made
    made.clear()


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
async def control(port: int, session: aiohttp.ClientSession) -> VllmControl:
    return VllmControl(f"http://127.0.0.1:{port}", session)


def start(launcher: Launcher, port: int, *options: str) -> None:
    python = engines.environment("vllm") / "bin" / "python"
    command = [
        str(python), str(HACK / "engines" / "serve_vllm.py"), "--model", "{model}", "--served-model-name", "tiny",
        "--max-model-len", "512", "--enforce-eager", "--dtype", "float32", "--kv-cache-memory-bytes", str(64 << 20),
        *options,
    ]  # fmt: skip
    launcher.start_with(command, options=["--port", str(port)], python=[str(python)])


async def ready(launcher: Launcher, control: VllmControl) -> None:
    async with asyncio.timeout(engines.START_SECONDS):
        while not await control.alive(seconds=SECONDS):
            assert launcher.running, launcher.log
            await asyncio.sleep(0.1)


async def test_a_started_engine_holds_what_the_sidecar_wrote(
    launcher: Launcher, port: int, control: VllmControl, session: aiohttp.ClientSession, pair: Pair, tmp_path: Path
) -> None:
    starts = StartPoint(Materialiser(tmp_path / "engine"), runtime=launcher.runtime)
    start(launcher, port, "--distributed-executor-backend", "uni")
    await asyncio.to_thread(launcher.wait_until_it_waits)
    wanted = await order(pair.new, tmp_path)
    await starts.offer(wanted)
    await ready(launcher, control)
    facts = await control.facts(seconds=SECONDS)
    assert facts.agent
    boot = await asyncio.to_thread(read_boot, launcher.runtime)
    assert boot is not None
    assert boot.digest == wanted.digest
    assert good(await Ranks(control).adopt(pair.new)).reply.digest == digest_of(pair.new)
    assert (await Client(session, f"http://127.0.0.1:{port}").text("hello")).isupper()  # only this version makes these
    everybody = descendants(launcher.pid)
    launcher.signal()
    assert await asyncio.to_thread(launcher.ended) in {0, 143}
    assert not [pid for pid in everybody if alive(pid)]


async def test_nothing_of_it_outlives_its_main_process(
    launcher: Launcher, port: int, control: VllmControl, pair: Pair, tmp_path: Path
) -> None:
    await StartPoint(Materialiser(tmp_path / "engine"), runtime=launcher.runtime).offer(await order(pair.old, tmp_path))
    # Two ranks: vLLM has processes of its own then, and they outlive a main process that is killed.
    start(launcher, port, "--tensor-parallel-size", "2")
    await ready(launcher, control)
    everybody = descendants(launcher.pid)
    assert len(everybody) >= 3
    (main,) = descendants(launcher.pid, depth=1)
    os.kill(main, signal.SIGKILL)
    assert await asyncio.to_thread(launcher.ended) == 128 + signal.SIGKILL
    await asyncio.to_thread(until, lambda: not [pid for pid in everybody if alive(pid)], "all of it has ended")
