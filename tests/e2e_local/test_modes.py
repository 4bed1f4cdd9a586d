"""Each traffic mode's promise (docs/architecture.md, Traffic modes), kept by a whole engine process under load.

Recompute, and a Drain that is in time, are proved in test_swap.py. The two versions cannot be confused: 1.0 says
lower-case letters only.
"""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from demo.answers import Answer
from modelswap_engine.protocol.messages import SwapStatus
from modelswap_engine.protocol.policy import OnTimeout, Traffic, TrafficMode
from modelswap_engine.protocol.states import SwapState
from tests.e2e_local.conftest import Serve
from tests.support.clients import asking, honest, load_on, makers
from tests.support.serve import Served

pytestmark = pytest.mark.model

LONG = 600


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory, pair: Path) -> Iterator[Served]:
    """One engine process for this file, which gives old instances all the time that a busy machine may need."""
    options = ["--version", "1.0", "--reclaim-seconds", "600"]
    served = Served(tmp_path_factory.mktemp("served"), pair / "v1", options=options, roots=[pair])
    yield served.start().wait_ready()
    served.stop()


async def caught(
    served: Served, mode: TrafficMode, target: Path, *, until: SwapState = SwapState.SERVING
) -> tuple[Answer, SwapStatus]:
    """Swap to 1.1 in the middle of a long answer; return that answer and how the swap ended.

    The answer's end does not come before the swap is in the state ``until``.
    """
    operation = f"{mode}-to-1.1"
    with served.slowly():
        begun = asyncio.Event()
        answering = asking(served.data_url, tokens=LONG, begun=begun)
        await begun.wait()
        await asyncio.to_thread(served.begin, target, "1.1", operation=operation, mode=mode)
        await asyncio.to_thread(served.reached, operation, until)
    status = await asyncio.to_thread(served.ended, operation)
    assert status.state is SwapState.SERVING, status.error
    return await answering, status


@pytest.mark.parametrize("what", list(OnTimeout))
async def test_a_drain_that_is_not_done_in_time_does_what_its_policy_says(
    served: Served, pair: Path, what: OnTimeout
) -> None:
    policy = Traffic(mode=TrafficMode.DRAIN, timeout_seconds=0.3, on_timeout=what)
    with served.slowly():
        begun = asyncio.Event()
        answering = asking(served.data_url, tokens=LONG, begun=begun)
        await begun.wait()
        await asyncio.to_thread(served.begin, pair / "v2", "1.1", operation=f"late-{what}", traffic=policy)
        status = await asyncio.to_thread(served.ended, f"late-{what}")
    answer = await answering
    if what is OnTimeout.CANCEL_SWAP:  # nobody was hurt, and nothing has changed
        assert status.error is not None
        assert (status.state, status.error.code) == (SwapState.ABORTED, "DrainTimeout")
        assert (answer.failure, makers(answer), len(answer.text)) == ("", {"1.0"}, LONG)
        return
    assert status.state is SwapState.SERVING, status.error
    if what is OnTimeout.RECOMPUTE_REQUESTS:
        assert (answer.failure, [span.version for span in answer.spans]) == ("", ["1.0", "1.1"])
        assert (status.recomputed_requests, honest(answer)) == (1, True)
    else:
        assert (answer.error["code"], makers(answer), status.aborted_requests) == ("interrupted", {"1.0"}, 1)


async def test_freeze_goes_on_in_the_middle_of_answers_and_says_where(served: Served, pair: Path) -> None:
    async with load_on(served.data_url) as load:
        await load.served_more(6)
        answer, status = await caught(served, TrafficMode.FREEZE, pair / "v2")
        await load.served_more(6)
    assert load.summary().failed == 0, load.summary().lines()
    assert all(map(honest, load.answers))
    assert set().union(*map(makers, load.answers)) == {"1.0", "1.1"}
    assert status.frozen_requests >= 1
    assert [span.version for span in answer.spans] == ["1.0", "1.1"]
    turn = answer.spans[0].tokens
    assert (answer.failure, turn + answer.spans[1].tokens, len(answer.text)) == ("", LONG, LONG)
    assert answer.text[:turn].islower()
    assert answer.text[turn:].isupper()
    memory = served.state().memory
    assert 0 < memory.kv_free_bytes < memory.kv_cache_bytes


async def test_overlap_makes_nobody_wait_and_mixes_nothing(served: Served, pair: Path) -> None:
    before = served.state()
    async with load_on(served.data_url) as load:
        await load.served_more(6)
        answer, status = await caught(served, TrafficMode.OVERLAP, pair / "v2", until=SwapState.VERIFIED)
        await load.served_more(6)
        back = await asyncio.to_thread(served.command, "rollback", "--mode", "Overlap")
        assert back.code == 0, back.err
        await load.served_more(6)
    after = served.state()
    # Nobody failed, nobody's answer changed hands, nobody found the gate closed, and both versions were heard.
    assert load.summary().failed == 0, load.summary().lines()
    assert load.summary().mixed == 0
    assert all(honest(one) and not one.spans for one in load.answers)
    assert set().union(*map(makers, load.answers)) == {"1.0", "1.1"}
    assert (after.gate.closures, after.gate.waits) == (before.gate.closures, before.gate.waits)
    assert (status.waited_requests, status.pause_seconds) == (0, None)
    # The long answer went on to its end on the old instance, while new ones came from the new one.
    assert (answer.failure, len(answer.text), makers(answer), answer.spans) == ("", LONG, {"1.0"}, [])
    assert status.overlapped_requests >= 1
    assert status.forced_requests == 0
    # One instance is left, in the same process, with the first version's bytes.
    assert after.memory.kv_cache_bytes == before.memory.kv_cache_bytes
    assert (after.ranks[0].pid, after.restarts) == (before.ranks[0].pid, before.restarts)
    assert after.live is not None
    assert after.live.version == "1.0"
    check = await asyncio.to_thread(served.command, "check")
    assert check.code == 0, check.out


@pytest.mark.full  # the engine's side is in tests/contract/embedded/test_overlap.py, the timer's in tests/unit/swap
async def test_overlap_gives_the_old_instance_up_when_its_time_is_over(serve: Serve, pair: Path) -> None:
    served = serve("--reclaim-seconds", "0.2")
    answer, status = await caught(served, TrafficMode.OVERLAP, pair / "v2")
    assert (status.overlapped_requests, status.forced_requests) == (1, 1)
    assert (answer.error["code"], answer.error["retryable"]) == ("interrupted", True)
    assert (makers(answer), answer.finish) == ({"1.0"}, "")
    again = await asking(served.data_url, tokens=8)
    assert (again.failure, again.version, makers(again)) == ("", "1.1", {"1.1"})


async def test_abort_ends_answers_with_an_error_that_says_try_again(served: Served, pair: Path) -> None:
    async with load_on(served.data_url) as load:
        await load.served_more(6)
        answer, status = await caught(served, TrafficMode.ABORT, pair / "v2")
        since = time.monotonic()
        await load.served_more(8)
    assert status.aborted_requests >= 1
    failed = [one for one in load.answers if not one.served]
    for one in (answer, *failed):
        # The error came as an event of the stream, after what had been said by the one version that answered.
        assert one.error["code"] == "interrupted", one
        assert one.error["retryable"] is True
        assert (one.version, makers(one), one.finish) == ("1.0", {"1.0"}, "")
    assert len(failed) <= 4
    assert load.summary().mixed == 0
    afterwards = [one for one in load.answers if one.started >= since]
    assert all(one.served and one.version == "1.1" for one in afterwards)
