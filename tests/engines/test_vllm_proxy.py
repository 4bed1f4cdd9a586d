"""`modelswap proxy` before the real vLLM: requests through the one door, and swaps inside the engine under load."""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest

from modelswap_engine.backends.vllm.control import VllmControl
from modelswap_engine.protocol.messages import SwapStatus
from modelswap_engine.protocol.states import SwapState
from tests.support.engine_ranks import LONG, PROMPTS, SECONDS, Client
from tests.support.engines import EngineServer
from tests.support.models import Pair, tiny_llama
from tests.support.serve import Served

pytestmark = pytest.mark.engine

ASKED = (*PROMPTS, LONG)
TOKENS = 48


@dataclass
class Versions:
    """Three versions of one model, and what a vLLM that has loaded them by itself answers."""

    folders: dict[str, Path]
    texts: dict[str, list[str]] = field(default_factory=dict)


@pytest.fixture(scope="module")
def versions(vllm: EngineServer, pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Versions:
    """Some tensors differ between 1.0 and 1.1; 2.0 is another model of the same shape. The engine is left on 1.0."""
    other = tiny_llama(tmp_path_factory.mktemp("other") / "other", seed=7, hidden=128)
    made = Versions({"1.1": pair.new, "2.0": other, "1.0": pair.old})
    asyncio.run(ask_engine(vllm, made))
    assert len({str(texts) for texts in made.texts.values()}) == 3
    return made


async def ask_engine(vllm: EngineServer, made: Versions) -> None:
    """Have it load each version by itself, and note what it answers."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        control, client = VllmControl(vllm.url, session), Client(session, vllm.url)
        await control.facts(seconds=SECONDS)
        for version, folder in made.folders.items():
            await control.load_full(str(folder), version, seconds=SECONDS)
            assert await control.flush(seconds=SECONDS)
            made.texts[version] = [await client.text(prompt, tokens=TOKENS) for prompt in ASKED]


@pytest.fixture(scope="module")
def sidecar(vllm: EngineServer, versions: Versions, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("sidecar")
    command = ("proxy", "--backend", "vllm", "--upstream", vllm.url, "--version", "1.0")
    served = Served(
        folder, versions.folders["1.0"], command=command, roots=[path.parent for path in versions.folders.values()]
    )
    served.start()
    try:
        yield served.wait_ready()
    finally:
        served.stop()


@dataclass
class Heard:
    """One streamed answer, as a client heard it."""

    prompt: int
    version: str
    text: str
    whole: bool


async def listen(session: aiohttp.ClientSession, url: str, prompt: int, *, tokens: int = TOKENS) -> Heard:
    body = {"model": "tiny", "prompt": ASKED[prompt], "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    text, whole = "", False
    async with session.post(f"{url}/v1/completions", json={**body, "stream": True}) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            data = line.decode().removeprefix("data: ").strip()
            if data == "[DONE]":
                whole = True
            elif data:
                chunk = json.loads(data)
                assert chunk["model"] == "tiny"
                text += chunk["choices"][0]["text"]
        return Heard(prompt, answer.headers["x-modelswap-version"], text, whole)


@asynccontextmanager
async def load(url: str, *, streams: int = 4) -> AsyncIterator[list[Heard]]:
    """Clients that ask again and again until the context is left; what each of them heard, failures raised."""
    heard: list[Heard] = []
    stopping = asyncio.Event()

    async def keep_asking(session: aiohttp.ClientSession, number: int) -> None:
        while not stopping.is_set():
            heard.append(await listen(session, url, number % len(ASKED)))
            number += 1

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session, asyncio.TaskGroup() as group:
        for number in range(streams):
            group.create_task(keep_asking(session, number))
        try:
            yield heard
        finally:
            stopping.set()


async def more(heard: list[Heard], count: int) -> None:
    """Wait until so many more answers have ended."""
    wanted = len(heard) + count
    async with asyncio.timeout(240):
        while len(heard) < wanted:
            await asyncio.sleep(0.02)  # answers come in when they come in


async def swap(sidecar: Served, versions: Versions, version: str) -> SwapStatus:
    """Swap to a version and return how that ended."""
    operation = f"to-{version}-{secrets.token_hex(4)}"
    await asyncio.to_thread(sidecar.begin, versions.folders[version], version, operation=operation)
    return await asyncio.to_thread(sidecar.ended, operation)


@pytest.fixture
async def on_one(sidecar: Served, versions: Versions) -> None:
    """1.0 is live."""
    assert (await swap(sidecar, versions, "1.0")).state is SwapState.SERVING


@pytest.mark.usefixtures("on_one")
async def test_swaps_under_streaming_load_lose_nothing_and_mix_nothing(sidecar: Served, versions: Versions) -> None:
    route = ["1.1", "2.0", "1.0"]
    async with load(sidecar.data_url) as heard:
        await more(heard, 6)
        for version in route:
            status = await swap(sidecar, versions, version)
            assert status.state is SwapState.SERVING, status.error
            assert status.commit_method == "pointer"
            await more(heard, 8)
    assert all(answer.whole for answer in heard)
    assert {answer.version for answer in heard} == {"1.0", "1.1", "2.0"}
    assert [answer for answer in heard if answer.text != versions.texts[answer.version][answer.prompt]] == []
    state = await asyncio.to_thread(sidecar.state)
    assert state.live is not None
    assert [rank.digest for rank in state.ranks] == [state.live.digest]
    assert state.capabilities.kind == "vllm"


@pytest.mark.usefixtures("on_one")
async def test_a_version_that_cannot_be_served_leaves_the_old_one(sidecar: Served, versions: Versions) -> None:
    wider = tiny_llama(versions.folders["2.0"].parent / "wider", seed=3, hidden=64)
    await asyncio.to_thread(sidecar.begin, wider, "3.0", operation="wider")
    status = await asyncio.to_thread(sidecar.ended, "wider")

    assert status.state is SwapState.ABORTED
    async with aiohttp.ClientSession() as session:
        answer = await listen(session, sidecar.data_url, 0)
    assert (answer.version, answer.text) == ("1.0", versions.texts["1.0"][0])


async def test_admin_routes_of_the_engine_do_not_exist_from_outside(sidecar: Served, vllm: EngineServer) -> None:
    async with aiohttp.ClientSession() as session:
        for path in ("/pause", "/reset_prefix_cache", "/collective_rpc", "/v1/load_lora_adapter", "/update_weights"):
            async with session.post(sidecar.data_url + path, json={"method": "x"}) as answer:
                assert answer.status == 404, path
        async with session.get(f"{vllm.url}/is_paused") as answer:
            assert (await answer.json())["is_paused"] is False
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
