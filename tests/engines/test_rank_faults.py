"""A model split over two of vLLM's ranks, behind the sidecar: both go, or none; and one that fails, hangs or dies."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from modelswap_engine.protocol.policy import VerifyMode
from modelswap_engine.protocol.states import SwapState
from tests.support import rank_faults
from tests.support.adapter_traffic import command, load, say
from tests.support.adapters import LINEAR
from tests.support.cache import REPOSITORY
from tests.support.engine_ranks import PROMPTS
from tests.support.engine_world import World, long
from tests.support.lora import on_both
from tests.support.models import Pair

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

TWO = (
    "--tensor-parallel-size", "2", "--enable-lora", "--max-lora-rank", "8", "--max-loras", "1", "--max-cpu-loras", "2",
)  # fmt: skip
TOKENS = 24


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that says what goes wrong in the ranks."""
    file: Path = tmp_path_factory.mktemp("faults") / "faults"
    file.write_text("")
    return file


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(pair: Pair, faults: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    variables = {
        "MODELSWAP_VLLM_EXTENSION": rank_faults.NAME,
        rank_faults.VARIABLE: f"file:{faults}",
        "PYTHONPATH": f"{REPOSITORY / 'engine'}:{REPOSITORY}",
    }
    async with World.running(tmp_path_factory.mktemp("ranks"), pair, options=TWO, variables=variables) as world:
        yield world


@pytest_asyncio.fixture(loop_scope="module")
async def world(shared: World, faults: Path) -> World:
    faults.write_text("")
    await shared.on_one()
    return shared


async def test_every_rank_proves_the_version(world: World) -> None:
    assert await world.ended(await world.begin("1.1")) is SwapState.SERVING
    await world.serves("1.1")
    state = await asyncio.to_thread(world.pod.sidecar.state)
    assert [rank.rank for rank in state.ranks] == [0, 1]
    assert len({rank.boot_id for rank in state.ranks}) == len({rank.pid for rank in state.ranks}) == 2


async def test_an_adapter_is_on_every_rank_and_outlives_its_base(world: World) -> None:
    """Each of its matrices is cut in two, so an answer is right only where both ranks have theirs."""
    sidecar = world.pod.sidecar
    folder, wanted = await asyncio.to_thread(
        on_both, world.pair, "split", PROMPTS, tokens=TOKENS, seed=4, r=4, lora_alpha=8, target_modules=list(LINEAR)
    )
    await load(sidecar, "a", folder)
    one, other = await held(world)
    assert one == other
    assert len(one) == 1
    assert await says(world) == wanted["1.0"]
    assert await world.ended(await world.begin("1.1")) is SwapState.SERVING
    assert await says(world) == wanted["1.1"] != wanted["1.0"]
    await world.serves("1.1")
    await command(sidecar, "adapter", "unload", "a")
    assert await held(world) == [[], []]
    assert "does not exist" in str((await say(sidecar, "a")).error)


async def says(world: World) -> list[list[int]]:
    return await asyncio.gather(*(world.client.ids(prompt, model="a", tokens=TOKENS) for prompt in PROMPTS))


async def held(world: World) -> list[list[int]]:
    """Return the numbers of the adapters that each rank has in its memory."""
    url, asked = f"{world.tap.url}/collective_rpc", {"method": "list_loras"}
    async with aiohttp.ClientSession() as session, session.post(url, json=asked) as answer:
        found: list[list[int]] = (await answer.json())["results"]
        return found


@pytest.mark.parametrize(
    ("step", "ended"),
    [
        long("stage", SwapState.ABORTED),
        long("prepare", SwapState.ABORTED),
        ("commit", SwapState.ROLLED_BACK),
        long("verify", SwapState.ROLLED_BACK),
    ],
)
async def test_one_rank_that_fails_takes_the_others_back(
    world: World, faults: Path, step: str, ended: SwapState
) -> None:
    boot = world.pod.boot_id()
    faults.write_text(f"{step}@1:raise#1")
    verify = VerifyMode.STRICT if step == "verify" else VerifyMode.STANDARD  # a call of its own only where by hash
    assert await world.ended(await world.begin("1.1", verify=verify)) is ended
    await world.serves("1.0")
    assert world.pod.boot_id() == boot  # both ranks answered, so the engine can still be asked
    assert await world.ended(await world.begin("1.1")) is SwapState.SERVING
    await world.serves("1.1")


@pytest.mark.parametrize("number", [long(signal.SIGKILL), long(signal.SIGSTOP)])
async def test_one_rank_that_is_gone_or_stopped_costs_a_start_of_the_engine(
    world: World, number: signal.Signals
) -> None:
    """A call that not all ranks answered leaves the others' answers in vLLM's queues: it is never asked again."""
    boot = world.pod.boot_id()
    state = await asyncio.to_thread(world.pod.sidecar.state)
    world.tap.before("commit", lambda: os.kill(state.ranks[1].pid, number))
    operation = await world.begin("1.1")
    await world.tap.acted()
    asked = len(world.tap.seen)
    assert await world.ended(operation) is SwapState.ROLLED_BACK
    await world.serves("1.0")
    assert world.pod.boot_id() != boot
    after = world.tap.seen[asked:]
    assert after[after.index("hello") :]  # the next message to ranks is to those of another start
    assert not {"rollback", "verify", "release"} & set(after[: after.index("hello")])
