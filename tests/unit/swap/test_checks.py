"""Prompts that a version is tried with, while the old one still answers everybody."""

from modelswap_engine.backends.port import PromptTrial
from modelswap_engine.protocol.errors import ChecksFailed
from modelswap_engine.protocol.policy import Checks, PromptCheck
from modelswap_engine.protocol.states import SwapState
from tests.support.fake_backend import Fault
from tests.support.fake_source import FakeCheckpoint
from tests.support.swapping import checkpoint, request

_CHECKS = Checks(prompts=[PromptCheck(prompt="ab", max_logprob_delta=0.5), PromptCheck(prompt="c")])


async def swap(world, target, *, checks=_CHECKS):
    await world.clock.run(world.coordinator.swap(request(target, checks=checks)))
    return await world.ended("op-1")


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
