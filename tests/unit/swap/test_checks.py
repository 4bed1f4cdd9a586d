"""Prompts that a version is tried with: on what is staged, or before anybody is let in to what was committed."""

import asyncio

import pytest

from modelswap_engine.backends.port import PromptTrial
from modelswap_engine.protocol.errors import ChecksFailed
from modelswap_engine.protocol.policy import Checks, OnTimeout, PromptCheck, Traffic, TrafficMode
from modelswap_engine.protocol.states import SwapState
from tests.support.fake_backend import Fault
from tests.support.fake_source import FakeCheckpoint
from tests.support.swapping import checkpoint, request

_CHECKS = Checks(prompts=[PromptCheck(prompt="ab", max_logprob_delta=0.5), PromptCheck(prompt="c")])


async def swap(world, target, *, checks=_CHECKS, traffic=None):
    return await world.swap(target, checks=checks, traffic=traffic)


async def test_they_run_on_what_is_staged_before_anybody_waits(world):
    target = world.publish("1.1", checkpoint(q=b"QQQQ"))
    status = await swap(world, target)
    assert status.state is SwapState.SERVING
    assert world.backend.trials == [
        PromptTrial(prompt=(97, 98), max_logprob_delta=0.5), PromptTrial(prompt=(99,))
    ]  # fmt: skip
    steps = world.backend.steps
    assert steps.index("stage") < steps.index("try_out") < steps.index("prepare") < steps.index("pause")


async def test_one_that_fails_leaves_the_old_version_as_it_was(world):
    world.backend.error = ChecksFailed("checks.prompts, number 1: it changes too much")
    world.backend.faults["try_out"] = Fault.ERROR
    status = await swap(world, world.publish("1.1", checkpoint(q=b"QQQQ")))
    assert (status.state, status.error.code) == (SwapState.ABORTED, "ChecksFailed")
    assert status.pause_seconds is None
    world.assert_serves(world.template)
    assert "pause" not in world.backend.steps


async def test_without_prompts_nothing_is_tried(world):
    await swap(world, world.publish("1.1", checkpoint(q=b"QQQQ")), checks=Checks())
    assert "try_out" not in world.backend.steps


async def test_answers_in_other_tokens_cannot_be_compared(world):
    config = b'{"architectures": ["Tiny"], "hidden_size": 4, "eos_token_id": 3}'
    target = world.publish("1.1", FakeCheckpoint(checkpoint().tensors, side={"config.json": config}))
    status = await swap(world, target)
    assert (status.state, status.error.code) == (SwapState.ABORTED, "UnsupportedChange")
    world.assert_serves(world.template)
    looser = Checks(prompts=[PromptCheck(prompt="ab")])
    await world.clock.run(world.coordinator.swap(request(target, "op-2", revision=2, checks=looser)))
    assert (await world.ended("op-2")).state is SwapState.SERVING


async def test_a_trial_that_hangs_is_called_off_with_the_swap(world):
    world.backend.faults["try_out"] = Fault.HANG
    status = await swap(world, world.publish("1.1", checkpoint(q=b"QQQQ")))
    assert status.state is SwapState.ABORTED
    world.assert_serves(world.template)


# An engine that only computes with live weights.


@pytest.fixture
def live(world):
    world.backend.tries_live = True
    return world


async def test_on_live_weights_they_run_twice_and_the_second_time_nobody_is_let_in(live, target):
    client = asyncio.Event()

    async def ask():
        async with live.coordinator.admission() as admission:
            seen.append((admission.live, list(live.backend.steps)))
            client.set()

    seen, asked = [], []
    real = live.backend.try_out

    async def try_out(operation_id, trials):
        if live.backend.paused:
            asked.append(asyncio.ensure_future(ask()))
            for _ in range(20):
                await asyncio.sleep(0)
            assert not client.is_set()
        return await real(operation_id, trials)

    live.backend.try_out = try_out
    assert (await swap(live, target)).state is SwapState.SERVING
    await live.clock.run(client.wait())
    texts = [PromptTrial(text="ab", max_logprob_delta=0.5), PromptTrial(text="c")]
    assert live.backend.trials == texts * 2
    order = ["stage", "try_out", "prepare", "pause", "commit", "verify", "try_live", "resume"]
    assert [step for step in live.backend.steps if step in order] == order
    ((version, steps),) = seen
    assert version == target
    assert "try_live" in steps


async def test_one_that_fails_on_live_weights_brings_the_old_version_back(live, target):
    live.backend.error = ChecksFailed("checks.prompts, number 1: it changes too much")
    live.backend.faults["try_live"] = Fault.ERROR
    status = await swap(live, target)
    assert (status.state, status.error.code) == (SwapState.ROLLED_BACK, "ChecksFailed")
    live.assert_serves(live.template)


@pytest.mark.parametrize("mode", [TrafficMode.OVERLAP, TrafficMode.RECOMPUTE, TrafficMode.FREEZE])
async def test_where_clients_would_get_output_that_was_not_tried_nothing_is_committed(live, target, mode):
    status = await swap(live, target, traffic=Traffic(mode=mode))
    assert (status.state, status.error.code) == (SwapState.ABORTED, "UnsupportedChange")
    assert "commit" not in live.backend.steps
    live.assert_serves(live.template)


async def test_requests_that_outlast_a_drain_are_not_continued_on_what_was_not_tried(live, target):
    traffic = Traffic(timeout_seconds=1, on_timeout=OnTimeout.RECOMPUTE_REQUESTS)
    async with live.coordinator.admission() as admission:
        admission.submitted()
        status = await swap(live, target, traffic=traffic)
    assert (status.state, status.error.code) == (SwapState.ABORTED, "DrainTimeout")
    assert "commit" not in live.backend.steps
