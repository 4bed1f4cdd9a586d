"""Clients and commands of tests with LoRA adapters behind a serving process, whichever engine is behind it.

An adapter of :func:`tests.support.lora.speaking` says one letter for ever, so any mixing shows in the text.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from demo.answers import Answer
from demo.asking import Question, ask_once
from demo.load import Load
from modelswap_engine.cli.main import app
from modelswap_engine.protocol.adapters import AdapterRegistry
from tests.support.clients import makers, two_makers
from tests.support.lora import random_adapter
from tests.support.serve import Served


def several(answer: Answer) -> bool:
    """Say whether more than one adapter shows in an answer."""
    return len(set(answer.text)) > 1 or two_makers(answer)


@asynccontextmanager
async def load_on(served: Served, *names: str) -> AsyncIterator[dict[str, Load]]:
    """Keep asking the base and adapters, all at the same time."""
    loads = {
        name: Load(
            served.data_url, model=name, streams=2, max_tokens=32, ignore_eos=True,
            mixed=two_makers if name == "tiny" else several,
        )
        for name in ("tiny", *names)
    }  # fmt: skip
    async with loads["tiny"]:
        running = [await loads[name].__aenter__() for name in names]
        try:
            yield loads
        finally:
            for load in running:
                await load.__aexit__(None, None, None)
    for name, load in loads.items():
        assert load.summary().clean, (name, load.summary().lines())


def letters(load: Load) -> set[str]:
    return set().union(*(set(answer.text) for answer in load.answers))


async def command(served: Served, *arguments: str, code: int = 0) -> Any:
    """Give a command; one that is to succeed in this process, because another takes longer to begin than it does."""
    if code:
        refused = await asyncio.to_thread(served.command, *arguments, "-o", "json")
        assert refused.code == code, refused.out + refused.err
        return json.loads(refused.out) if refused.out.startswith("{") else refused.err
    done = await asyncio.to_thread(CliRunner().invoke, app, [*arguments, "-o", "json"], env=served.told())
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


async def load(served: Served, name: str, folder: Path, *more: str) -> dict[str, Any]:
    found: dict[str, Any] = await command(served, "adapter", "load", name, "--source", str(folder), *more)
    return found


async def say(served: Served, name: str, *, tokens: int = 24, begun: asyncio.Event | None = None) -> Answer:
    return await ask_once(served.data_url, Question(model=name, max_tokens=tokens, ignore_eos=True), begun=begun)


def states(served: Served) -> dict[str, str]:
    return {status.name: status.state for status in served.control.get("/adapters", AdapterRegistry).adapters}


async def swap(served: Served, folder: Path, version: str, *more: str) -> dict[str, Any]:
    found: dict[str, Any] = await command(served, "swap", "--source", str(folder), "--version", version, *more)
    return found


async def takes_no_more(served: Served, spoken: Path, *, spare: str, option: str) -> None:
    """Fill an engine that can hold four; a fifth is refused by the name of the option that bounds it."""
    held = "kqzx"
    for letter in held:
        await load(served, letter, spoken / letter)
    assert option in await command(served, "adapter", "load", "more", "--source", str(spoken / spare), code=1)
    assert [(await say(served, letter)).text for letter in held] == [letter * 24 for letter in held]


async def refuses_rank_16(served: Served, base: Path) -> None:
    """An adapter wider than the engine was started for is refused by the name of that option."""
    wide = random_adapter(base, base.parent / "wide", seed=1, r=16, target_modules=["q_proj"])
    assert "--max-lora-rank" in await command(served, "adapter", "load", "wide", "--source", str(wide), code=1)


async def never_the_base(served: Served, name: str, *, boot: str, letter: str, seconds: float) -> None:
    """While an engine is away and until its next start serves, an adapter's name gets an error or the adapter."""
    async with asyncio.timeout(seconds):
        while served.state().ranks[0].boot_id == boot or not served.ready():
            assert (await say(served, name, tokens=4)).text in ("", letter * 4)
    assert (await say(served, name)).text == letter * 24
    assert makers(await say(served, "tiny")) == {"1.0"}
