"""Prompts before an engine that computes with live weights only: what they refuse, and that nobody is let in before."""

import math
from pathlib import Path

import pytest

from modelswap_engine.protocol.policy import Checks, PromptCheck
from modelswap_engine.protocol.states import SwapState
from tests.support.external_world import ExternalWorld
from tests.support.fake_control import Broken

FINITE = Checks(prompts=[PromptCheck(prompt="hello"), PromptCheck(prompt="hi")])
ALIKE = Checks(prompts=[PromptCheck(prompt="hello", max_logprob_delta=0.25)])
OLD = -1.0


def answering(world: ExternalWorld, new: float) -> None:
    """Have the engine find its tokens as likely as this, once its weights are the new ones."""
    world.control.logprob = lambda: new if world.holds(world.two) else OLD


def asked(world: ExternalWorld) -> list[str]:
    return [call for call in world.control.calls if call in ("continued", "logprobs", "flush")]


@pytest.mark.parametrize(("checks", "new"), [(FINITE, -30.0), (ALIKE, -1.25), (ALIKE, -0.75)])
async def test_a_version_that_passes_serves_and_the_engine_has_forgotten_the_prompts(
    tmp_path: Path, checks: Checks, new: float
) -> None:
    world = ExternalWorld(tmp_path)
    answering(world, new)
    async with world.running():
        world.control.calls.clear()
        assert (await world.swap(world.two, checks=checks)).state is SwapState.SERVING
        assert world.coordinator.live == world.two
        last = len(asked(world)) - 1
        assert asked(world).index("continued") < asked(world).index("flush") < asked(world).index("logprobs")
        assert asked(world)[last] == "flush"
        assert not world.restart.wanted


@pytest.mark.parametrize(
    ("checks", "new"), [(FINITE, math.nan), (FINITE, -math.inf), (ALIKE, -1.26), (ALIKE, -0.74), (ALIKE, math.nan)]
)
async def test_one_that_does_not_is_taken_back_by_pointer(tmp_path: Path, checks: Checks, new: float) -> None:
    world = ExternalWorld(tmp_path)
    answering(world, new)
    async with world.running():
        boot = world.control.boot_id
        status = await world.swap(world.two, checks=checks)
        assert status.error is not None
        assert (status.state, status.error.code) == (SwapState.ROLLED_BACK, "ChecksFailed")
        assert "number 1" in status.error.message
        assert world.holds(world.one)
        assert world.coordinator.live == world.one
        assert world.coordinator.state().ready
        assert world.control.weight_version == world.one.digest
        assert (world.control.boot_id, world.restart.wanted) == (boot, False)


@pytest.mark.parametrize(
    ("broken", "code"),
    [
        (Broken.REFUSED, "UnsupportedChange"),
        (Broken.LOST_BEFORE, "Busy"),
        (Broken.UNREACHABLE, "Busy"),
        (Broken.HANG, "Busy"),
    ],
)
async def test_what_cannot_be_asked_is_refused_before_anybody_is_stopped(
    tmp_path: Path, broken: Broken, code: str
) -> None:
    world = ExternalWorld(tmp_path, prompts=0.2)
    async with world.running():
        world.control.broken["continued"] = broken
        status = await world.swap(world.two, checks=ALIKE)
        assert status.error is not None
        assert (status.state, status.error.code) == (SwapState.ABORTED, code)
        assert status.pause_seconds is None
        assert world.coordinator.live == world.one
        assert world.coordinator.state().ready
        assert not world.restart.wanted


async def test_output_that_the_engine_has_no_words_for_is_not_finite(tmp_path: Path) -> None:
    world = ExternalWorld(tmp_path)
    async with world.running():
        world.control.broken["logprobs"] = Broken.REFUSED  # as vLLM refuses NaN
        status = await world.swap(world.two, checks=FINITE)
        assert status.error is not None
        assert (status.state, status.error.code) == (SwapState.ROLLED_BACK, "ChecksFailed")
        assert world.holds(world.one)


async def test_a_live_version_that_overflows_can_be_replaced_where_nothing_is_compared(tmp_path: Path) -> None:
    world = ExternalWorld(tmp_path)
    world.control.logprob = lambda: OLD if world.holds(world.two) else math.nan
    async with world.running():
        refused = await world.swap(world.two, checks=ALIKE)
        assert refused.error is not None
        assert (refused.state, refused.error.code) == (SwapState.ABORTED, "UnsupportedChange")
        assert (await world.swap(world.two, "op-2", checks=FINITE)).state is SwapState.SERVING


@pytest.mark.parametrize("broken", [Broken.HANG, Broken.LOST_BEFORE])
async def test_an_engine_that_gives_no_answer_with_the_new_weights_is_not_trusted_any_more(
    tmp_path: Path, broken: Broken
) -> None:
    world = ExternalWorld(tmp_path, prompts=0.2)
    async with world.running():
        world.control.broken["logprobs"] = broken
        status = await world.swap(world.two, checks=FINITE)
        assert not status.state.succeeded
        assert world.restart.wanted
        assert world.coordinator.live != world.two
