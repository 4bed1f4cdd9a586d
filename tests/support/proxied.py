"""Clients of `modelswap proxy` before a real engine: streams that are read to their end, and swaps under them."""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest

from modelswap_engine.backends.external.control import EngineControl
from modelswap_engine.backends.trials import ANSWER_TOKENS
from modelswap_engine.protocol.messages import SwapStatus
from modelswap_engine.protocol.policy import Checks, PromptCheck
from modelswap_engine.protocol.states import SwapState
from tests.support.engine_ranks import LONG, PROMPTS, SECONDS, Client
from tests.support.models import greedy, mean_logprob, overflowing
from tests.support.serve import Served

ASKED = (*PROMPTS, LONG)
TOKENS = 48


@dataclass
class Versions:
    """Three versions of one model, and what an engine that has loaded them by itself answers."""

    folders: dict[str, Path]
    texts: dict[str, list[str]] = field(default_factory=dict)

    async def ask(self, control: EngineControl, url: str) -> None:
        """Have an engine load each version, as it does by itself, and note what it answers; the last one stays."""
        await control.facts(seconds=SECONDS)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
            client = Client(session, url)
            for version, folder in self.folders.items():
                await control.load_full(str(folder), version, seconds=SECONDS)
                assert await control.flush(seconds=SECONDS)
                asked = (client.collect(prompt, tokens=TOKENS) for prompt in ASKED)
                self.texts[version] = list(await asyncio.gather(*asked))
        assert len({str(texts) for texts in self.texts.values()}) == len(self.folders)


@contextmanager
def standing_before(engine: str, url: str, versions: Versions, folder: Path) -> Iterator[Served]:
    """Run a sidecar before an engine that is on 1.0."""
    command = ("proxy", "--backend", engine, "--upstream", url, "--version", "1.0")
    roots = [path.parent for path in versions.folders.values()]
    served = Served(folder, versions.folders["1.0"], command=command, roots=roots)
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


async def swap(sidecar: Served, versions: Versions, version: str, *, checks: Checks | None = None) -> SwapStatus:
    """Swap to a version and return how that ended."""
    operation, folder = f"to-{version}-{secrets.token_hex(4)}", versions.folders[version]
    await asyncio.to_thread(sidecar.begin, folder, version, operation=operation, checks=checks)
    return await asyncio.to_thread(sidecar.ended, operation)


async def prompts_decide(sidecar: Served, versions: Versions) -> None:
    """Try versions with prompts under streams, 1.0 being live: nobody hears a word of one that does not pass."""
    change = difference(versions.folders["1.0"], versions.folders["1.1"])
    bad = overflowing(versions.folders["1.0"], versions.folders["2.0"].parent / "overflowing")
    tried = Versions({**versions.folders, "overflowing": bad}, versions.texts)
    boots = [rank.boot_id for rank in sidecar.state().ranks]
    async with load(sidecar.data_url) as heard:
        await more(heard, 4)
        for version, checks in (("overflowing", compared(None)), ("1.1", compared(change * 0.99))):
            status = await swap(sidecar, tried, version, checks=checks)
            assert status.error is not None
            assert (status.state, status.error.code) == (SwapState.ROLLED_BACK, "ChecksFailed"), status.error
            await more(heard, 4)
    assert float(status.error.details["change"]) == pytest.approx(change, rel=5e-3)
    assert all(answer.whole for answer in heard)
    assert [answer for answer in heard if answer.text != versions.texts["1.0"][answer.prompt]] == []
    status = await swap(sidecar, tried, "1.1", checks=compared(change * 1.01))
    assert status.state is SwapState.SERVING, status.error
    async with aiohttp.ClientSession() as session:
        answers = [await listen(session, sidecar.data_url, prompt) for prompt in range(len(ASKED))]
    assert [answer.text for answer in answers] == versions.texts["1.1"]
    assert [rank.boot_id for rank in sidecar.state().ranks] == boots


def compared(allowed: float | None) -> Checks:
    return Checks(prompts=[PromptCheck(prompt=PROMPTS[0]), PromptCheck(prompt=PROMPTS[1], max_logprob_delta=allowed)])


def difference(old: Path, new: Path) -> float:
    """Return by how much transformers finds the mean log-probability of the old version's answer to change."""
    (answer,) = greedy(old, [PROMPTS[1]], tokens=ANSWER_TOKENS)
    return abs(mean_logprob(new, PROMPTS[1], answer) - mean_logprob(old, PROMPTS[1], answer))


async def nothing_is_lost_and_nothing_mixed(
    sidecar: Served, versions: Versions, *, kind: str, method: str = "pointer"
) -> None:
    """Swap some tensors, then to another model of the same shape, then back, under streams; 1.0 is live before."""
    async with load(sidecar.data_url) as heard:
        await more(heard, 6)
        for version in ("1.1", "2.0", "1.0"):
            status = await swap(sidecar, versions, version)
            assert status.state is SwapState.SERVING, status.error
            assert status.commit_method == method
            await more(heard, 8)
    assert all(answer.whole for answer in heard)
    assert {answer.version for answer in heard} == {"1.0", "1.1", "2.0"}
    assert [answer for answer in heard if answer.text != versions.texts[answer.version][answer.prompt]] == []
    state = await asyncio.to_thread(sidecar.state)
    assert state.live is not None
    assert [rank.digest for rank in state.ranks] == [state.live.digest]
    assert state.capabilities.kind == kind
