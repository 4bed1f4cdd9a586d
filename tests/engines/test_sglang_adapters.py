"""LoRA adapters behind `modelswap proxy` in the real SGLang: the same commands and promises as with our own engine."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from transformers import AutoTokenizer

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
from tests.support.adapters import LINEAR
from tests.support.clients import makers
from tests.support.engine_ranks import LONG, PROMPTS, SECONDS
from tests.support.lora import on_both, random_adapter, speaking
from tests.support.models import Pair, greedy
from tests.support.serve import Served
from tests.support.sglang import EXACT, LORA, Client, Sglang, ids, with_our_half

pytestmark = pytest.mark.engine

HELD = 4
ASKED = (*PROMPTS, LONG)
TOKENS = 24


@pytest.fixture(scope="module")
def engine(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sglang]:
    folder = tmp_path_factory.mktemp("sglang-lora")
    server = Sglang(folder, options=(*EXACT, *LORA), variables=with_our_half(folder / "beside"))
    try:
        yield server.start(pair.old).wait_ready()
    finally:
        server.kill()


@pytest.fixture(scope="module")
def spoken(pair: Pair) -> Path:
    """A folder with one adapter for each letter, for 1.0."""
    folder = pair.old.parent / "said"
    for letter in "kqzxw":
        speaking(pair.old, folder / letter, letter)
    return folder


@pytest.fixture(scope="module")
def process(engine: Sglang, pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(
        tmp_path_factory.mktemp("sidecar"),
        pair.old,
        command=("proxy", "--backend", "sglang", "--upstream", engine.url, "--version", "1.0"),
        roots=[pair.old.parent],
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


async def held(engine: Sglang) -> dict[str, str]:
    """Return the adapters that the engine has, and their folders."""
    client = Client(engine.url)
    try:
        return {card["id"]: card["root"] for card in (await client.get("/v1/models"))["data"] if card["parent"]}
    finally:
        await client.close()


async def test_what_they_answer_is_what_peft_makes_of_them_on_both_versions(served: Served, pair: Pair) -> None:
    folder, wanted = on_both(pair, "any", ASKED, tokens=TOKENS, seed=4, r=4, lora_alpha=8, target_modules=list(LINEAR))
    base = {version: greedy(at, ASKED, tokens=TOKENS) for version, at in (("1.0", pair.old), ("1.1", pair.new))}
    assert len({str(said) for said in (*wanted.values(), *base.values())}) == 4
    tokenizer: Any = AutoTokenizer.from_pretrained(pair.old)
    prompts = [tokenizer(prompt).input_ids for prompt in ASKED]

    async def all_say(version: str) -> None:
        for name, right in (("", base), ("one", wanted)):
            said = (ids(served.data_url, prompt, adapter=name, tokens=TOKENS) for prompt in prompts)
            assert await asyncio.gather(*said) == right[version]

    await load(served, "one", folder)
    await all_say("1.0")
    await swap(served, pair.new, "1.1")
    await all_say("1.1")
    await command(served, "rollback")
    await all_say("1.0")


async def test_loaded_replaced_and_unloaded_under_load(served: Served, engine: Sglang, spoken: Path) -> None:
    await load(served, "a", spoken / "k")
    other = await load(served, "b", spoken / "z")
    async with load_on(served, "a", "b") as loads:
        await loads["tiny"].served_more(3)
        replaced = await load(served, "a", spoken / "q")
        await loads["a"].served_more(3)
        await loads["b"].served_more(3)
    assert letters(loads["a"]) == {"k", "q"}
    assert letters(loads["b"]) == {"z"}
    assert set().union(*map(makers, loads["tiny"].answers)) == {"1.0"}
    async with asyncio.timeout(SECONDS):
        while set(await held(engine)) != {replaced["id"], other["id"]}:
            await asyncio.sleep(0.05)  # the old content goes with its last request


async def test_what_the_engine_brings_back_by_itself_answers_nobody_and_is_in_nobodys_way(
    served: Served, engine: Sglang, spoken: Path
) -> None:
    loaded = await load(served, "a", spoken / "k")
    await command(served, "adapter", "unload", "a")
    assert await held(engine) == {}
    for asked in ("a", loaded["id"], f"tiny:{loaded['id']}"):
        async with aiohttp.ClientSession() as session:
            body = {"model": asked, "prompt": "x", "max_tokens": 4}
            async with session.post(f"{served.data_url}/v1/completions", json=body) as answer:
                assert answer.status == 404, asked
    # Whoever asks the engine itself brings it back, as long as its folder is there.
    client = Client(engine.url)
    await client.post("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 1}, "lora_path": loaded["id"]})
    await client.close()
    assert list(await held(engine)) == [loaded["id"]]
    assert "does not exist" in str((await say(served, "a")).error)
    await load(served, "a", spoken / "q")
    assert (await say(served, "a")).text == "q" * 24
    await load(served, "a", spoken / "k")
    assert (await say(served, "a")).text == "k" * 24


async def test_more_than_the_engine_can_hold_is_refused_by_the_name_of_its_option(
    served: Served, engine: Sglang, pair: Pair, spoken: Path
) -> None:
    await takes_no_more(served, spoken, spare="w", option="--max-loaded-loras")
    assert len(await held(engine)) == HELD
    await command(served, "adapter", "unload", "k")
    await refuses_rank_16(served, pair.old)
    mixed = random_adapter(
        pair.old,
        pair.old.parent / "mixed",
        seed=1,
        r=4,
        target_modules=["q_proj", "o_proj"],
        rank_pattern={"o_proj": 2},
    )
    assert "one rank" in await command(served, "adapter", "load", "mixed", "--source", str(mixed), code=1)


@pytest.mark.full  # in each run one is killed in vLLM; who brings adapters back is the same
async def test_a_killed_engine_comes_back_with_its_adapters(
    served: Served, engine: Sglang, pair: Pair, spoken: Path
) -> None:
    await load(served, "a", spoken / "k")
    await load(served, "b", spoken / "z")
    await command(served, "adapter", "unload", "b")
    boot = served.state().ranks[0].boot_id
    engine.kill()
    await asyncio.to_thread(engine.start(pair.old).wait_ready)
    await never_the_base(served, "a", boot=boot, letter="k", seconds=4 * SECONDS)
    assert "does not exist" in str((await say(served, "b")).error)
