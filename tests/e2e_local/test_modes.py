"""Each traffic mode's promise (docs/architecture.md, Traffic modes), kept by a whole engine process under load.

Drain and Recompute are proved in test_swap.py. The two versions cannot be confused: 1.0 says lower-case letters only.
"""

import asyncio
from pathlib import Path

import openai
import pytest

from modelswap_engine.protocol.messages import SwapStatus
from modelswap_engine.protocol.policy import TrafficMode
from modelswap_engine.protocol.states import SwapState
from tests.support.load import Answer, ask, load
from tests.support.serve import Served

pytestmark = pytest.mark.model

LONG = 1900


async def caught(served: Served, target: Path, version: str, mode: TrafficMode) -> tuple[Answer, SwapStatus]:
    """Swap in the middle of a long answer; return that answer and how the swap ended."""
    operation = f"{mode}-to-{version}"
    async with openai.AsyncOpenAI(base_url=served.base_url, api_key="unused", max_retries=0) as client:
        begun = asyncio.Event()
        answering = asyncio.create_task(ask(client, tokens=LONG, begun=begun))
        await begun.wait()
        await asyncio.to_thread(served.begin, target, version, operation=operation, mode=mode)
        status = await asyncio.to_thread(served.ended, operation)
        assert status.state is SwapState.SERVING, status.error
        return await answering, status


async def test_freeze_goes_on_in_the_middle_of_answers_and_says_where(served: Served, pair: Path) -> None:
    async with load(served.base_url, clients=4, tokens=48) as clients:
        await clients.more(6)
        answer, status = await caught(served, pair / "v2", "1.1", TrafficMode.FREEZE)
        await clients.more(6)
    assert not clients.failed
    assert all(one.honest for one in clients.answers)
    assert {maker for one in clients.answers for maker in one.makers} == {"1.0", "1.1"}
    assert status.frozen_requests >= 1
    assert [span["version"] for span in answer.spans] == ["1.0", "1.1"]
    turn = answer.spans[0]["tokens"]
    assert (answer.error, turn + answer.spans[1]["tokens"], len(answer.text)) == ("", LONG, LONG)
    assert answer.text[:turn].islower()
    assert answer.text[turn:].isupper()
    memory = served.state().memory
    assert 0 < memory.kv_free_bytes < memory.kv_cache_bytes


async def test_abort_ends_answers_with_an_error_that_says_try_again(served: Served, pair: Path) -> None:
    async with load(served.base_url, clients=4, tokens=48) as clients:
        await clients.more(6)
        answer, status = await caught(served, pair / "v2", "1.1", TrafficMode.ABORT)
        before = len(clients.answers)
        await clients.more(8)
    assert status.aborted_requests >= 1
    for one in (answer, *clients.failed):
        # The error came as an event of the stream, after what had been said by the one version that answered.
        assert one.error_body["code"] == "interrupted", one
        assert one.error_body["retryable"] is True
        assert (one.version, one.makers, one.finish) == ("1.0", {"1.0"}, None)
    assert len(clients.failed) <= 4
    assert not clients.mixed
    assert all(one.error == "" and one.version == "1.1" for one in clients.answers[before + 4 :])
