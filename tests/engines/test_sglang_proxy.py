"""`modelswap proxy` before the real SGLang: requests through the one door, and swaps inside the engine under load."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import aiohttp
import pytest

from modelswap_engine.backends.sglang.client import SglangClient
from modelswap_engine.backends.sglang.control import SglangControl
from modelswap_engine.http.proxy.dialects import SGLANG
from modelswap_engine.protocol.policy import TrafficMode
from modelswap_engine.protocol.states import SwapState
from tests.support.held import held
from tests.support.models import LOWER, Pair, tiny_llama
from tests.support.proxied import (
    Versions,
    listen,
    nothing_is_lost_and_nothing_mixed,
    prompts_decide,
    standing_before,
    swap,
)
from tests.support.serve import Served
from tests.support.sglang import Sglang, connected

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def versions(sglang: Sglang, pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Versions:
    """Some tensors differ between 1.0 and 1.1; 2.0 is another model of the same shape. The engine is left on 1.0."""
    other = tiny_llama(tmp_path_factory.mktemp("other") / "other", seed=7, hidden=128)
    made = Versions({"1.1": pair.new, "2.0": other, "1.0": pair.old})
    asyncio.run(ask_engine(sglang, made))
    return made


async def ask_engine(sglang: Sglang, made: Versions) -> None:
    control = SglangControl(SglangClient(sglang.url))
    await made.ask(control, sglang.url)
    await control.close()


@pytest.fixture(scope="module")
def sidecar(sglang: Sglang, versions: Versions, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with standing_before("sglang", sglang.url, versions, tmp_path_factory.mktemp("sidecar")) as served:
        yield served


@pytest.fixture
async def on_one(sidecar: Served, versions: Versions) -> None:
    """1.0 is live."""
    assert (await swap(sidecar, versions, "1.0")).state is SwapState.SERVING


@pytest.mark.usefixtures("on_one")
async def test_swaps_under_streaming_load_lose_nothing_and_mix_nothing(sidecar: Served, versions: Versions) -> None:
    await nothing_is_lost_and_nothing_mixed(sidecar, versions, kind="sglang")


@pytest.mark.usefixtures("on_one")
async def test_prompts_decide_over_a_version_before_anybody_hears_it(sidecar: Served, versions: Versions) -> None:
    await prompts_decide(sidecar, versions)


@pytest.mark.usefixtures("on_one")
async def test_a_version_that_would_end_the_engine_leaves_the_old_one(sidecar: Served, versions: Versions) -> None:
    wider = tiny_llama(versions.folders["2.0"].parent / "wider", seed=3, hidden=64)
    await asyncio.to_thread(sidecar.begin, wider, "3.0", operation="wider")
    status = await asyncio.to_thread(sidecar.ended, "wider")

    assert status.state is SwapState.ABORTED
    async with aiohttp.ClientSession() as session:
        answer = await listen(session, sidecar.data_url, 0)
    assert (answer.version, answer.text) == ("1.0", versions.texts["1.0"][0])


@pytest.mark.usefixtures("on_one")
async def test_requests_that_are_ended_for_a_swap_hear_why(sidecar: Served, sglang: Sglang, versions: Versions) -> None:
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 450, "temperature": 0, "ignore_eos": True, "stream": True}

    async def ask() -> AsyncGenerator[bytes, None]:
        async with session.post(f"{sidecar.data_url}/v1/completions", json=body) as answer:
            async for line in answer.content:
                if line.strip():
                    yield line

    async with aiohttp.ClientSession() as session, connected(sglang.url) as engine:
        async with held(engine, ask) as answer:
            await asyncio.to_thread(
                sidecar.begin, versions.folders["1.1"], "1.1", operation="abort", mode=TrafficMode.ABORT
            )
            events = await answer.whole()
            await engine.go_on()
        status = await asyncio.to_thread(sidecar.ended, "abort")
        assert (status.state, status.aborted_requests) == (SwapState.SERVING, 1)
        assert b'"error"' in events[-2]  # and after it the mark of the end
        heard = await listen(session, sidecar.data_url, 0)
    assert (heard.version, heard.text) == ("1.1", versions.texts["1.1"][0])


@pytest.mark.usefixtures("on_one")
async def test_its_own_route_is_let_through_and_says_which_version_answers(sidecar: Served) -> None:
    body = {"text": "hello", "sampling_params": {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}}
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{sidecar.data_url}/generate", json={**body, "extra_key": "mine"}) as answer:
            assert answer.headers["x-modelswap-version"] == "1.0"
            assert set((await answer.json())["text"]) <= set(LOWER)
        async with session.post(f"{sidecar.data_url}/generate", json={**body, "session_params": {"id": "s"}}) as answer:
            assert answer.status == 400


@pytest.mark.usefixtures("on_one")
async def test_each_route_that_is_let_through_is_one_of_the_engines(sidecar: Served) -> None:
    said = [{"role": "user", "content": "hello"}]
    bodies: dict[str, dict[str, object]] = {
        "/v1/completions": {"model": "tiny", "prompt": ["hello", "world"], "max_tokens": 4, "extra_key": ["a", "b"]},
        "/v1/chat/completions": {"model": "tiny", "messages": said, "max_tokens": 4, "extra_key": "a"},
        "/generate": {"text": "hello", "sampling_params": {"max_new_tokens": 4}},
        "/v1/messages": {"model": "tiny", "messages": said, "max_tokens": 4},
        "/v1/messages/count_tokens": {"model": "tiny", "messages": said},
        "/v1/tokenize": {"model": "tiny", "prompt": "hello"},
        "/v1/detokenize": {"model": "tiny", "tokens": [100, 101]},
    }
    assert set(bodies) == {route.path for route in SGLANG.routes}
    async with aiohttp.ClientSession() as session:
        for path, body in bodies.items():
            async with session.post(sidecar.data_url + path, json=body) as answer:
                assert answer.status == 200, (path, await answer.text())
                assert answer.headers["x-modelswap-version"] == "1.0"


async def test_admin_routes_of_the_engine_do_not_exist_from_outside(sidecar: Served) -> None:
    paths = ("/pause_generation", "/flush_cache", "/update_weights_from_disk", "/load_lora_adapter", "/weights_checker")
    async with aiohttp.ClientSession() as session:
        for path in paths:
            async with session.post(sidecar.data_url + path, json={"mode": "abort"}) as answer:
                assert answer.status == 404, path
        async with session.get(f"{sidecar.data_url}/v1/models") as answer:
            assert [card["id"] for card in (await answer.json())["data"]] == ["tiny"]


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


async def test_swaps_through_its_own_routes_lose_nothing_and_mix_nothing_either(
    sidecar: Served, sglang: Sglang, versions: Versions, tmp_path: Path
) -> None:
    sidecar.stop()
    command = ("proxy", "--backend", "sglang", "--route", "plain", "--upstream", sglang.url, "--version", "1.0")
    roots = [path.parent for path in versions.folders.values()]
    plain = Served(tmp_path, versions.folders["1.0"], command=command, roots=roots)
    try:
        await asyncio.to_thread(lambda: plain.start().wait_ready())  # it catches up from what the other one left
        await nothing_is_lost_and_nothing_mixed(plain, versions, kind="sglang", method="disk")
    finally:
        await asyncio.to_thread(plain.stop)
