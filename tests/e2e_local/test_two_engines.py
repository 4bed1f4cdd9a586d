"""Two whole engine processes: one gets the weights that the other has in memory, over their control ports alone."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from modelswap_engine.protocol.engine_state import UpdateState
from modelswap_engine.protocol.errors import ModelswapError
from modelswap_engine.protocol.messages import SwapStatus
from modelswap_engine.protocol.states import SwapState
from modelswap_engine.protocol.transfers import JoinGroupRequest, SendRequest, SendResult
from modelswap_engine.protocol.updates import AbortUpdate, BeginUpdate, BroadcastPart, CommitUpdate
from tests.e2e_local.test_swap import file_hashes, live_hashes
from tests.support.clients import load_on, makers
from tests.support.free_ports import free_port
from tests.support.serve import Served

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory, pair: Path) -> Iterator[tuple[Served, Served]]:
    """One that serves ``v2``, and a new one that serves what its template says."""
    folder = tmp_path_factory.mktemp("two")
    giver = Served(folder / "giver", pair / "v2", options=["--version", "1.1"], roots=[pair])
    taker = Served(folder / "taker", pair / "v1", options=["--version", "1.0"], roots=[pair])
    for served in (giver, taker):
        served.start()
    yield giver.wait_ready(), taker.wait_ready()
    for served in (giver, taker):
        served.stop()
        print(served.tail(lines=100))


async def meet(giver: Served, taker: Served) -> None:
    port = free_port()

    def join(served: Served, rank: int) -> None:
        served.tell("/groups", JoinGroupRequest(group="new-pod", address="127.0.0.1", port=port, rank=rank, size=2))

    await asyncio.gather(asyncio.to_thread(join, giver, 0), asyncio.to_thread(join, taker, 1))


async def hand_over(giver: Served, taker: Served) -> SendResult:
    taker.control.post("/updates", BeginUpdate(update_id="catch-up", owner="test"), UpdateState)
    part = BroadcastPart(group="new-pod", owner="test")
    sent, _ = await asyncio.gather(
        asyncio.to_thread(giver.control.post, "/groups/new-pod/send", SendRequest(), SendResult),
        asyncio.to_thread(taker.control.post, "/updates/catch-up/broadcast", part, UpdateState),
    )
    return sent


async def test_a_new_engine_gets_its_weights_from_a_running_one_under_load(
    engines: tuple[Served, Served], pair: Path
) -> None:
    giver, taker = engines
    await meet(giver, taker)
    async with load_on(giver.data_url, streams=2, max_tokens=16) as given, load_on(taker.data_url, streams=2) as taken:
        await taken.served_more(2)
        sent = await hand_over(giver, taker)
        assert live_hashes(taker) == file_hashes(pair / "v1")  # nothing is live before the commit
        order = CommitUpdate(owner="test", version="1.1", digest=sent.digest)
        status = await asyncio.to_thread(taker.control.post, "/updates/catch-up/commit", order, SwapStatus)
        await taken.served_more(2)
    assert (status.state, status.target.digest) == (SwapState.SERVING, sent.digest), status.error
    assert live_hashes(taker) == file_hashes(pair / "v2")
    assert [load.summary().failed for load in (given, taken)] == [0, 0]
    assert set().union(*map(makers, given.answers)) == {"1.1"}
    assert set().union(*map(makers, taken.answers)) == {"1.0", "1.1"}


async def test_a_giver_that_dies_leaves_the_taker_as_it_was(engines: tuple[Served, Served], pair: Path) -> None:
    giver, taker = engines
    done = await asyncio.to_thread(taker.command, "swap", "--source", str(pair / "v1"), "--version", "1.0")
    assert done.code == 0, done.out
    for served in engines:
        await asyncio.to_thread(served.tell, "/groups/new-pod/leave", {})
    await meet(giver, taker)
    taker.control.post("/updates", BeginUpdate(update_id="catch-up-2", owner="test"), UpdateState)
    part = BroadcastPart(group="new-pod", owner="test")
    taking = asyncio.to_thread(taker.control.post, "/updates/catch-up-2/broadcast", part, UpdateState)
    waiting = asyncio.create_task(taking)
    giver.kill()
    with pytest.raises(ModelswapError, match="group"):
        await waiting
    taker.tell("/updates/catch-up-2/abort", AbortUpdate(owner="test"))
    assert live_hashes(taker) == file_hashes(pair / "v1")
    assert taker.ready()
