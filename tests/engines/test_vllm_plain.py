"""`modelswap proxy --route plain` before the real vLLM: swaps by its own routes, and a restart where one goes wrong."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from modelswap_engine.protocol.policy import Checks, PromptCheck, VerifyMode
from modelswap_engine.protocol.states import SwapState
from tests.support.engine_pod import ONE_PROCESS
from tests.support.engine_world import World
from tests.support.models import WEIGHTS, Pair, overflowing

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

PLAIN = ("--route", "plain", "--allow-unverifiable")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    async with World.running(tmp_path_factory.mktemp("plain"), pair, options=ONE_PROCESS, route=PLAIN) as world:
        yield world


@pytest_asyncio.fixture(loop_scope="module")
async def world(shared: World) -> World:
    await shared.on_one()
    return shared


async def test_a_swap_and_back_under_one_start_of_the_engine(world: World) -> None:
    boot = world.pod.boot_id()
    old = await world.client.texts()  # and so their prefixes are cached
    assert await world.ended(await world.begin("1.1")) is SwapState.SERVING
    await world.serves("1.1")
    assert await world.ended(await world.begin("1.0")) is SwapState.SERVING
    await world.serves("1.0")
    assert await world.client.texts() == old
    assert world.pod.boot_id() == boot
    assert world.tap.seen.count("reload_weights") == 2
    # What vLLM shows is hashed once requests go on, and not while they wait.
    assert closed_gate(world)[:3] == ["/pause", "reload_weights", "/resume"]


async def test_strict_hashes_before_requests_go_on(world: World) -> None:
    world.tap.seen.clear()
    assert await world.ended(await world.begin("1.1", verify=VerifyMode.STRICT)) is SwapState.SERVING
    await world.serves("1.1")
    assert closed_gate(world)[:4] == ["/pause", "reload_weights", "/weight_checker", "/resume"]


def closed_gate(world: World) -> list[str]:
    """Return the steps that take time, from the first pause on."""
    steps = [name for name in world.tap.seen if name in {"/pause", "reload_weights", "/resume", "/weight_checker"}]
    return steps[steps.index("/pause") :]


async def test_a_sidecar_that_was_killed_takes_over_what_it_had_proved(world: World) -> None:
    assert await world.ended(await world.begin("1.1")) is SwapState.SERVING
    boot = world.pod.boot_id()
    world.pod.sidecar.kill()
    await asyncio.to_thread(lambda: world.pod.sidecar.start().wait_ready())
    await world.serves("1.1")
    assert world.pod.boot_id() == boot


@pytest.mark.full
async def test_a_version_that_fails_a_prompt_costs_a_start_on_the_old_one(world: World) -> None:
    checks = Checks(prompts=[PromptCheck(prompt="hello"), PromptCheck(prompt="hi", max_logprob_delta=1000.0)])
    boot, wanted = world.pod.boot_id(), await world.client.texts()
    bad = overflowing(world.pair.old, world.pair.old.parent / "overflowing-plain")
    assert await world.ended(await world.begin("1.2", folder=bad, checks=checks)) is SwapState.ROLLED_BACK
    await world.serves("1.0")
    assert world.pod.boot_id() != boot
    assert await world.client.texts() == wanted
    boot = world.pod.boot_id()
    assert await world.ended(await world.begin("1.1", checks=checks)) is SwapState.SERVING
    await world.serves("1.1")
    assert world.pod.boot_id() == boot


@pytest.mark.full
async def test_a_load_that_fails_in_the_engine_costs_a_start_on_the_old_version(world: World) -> None:
    """Without weights it says that it is healthy, and dies of the next request: it gets none."""
    boot, wanted = world.pod.boot_id(), await world.client.texts()
    world.tap.before("reload_weights", lambda: cut_short(world))
    operation = await world.begin("1.1")
    await world.tap.acted()
    assert await world.ended(operation) is SwapState.ROLLED_BACK
    await world.serves("1.0")
    assert world.pod.boot_id() != boot
    # What a swap made is what a start on the same weights makes.
    assert await world.client.texts() == wanted
    assert await world.ended(await world.begin("1.1")) is SwapState.SERVING
    await world.serves("1.1")


def cut_short(world: World) -> None:
    """Damage what the engine is about to load, after it was proved."""
    for file in world.folder.glob(f"checkpoints/plain/exchanges/*/{WEIGHTS}"):
        file.write_bytes(file.read_bytes()[:-5000])
