"""SIGKILL at the wrong moments: the engine converges to a whole version, the right one, by itself."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from modelswap_engine.protocol.messages import SwapStatus
from modelswap_engine.protocol.policy import TrafficMode
from modelswap_engine.protocol.states import SwapState
from tests.e2e_local.conftest import Serve
from tests.support.clients import asking, makers
from tests.support.serve import Served

pytestmark = pytest.mark.model


async def until_ready(served: Served) -> None:
    await asyncio.to_thread(served.wait_ready)


async def assert_serves(served: Served, version: str) -> None:
    answer = await asking(served.data_url, tokens=16)
    assert (answer.failure, answer.version, makers(answer)) == ("", version, {version})
    state = served.state()
    assert state.live is not None
    assert state.live.version == version
    assert [rank.digest for rank in state.ranks] == [state.live.digest]
    assert state.gate.open
    done = await asyncio.to_thread(served.command, "check")
    assert done.code == 0, done.out


@pytest.mark.full
async def test_killed_after_a_swap_each_comes_back_with_the_accepted_version(serve: Serve, pair: Path) -> None:
    served = serve()
    done = await asyncio.to_thread(served.command, "swap", "--source", str(pair / "v2"), "--version", "1.1")
    assert done.code == 0, done.err
    victim = served.worker_pid()
    os.kill(victim, signal.SIGKILL)
    while served.state().restarts == 0 or not served.ready():
        await asyncio.sleep(0.05)
    worker = served.worker_pid()
    assert worker != victim
    await assert_serves(served, "1.1")
    served.kill()
    await gone(worker)
    await until_ready(served.start())
    await assert_serves(served, "1.1")


def long(*values: object) -> object:
    """A row that only runs with the whole matrices."""
    return pytest.param(*values, marks=pytest.mark.full)


POINTS = ["stage", "prepare", "pause", "commit", "midway", "verify", "resume"]


@pytest.mark.parametrize("point", [point if point == "midway" else long(point) for point in POINTS])
async def test_worker_dies_in_the_middle_of_a_swap(serve: Serve, pair: Path, point: str) -> None:
    served = serve(fault=f"{point}:kill#1")
    await asyncio.to_thread(served.begin, pair / "v2", "1.1", operation="op-1")
    status = await asyncio.to_thread(served.ended, "op-1")
    assert status.state in (SwapState.ABORTED, SwapState.ROLLED_BACK)
    assert status.error is not None
    await until_ready(served)
    await assert_serves(served, "1.0")


@pytest.mark.full
async def test_worker_killed_while_two_instances_overlap(serve: Serve, pair: Path) -> None:
    served = serve("--reclaim-seconds", "600")
    with served.slowly():
        begun = asyncio.Event()
        old = asking(served.data_url, tokens=1900, begun=begun)
        await begun.wait()
        await asyncio.to_thread(served.begin, pair / "v2", "1.1", operation="op-1", mode=TrafficMode.OVERLAP)
        while served.control.get("/swaps/op-1", SwapStatus).state is not SwapState.VERIFIED:
            await asyncio.sleep(0.02)
        os.kill(served.worker_pid(), signal.SIGKILL)
    # The answer on the old instance is lost and says so; the new version was live already, and is again.
    assert (await old).error["retryable"] is True
    assert (await asyncio.to_thread(served.ended, "op-1")).state is SwapState.SERVING
    await until_ready(served)
    await assert_serves(served, "1.1")


@pytest.mark.full
@pytest.mark.parametrize("action", ["raise", "exit"])
async def test_a_second_instance_that_does_not_come_up_costs_nothing_but_itself(
    serve: Serve, pair: Path, action: str
) -> None:
    served = serve(fault=f"overlap:{action}#1")
    worker = served.worker_pid()
    begun = asyncio.Event()
    old = asking(served.data_url, tokens=600, begun=begun)
    await begun.wait()
    await asyncio.to_thread(served.begin, pair / "v2", "1.1", operation="op-1", mode=TrafficMode.OVERLAP)
    assert (await asyncio.to_thread(served.ended, "op-1")).state is SwapState.ABORTED
    answer = await old
    await until_ready(served)
    await assert_serves(served, "1.0")
    if action == "exit":
        return  # the next worker would end there, too
    assert (answer.failure, makers(answer), served.worker_pid()) == ("", {"1.0"}, worker)
    await asyncio.to_thread(served.begin, pair / "v2", "1.1", operation="op-2", mode=TrafficMode.OVERLAP)
    assert (await asyncio.to_thread(served.ended, "op-2")).state is SwapState.SERVING
    await assert_serves(served, "1.1")


@pytest.mark.parametrize(
    ("point", "during", "version", "ended"),
    [
        long("stage", SwapState.FETCHING, "1.0", SwapState.ABORTED),
        long("prepare", SwapState.STAGED, "1.0", SwapState.ABORTED),
        long("pause", SwapState.PAUSING, "1.1", SwapState.SERVING),
        ("midway", SwapState.COMMITTING, "1.1", SwapState.SERVING),
        long("verify", SwapState.COMMITTED, "1.1", SwapState.SERVING),
        long("resume", SwapState.VERIFIED, "1.1", SwapState.SERVING),
    ],
)
async def test_front_killed_in_each_state_comes_back_with_one_whole_version(
    serve: Serve, pair: Path, point: str, during: SwapState, version: str, ended: SwapState
) -> None:
    """The intent is written before the pause: from there on the new version is what comes up."""
    served = serve(fault=f"{point}:delay=30")
    await asyncio.to_thread(served.begin, pair / "v2", "1.1", operation="op-1")
    while served.control.get("/swaps/op-1", SwapStatus).state is not during:
        await asyncio.sleep(0.02)
    served.kill()
    await until_ready(served.start())
    await assert_serves(served, version)
    assert served.control.get("/swaps/op-1", SwapStatus).state is ended


async def gone(pid: int) -> None:
    """Return when no such process is left: a worker ends with its front."""
    while Path(f"/proc/{pid}").exists() and "State:\tZ" not in Path(f"/proc/{pid}/status").read_text():
        await asyncio.sleep(0.05)
