"""LoRA adapters behind `modelswap proxy` in the real vLLM: the same commands and promises as with our own engine."""

import asyncio
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from safetensors.torch import load_file, save_file

from modelswap_engine.protocol.adapters import AdapterRegistry
from modelswap_engine.protocol.policy import Checks, PromptCheck
from modelswap_engine.protocol.states import SwapState
from tests.support import engines
from tests.support.adapter_traffic import (
    command,
    letters,
    load,
    load_on,
    never_the_base,
    refuses_rank_16,
    say,
    states,
    swap,
    takes_no_more,
)
from tests.support.clients import makers
from tests.support.engine_ranks import LONG, PROMPTS, SECONDS, Client
from tests.support.engines import EngineServer
from tests.support.held import StoppableVllm, beginning_and_end, held
from tests.support.lora import on_both, random_adapter, speaking
from tests.support.models import Pair, greedy
from tests.support.serve import Served

pytestmark = pytest.mark.engine

HELD = 4
LORA = (
    "--distributed-executor-backend", "uni", "--enable-lora", "--max-lora-rank", "8", "--max-loras", "2",
    "--max-cpu-loras", str(HELD),
)  # fmt: skip
ASKED = (*PROMPTS, LONG)
TOKENS = 24
WHOLE = 400


class Engine:
    """A vLLM that can be killed and started again on its port."""

    def __init__(self, start: Callable[[], EngineServer]) -> None:
        self._start = start
        self.server = start()

    def again(self) -> None:
        """Kill it with all its processes, and start it again."""
        os.killpg(self.server.pid, signal.SIGKILL)
        self.server.stop()
        self.server = self._start()


