"""`modelswap proxy` before the real vLLM: requests through the one door, and swaps inside the engine under load."""

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from modelswap_engine.backends.vllm.control import VllmControl
from modelswap_engine.protocol.messages import CheckRequest, CheckResult
from modelswap_engine.protocol.states import SwapState
from tests.support import models
from tests.support.adapter_traffic import command
from tests.support.adapters import write_adapter
from tests.support.engine_world import long
from tests.support.engines import EngineServer
from tests.support.models import Pair
from tests.support.orders import hashes_of
from tests.support.proxied import (
    ASKED,
    Versions,
    listen,
    load,
    more,
    nothing_is_lost_and_nothing_mixed,
    prompts_decide,
    standing_before,
    swap,
)
from tests.support.serve import Served

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def versions(vllm: EngineServer, pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Versions:
    """Some tensors differ between 1.0 and 1.1; 2.0 is another model of the same shape. The engine is left on 1.0.

    From 1.0 to "part" one tensor differs, of three that are one parameter of the engine.
    """
    folder = tmp_path_factory.mktemp("other")
    other = models.tiny_llama(folder / "other", seed=7, hidden=128)
    part = models.write_variant(pair.old, folder / "part", ["model.layers.0.self_attn.q_proj.weight"], seed=5)
    made = Versions({"1.1": pair.new, "2.0": other, "part": part, "1.0": pair.old})
    asyncio.run(ask_engine(vllm, made))
    return made


async def ask_engine(vllm: EngineServer, made: Versions) -> None:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        await made.ask(VllmControl(vllm.url, session), vllm.url)


@pytest.fixture(scope="module")
def sidecar(vllm: EngineServer, versions: Versions, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with standing_before("vllm", vllm.url, versions, tmp_path_factory.mktemp("sidecar")) as served:
        yield served


@pytest.fixture
async def on_one(sidecar: Served, versions: Versions) -> None:
    """1.0 is live."""
    assert (await swap(sidecar, versions, "1.0")).state is SwapState.SERVING


@pytest.mark.usefixtures("on_one")
async def test_swaps_under_streaming_load_lose_nothing_and_mix_nothing(sidecar: Served, versions: Versions) -> None:
    await nothing_is_lost_and_nothing_mixed(sidecar, versions, kind="vllm")


@pytest.mark.usefixtures("on_one")
async def test_prompts_decide_over_a_version_before_anybody_hears_it(sidecar: Served, versions: Versions) -> None:
    await prompts_decide(sidecar, versions)


def missing(folder: Path) -> Path:
    return models.drop_tensor(folder, TENSOR)


def narrower(folder: Path) -> Path:
    return models.edit_tensor(folder, TENSOR, lambda tensor: tensor[:, :-8])


def not_a_number(folder: Path) -> Path:
    return models.edit_tensor(folder, TENSOR, lambda tensor: tensor * float("nan"))


def cut_short(folder: Path) -> Path:
    file = folder / models.WEIGHTS
    with file.open("r+b") as handle:
        handle.truncate(file.stat().st_size - 5000)
    return folder


TENSOR = "model.layers.1.self_attn.o_proj.weight"
TRAPS = {
    "missing tensor": (missing, "IncompatibleModel"),
    "another model": (lambda folder: models.tiny_llama(folder / "wider", seed=3, hidden=64), "IncompatibleModel"),
    # Of these the conformance suite has more.
    "one other shape": (narrower, "IncompatibleModel"),
    "not a number": (not_a_number, "ChecksFailed"),
    "cut short": (cut_short, "InvalidCheckpoint"),
}


@pytest.mark.usefixtures("on_one")
@pytest.mark.parametrize("kind", [long(kind) if place > 1 else kind for place, kind in enumerate(TRAPS)])
async def test_what_breaks_vllm_by_its_own_routes_leaves_the_old_version(
    sidecar: Served, versions: Versions, kind: str
) -> None:
    damage, code = TRAPS[kind]
    folder = versions.folders["2.0"].parent / kind.replace(" ", "-")
    bad = damage(Path(shutil.copytree(versions.folders["2.0"], folder)))
    await asyncio.to_thread(sidecar.begin, bad, "3.0", operation=f"bad-{kind}")
    status = await asyncio.to_thread(sidecar.ended, f"bad-{kind}")

    assert status.state is SwapState.ABORTED
    assert status.error is not None
    assert status.error.code == code
    async with aiohttp.ClientSession() as session:
        answers = [await listen(session, sidecar.data_url, prompt) for prompt in range(len(ASKED))]
    assert {answer.version for answer in answers} == {"1.0"}
    assert [answer.text for answer in answers] == versions.texts["1.0"]


@pytest.mark.usefixtures("on_one")
async def test_a_part_of_a_fused_parameter_is_completed(sidecar: Served, versions: Versions) -> None:
    """vLLM by itself makes something else of a folder with a third of it, and says that all is well."""
    status = await swap(sidecar, versions, "part")
    assert status.state is SwapState.SERVING, status.error
    async with aiohttp.ClientSession() as session:
        answers = [await listen(session, sidecar.data_url, prompt) for prompt in range(len(ASKED))]
    assert [answer.text for answer in answers] == versions.texts["part"]


async def test_without_adapters_in_the_engine_the_refusal_names_its_option(
    sidecar: Served, versions: Versions, tmp_path: Path
) -> None:
    folder = write_adapter(versions.folders["1.0"].parent / tmp_path.name)
    refused = await command(sidecar, "adapter", "load", "a", "--source", str(folder), code=1)
    assert "--enable-lora" in refused
    assert sidecar.state().capabilities.max_loras == 0


async def test_admin_routes_of_the_engine_do_not_exist_from_outside(sidecar: Served, vllm: EngineServer) -> None:
    async with aiohttp.ClientSession() as session:
        for path in ("/pause", "/reset_prefix_cache", "/collective_rpc", "/v1/load_lora_adapter", "/update_weights"):
            async with session.post(sidecar.data_url + path, json={"method": "x"}) as answer:
                assert answer.status == 404, path
        async with session.get(f"{vllm.url}/is_paused") as answer:
            assert (await answer.json())["is_paused"] is False
        async with session.get(f"{sidecar.data_url}/v1/models") as answer:
            assert [card["id"] for card in (await answer.json())["data"]] == ["tiny"]


@pytest.mark.full  # test_kills kills one in each phase
async def test_a_killed_sidecar_finds_what_is_live_and_proves_it(sidecar: Served, versions: Versions) -> None:
    assert (await swap(sidecar, versions, "1.1")).state is SwapState.SERVING
    await asyncio.to_thread(sidecar.kill)
    await asyncio.to_thread(lambda: sidecar.start().wait_ready())

    state = await asyncio.to_thread(sidecar.state)
    assert state.live is not None
    assert state.live.version == "1.1"
    async with aiohttp.ClientSession() as session:
        answer = await listen(session, sidecar.data_url, 1)
    assert (answer.version, answer.text) == ("1.1", versions.texts["1.1"][1])


@pytest.mark.usefixtures("on_one")
async def test_a_check_that_holds_the_engine_still_proves_every_tensor_under_load(
    sidecar: Served, versions: Versions
) -> None:
    wanted = hashes_of(versions.folders["1.0"])
    async with load(sidecar.data_url) as heard:
        await more(heard, 3)
        found = await asyncio.to_thread(sidecar.control.post, "/check", CheckRequest(), CheckResult)
        assert found.ok
        assert "model.layers.0.mlp.down_proj.weight" in found.unverifiable
        assert found.tensors.items() <= wanted.items()
        found = await asyncio.to_thread(sidecar.control.post, "/check", CheckRequest(still=True), CheckResult)
        assert (found.ok, found.unverifiable, found.tensors) == (True, [], wanted)
        await more(heard, 3)
    assert [answer for answer in heard if answer.text != versions.texts["1.0"][answer.prompt]] == []
