"""The main job on two ranks, split and as replicas: every change is one transaction over both, and nobody notices."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from modelswap_engine.protocol.states import SwapState
from tests.e2e_local.conftest import Serve
from tests.e2e_local.test_swap import file_hashes, live_hashes, spoil, swap
from tests.support.clients import asking, load_on, makers
from tests.support.ranked import until_gone
from tests.support.serve import Served

pytestmark = pytest.mark.model

# The third commit is the one after a swap and its rollback.
DIES: dict[str, list[str]] = {
    "split": ["--tensor-parallel", "2"],
    "replicas": ["--data-parallel", "2"],
}


def assert_both_hold(served: Served, directory: Path, version: str) -> None:
    """Each rank has proved the version under its boot id, and the live bytes are the file's."""
    assert live_hashes(served) == file_hashes(directory)
    state = served.state()
    assert state.live is not None
    assert (state.ready, state.live.version, state.gate.open) == (True, version, True)
    assert [(rank.rank, rank.alive, rank.digest) for rank in state.ranks] == [
        (number, True, state.live.digest) for number in range(2)
    ]
    assert len({rank.boot_id for rank in state.ranks}) == 2


@pytest.mark.parametrize(
    "layout", [pytest.param(layout, marks=() if layout == "split" else pytest.mark.full) for layout in DIES]
)
async def test_two_ranks_change_as_one_under_load(serve: Serve, pair: Path, tmp_path: Path, layout: str) -> None:
    served = serve(*DIES[layout], fault="midway@1:kill#3")
    started = served.state()
    folder, options, reason = spoil(pair, tmp_path)["a flipped byte behind a pin"]
    async with load_on(served.data_url, streams=3, max_tokens=12) as load:
        await load.served_more(3)
        await swap(served, pair / "v2", "1.1")
        await load.served_more(3)
        assert_both_hold(served, pair / "v2", "1.1")
        refused = await asyncio.to_thread(
            served.command, "swap", "--source", folder.as_uri(), "--version", "bad", "-o", "json", *options
        )
        assert refused.code == 1
        assert reason in refused.out, refused.out
        back = await asyncio.to_thread(served.command, "rollback")
        assert back.code == 0, back.out + back.err
        await load.served_more(3)
        assert_both_hold(served, pair / "v1", "1.0")
        assert [rank.pid for rank in served.state().ranks] == [rank.pid for rank in started.ranks]
        # Rank 1 is killed with one pointer moved: rank 0 must not keep the new version either.
        await asyncio.to_thread(served.begin, pair / "v2", "1.1", operation="killed")
        status = await asyncio.to_thread(served.ended, "killed")
        assert status.state is SwapState.ROLLED_BACK
        assert status.error is not None
        assert status.error.code == "WorkerLost"
        await load.served_more(3)
        await caught_up(served, restarts=1)
        assert_both_hold(served, pair / "v1", "1.0")
    summary = load.summary()
    assert (summary.failed, summary.mixed) == (0, 0), summary.lines()
    assert set().union(*map(makers, load.answers)) == {"1.0", "1.1"}
    after = [rank.pid for rank in served.state().ranks]
    before = [rank.pid for rank in started.ranks]
    # A split model starts anew as a whole; a replica does not take the other one with it.
    assert [new == old for new, old in zip(after, before, strict=True)] == [layout == "replicas", False]


async def caught_up(served: Served, *, restarts: int) -> None:
    """Return when lost ranks were started so often, and all have proved the live version."""
    while True:
        state = served.state()
        live = state.live.digest if state.live is not None else ""
        if state.restarts >= restarts and state.ready and all(rank.digest == live for rank in state.ranks):
            return
        await asyncio.sleep(0.05)


async def test_one_replica_is_killed_and_the_other_serves_on(serve: Serve, pair: Path) -> None:
    served = serve(*DIES["replicas"])
    with served.slowly():
        begun = [asyncio.Event() for _ in range(2)]
        long = [asking(served.data_url, tokens=400, begun=event) for event in begun]
        for event in begun:
            await event.wait()
        assert [rank.running for rank in served.state().ranks] == [1, 1], "each replica got one"
        victim = served.state().ranks[1]
        os.kill(victim.pid, signal.SIGKILL)
        await until_gone(victim, lambda: served.state().ranks)
        # Whoever comes now is answered at once, and the pod stays in rotation.
        answer = await asking(served.data_url, tokens=8)
        assert (answer.failure, makers(answer)) == ("", {"1.0"})
        assert served.probe("/readyz") == 200
    answers = await asyncio.gather(*long)
    assert sorted(bool(answer.failure) for answer in answers) == [False, True], "only its own request was lost"
    await caught_up(served, restarts=1)
    assert_both_hold(served, pair / "v1", "1.0")
    assert served.state().ranks[0].restarts == 0