@pytest.fixture(scope="module")
def engine(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    port, folder = engines.free_port(), tmp_path_factory.mktemp("vllm-lora")
    made = Engine(lambda: engines.vllm(pair.old, folder, *LORA, port=port))
    try:
        made.server.wait_healthy()
        yield made
    finally:
        made.server.stop()


@pytest.fixture(scope="module")
def spoken(pair: Pair) -> Path:
    """A folder with one adapter for each letter: small ones for 1.0, capital ones for 1.1."""
    folder = pair.old.parent / "spoken"
    for letter in "kqzx":
        speaking(pair.old, folder / letter, letter)
        speaking(pair.new, folder / letter.upper(), letter.upper())
    return folder


@pytest.fixture(scope="module")
def process(engine: Engine, pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    roots = [pair.old.parent, pair.new.parent]
    served = Served(
        tmp_path_factory.mktemp("sidecar"),
        pair.old,
        command=("proxy", "--backend", "vllm", "--upstream", engine.server.url, "--version", "1.0"),
        roots=list(dict.fromkeys(roots)),
    )
    try:
        yield served.start().wait_ready()
    finally:
        served.stop()


@pytest.fixture
async def served(process: Served, pair: Pair) -> Served:
    """The sidecar with 1.0 live, and no adapter."""
    for name in states(process):
        await command(process, "adapter", "unload", name)
    await swap(process, pair.old, "1.0")
    return process


async def at_engine(engine: Engine, path: str, body: dict[str, Any] | None = None) -> tuple[int, str]:
    """Ask the engine itself, around the one door."""
    async with aiohttp.ClientSession() as session:
        verb = "POST" if body is not None else "GET"
        async with session.request(verb, f"{engine.server.url}{path}", json=body) as answer:
            return answer.status, await answer.text()


async def names_at(engine: Engine) -> dict[str, str]:
    """Return the adapters under whose names the engine answers, and their folders."""
    _, text = await at_engine(engine, "/v1/models")
    return {card["id"]: card["root"] for card in json.loads(text)["data"] if card["parent"] is not None}


async def numbers_at(engine: Engine) -> list[int]:
    """Return what the engine's worker has in its memory."""
    _, text = await at_engine(engine, "/collective_rpc", {"method": "list_loras"})
    (found,) = json.loads(text)["results"]
    return sorted(found)


async def test_what_they_answer_is_what_peft_makes_of_them_on_both_versions(served: Served, pair: Pair) -> None:
    adapters: dict[str, Path] = {}
    wanted: dict[str, dict[str, list[list[int]]]] = {}
    for name, rank in (("one", 4), ("two", 8)):
        adapters[name], wanted[name] = on_both(
            pair, f"random-{name}", ASKED, tokens=TOKENS, seed=rank, r=rank, lora_alpha=2 * rank,
            target_modules=["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"], alpha_pattern={"o_proj": 3},
        )  # fmt: skip
    wanted["tiny"] = {
        version: greedy(base, ASKED, tokens=TOKENS) for version, base in (("1.0", pair.old), ("1.1", pair.new))
    }
    assert len({str(ids) for both in wanted.values() for ids in both.values()}) == 6

    async def all_say(version: str) -> None:
        async with aiohttp.ClientSession() as session:
            client = Client(session, served.data_url)
            for name in ("tiny", *adapters):
                ids = await asyncio.gather(*(client.ids(prompt, model=name, tokens=TOKENS) for prompt in ASKED))
                assert ids == wanted[name][version], (name, version)

    for name, folder in adapters.items():
        await load(served, name, folder)
    await all_say("1.0")
    await swap(served, pair.new, "1.1")
    await all_say("1.1")
    await command(served, "rollback")
    await all_say("1.0")


async def test_loaded_replaced_and_unloaded_under_load(served: Served, engine: Engine, spoken: Path) -> None:
    first = await load(served, "a", spoken / "k")
    other = await load(served, "b", spoken / "z")
    assert set(await names_at(engine)) == {first["id"], other["id"]}
    async with load_on(served, "a", "b") as loads:
        await loads["tiny"].served_more(3)
        begun = asyncio.Event()
        long = asyncio.create_task(say(served, "a", tokens=WHOLE, begun=begun))
        await begun.wait()
        replaced = await load(served, "a", spoken / "q")
        assert (await long).text == "k" * WHOLE
        await loads["a"].served_more(3)
        await loads["b"].served_more(3)
    assert letters(loads["a"]) == {"k", "q"}
    assert letters(loads["b"]) == {"z"}
    assert set().union(*map(makers, loads["tiny"].answers)) == {"1.0"}
    while await identities(served) != {replaced["id"], other["id"]}:
        await asyncio.sleep(0.02)  # the old content goes with its last request
    assert set(await names_at(engine)) == {replaced["id"], other["id"]}
    assert len(await numbers_at(engine)) == 2


async def identities(served: Served) -> set[str]:
    """Return what the sidecar knows of, those that drain too."""
    registry = await asyncio.to_thread(served.control.get, "/adapters", AdapterRegistry)
    return {status.id for status in registry.adapters}


async def test_prompts_are_tried_beside_clients_of_an_engine_that_takes_adapters(served: Served, pair: Pair) -> None:
    """Asked for a prompt's log-probabilities beside other requests, such an engine dies."""
    boots = [rank.boot_id for rank in served.state().ranks]
    async with load_on(served) as loads:
        for allowed, ends in ((1.0, SwapState.ROLLED_BACK), (1000.0, SwapState.SERVING)):
            await loads["tiny"].served_more(4)
            checks = Checks(prompts=[PromptCheck(prompt="abc", max_logprob_delta=allowed)])
            operation = f"tried-{allowed:g}"
            await asyncio.to_thread(served.begin, pair.new, "1.1", operation=operation, checks=checks)
            status = await asyncio.to_thread(served.ended, operation)
            assert status.state is ends, status.error
        await loads["tiny"].served_more(4)
    assert [rank.boot_id for rank in served.state().ranks] == boots


async def test_an_unloaded_adapter_answers_nobody_and_its_name_is_free(
    served: Served, engine: Engine, spoken: Path
) -> None:
    loaded = await load(served, "a", spoken / "k")
    assert (await say(served, "a")).text == "k" * 24
    inside = StoppableVllm(engine.server.url)
    async with held(
        inside, lambda: beginning_and_end(lambda begun: say(served, "a", tokens=WHOLE, begun=begun))
    ) as long:
        gone = await command(served, "adapter", "unload", "a", "--drain-seconds", "0")
        assert (gone["state"], gone["references"]) == ("Tombstone", 1)
        assert "does not exist" in str((await say(served, "a")).error)
        await inside.go_on()
        (_, answer) = await long.whole()
    assert answer is not None
    assert answer.text == "k" * WHOLE
    while states(served):
        await asyncio.sleep(0.02)

    async with aiohttp.ClientSession() as session:
        for asked in ("a", loaded["id"]):  # neither name leads to it, and none to the base
            body = {"model": asked, "prompt": "x", "max_tokens": 4}
            async with session.post(f"{served.data_url}/v1/completions", json=body) as answer:
                assert answer.status == 404
    status, _ = await at_engine(engine, "/v1/completions", {"model": loaded["id"], "prompt": "x", "max_tokens": 4})
    assert (status, await numbers_at(engine)) == (404, [])
    await load(served, "a", spoken / "q")
    assert (await say(served, "a")).text == "q" * 24


async def test_base_and_adapter_change_together_under_load(served: Served, pair: Pair, spoken: Path) -> None:
    live = served.state().live
    assert live is not None
    await load(served, "a", spoken / "k", "--base-digest", live.digest)
    await load(served, "b", spoken / "z", "--base-digest", live.digest)
    new = (await command(served, "plan", "--source", str(pair.new), code=1))["toDigest"]
    async with load_on(served, "a") as loads:
        await loads["a"].served_more(3)
        refused = await command(served, "swap", "--source", str(pair.new), "--version", "1.1", code=1)
        assert refused["error"]["code"] == "IncompatibleAdapter"
        together = ("--adapter", f"a={spoken / 'K'}", "--adapter", f"b={spoken / 'Z'}")
        done = await swap(served, pair.new, "1.1", "--digest", new, *together)
        assert done["state"] == "Serving"
        await loads["a"].served_more(3)
        await command(served, "rollback")
        await loads["a"].served_more(3)
    assert {(answer.version, *set(answer.text)) for answer in loads["a"].answers} == {("1.0", "k"), ("1.1", "K")}
    assert (await say(served, "b")).text == "z" * 24


async def test_what_the_engine_lost_by_itself_is_there_after_the_next_exchange(
    served: Served, engine: Engine, pair: Pair, spoken: Path
) -> None:
    loaded = await load(served, "a", spoken / "k")
    status, _ = await at_engine(engine, "/v1/unload_lora_adapter", {"lora_name": loaded["id"]})
    assert status == 200
    await swap(served, pair.new, "1.1")
    assert loaded["id"] in await names_at(engine)
    await swap(served, pair.old, "1.0")
    assert (await say(served, "a")).text == "k" * 24


async def test_more_than_the_engine_can_hold_is_refused_by_the_name_of_its_option(
    served: Served, engine: Engine, pair: Pair, spoken: Path
) -> None:
    await takes_no_more(served, spoken, spare="K", option="--max-cpu-loras")
    assert len(await numbers_at(engine)) == HELD
    await command(served, "adapter", "unload", "k")
    await refuses_rank_16(served, pair.old)
    head = random_adapter(pair.old, pair.old.parent / "head", seed=1, r=2, target_modules=["lm_head"])
    matrices = head / "adapter_model.safetensors"  # of which peft makes a copy of the base's head a part
    save_file({name: tensor for name, tensor in load_file(matrices).items() if ".lora_" in name}, matrices)
    refused = await command(served, "adapter", "load", "head", "--source", str(head), code=1)
    assert "other modules only" in refused


async def test_a_killed_engine_and_a_killed_sidecar_come_back_with_their_adapters(
    served: Served, engine: Engine, spoken: Path
) -> None:
    await load(served, "a", spoken / "k")
    await load(served, "b", spoken / "z")
    await command(served, "adapter", "unload", "b")
    boot = served.state().ranks[0].boot_id
    await asyncio.to_thread(engine.again)
    await never_the_base(served, "a", boot=boot, letter="k", seconds=4 * SECONDS)

    await asyncio.to_thread(served.kill)
    # Somebody loads an adapter around us meanwhile, and one of ours that was unloaded is there under its old name.
    await at_engine(engine, "/v1/load_lora_adapter", {"lora_name": "stranger", "lora_path": str(spoken / "q")})
    await asyncio.to_thread(served.start().wait_ready)
    assert (await say(served, "a")).text == "k" * 24
    for name in ("b", "stranger"):
        assert "does not exist" in str((await say(served, name)).error)
    assert states(served) == {"a": "Ready"}
    assert len(await numbers_at(engine)) == 1
