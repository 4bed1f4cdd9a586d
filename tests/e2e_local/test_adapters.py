"""LoRA adapters in a whole engine process under load: each answer is its own adapter's, to its last letter.

An adapter here says one letter for ever, small on version 1.0 and capital on 1.1, so any mixing shows in the text: of
adapters, of an adapter and the base, of an old and a new content, of a base and another base's adapter.
"""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from modelswap_engine.checkpoint.build import build_manifest
from modelswap_engine.protocol.adapters import AdapterRegistry
from modelswap_engine.protocol.assignment import (
    ASSIGNMENT_KEY,
    AssignedAdapter,
    AssignedSource,
    Assignment,
    AssignmentTarget,
)
from modelswap_engine.protocol.codec import encode
from tests.support.adapter_traffic import command, letters, load, load_on, say, states, swap
from tests.support.clients import makers
from tests.support.ranked import until_gone
from tests.support.serve import Served

pytestmark = pytest.mark.model

LONG = 600


@pytest.fixture(scope="module")
def spoken(pair: Path) -> Path:
    """A folder with one adapter for each letter: small ones for 1.0, capital ones for 1.1."""
    from tests.support.lora import speaking

    folder = pair / "adapters"
    for letter in "kqzx":
        speaking(pair / "v1", folder / letter, letter)
        speaking(pair / "v2", folder / letter.upper(), letter.upper())
    return folder


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory, pair: Path, spoken: Path) -> Iterator[Served]:
    """One engine process with three slots for this file."""
    options = ["--version", "1.0", "--lora-slots", "3", "--lora-max-rank", "8"]
    served = Served(tmp_path_factory.mktemp("served"), pair / "v1", options=options, roots=[pair])
    yield served.start().wait_ready()
    served.stop()


async def test_loading_replacing_evicting_and_unloading_under_load(served: Served, spoken: Path) -> None:
    await load(served, "a", spoken / "k")
    await load(served, "b", spoken / "z")
    async with load_on(served, "a", "b") as loads:
        await loads["tiny"].served_more(3)
        replaced = await load(served, "a", spoken / "q")
        await loads["a"].served_more(3)
        # The third slot is for two more; each comes back to it from memory when it is asked for.
        for name in ("c", "d"):
            await load(served, name, spoken / "x")
        for name in ("c", "d", "c"):
            answer = await say(served, name)
            assert (answer.failure, answer.text) == ("", "x" * 24)
        view = served.control.get("/adapters", AdapterRegistry)
        assert view.evictions >= 2
        with served.slowly():
            begun = asyncio.Event()
            long = asyncio.create_task(say(served, "c", tokens=LONG, begun=begun))
            await begun.wait()
            gone = await command(served, "adapter", "unload", "c", "--drain-seconds", "0")
            assert (gone["state"], gone["references"]) == ("Tombstone", 1)
            assert "model_not_found" in str((await say(served, "c")).error)
        answer = await long
        assert (answer.failure, answer.text) == ("", "x" * LONG)
        await loads["b"].served_more(3)
    assert letters(loads["a"]) == {"k", "q"}
    assert letters(loads["b"]) == {"z"}
    assert set().union(*map(makers, loads["tiny"].answers)) == {"1.0"}
    while "c" in states(served):  # it goes with its last request
        await asyncio.sleep(0.02)
    assert [
        status.id for status in served.control.get("/adapters", AdapterRegistry).adapters if status.name == "a"
    ] == [replaced["id"]]
    for name in ("a", "b", "d"):
        await command(served, "adapter", "unload", name)
    assert states(served) == {}
    assert served.state().memory.adapter_bytes >= 0


async def test_base_and_adapter_change_together_under_load(served: Served, pair: Path, spoken: Path) -> None:
    live = served.state().live
    assert live is not None
    await load(served, "a", spoken / "k", "--base-digest", live.digest)
    new = (await command(served, "plan", "--source", str(pair / "v2"), code=1))["toDigest"]
    swap = ["swap", "--source", str(pair / "v2"), "--version", "1.1"]
    async with load_on(served, "a") as loads:
        await loads["a"].served_more(3)
        refused = await command(served, *swap, code=1)
        assert refused["error"]["code"] == "IncompatibleAdapter"
        done = await command(served, *swap, "--digest", new, "--adapter", f"a={spoken / 'K'}")
        assert (done["state"], done["plan"]["adapters"]) == ("Serving", [f"a: {(spoken / 'K').as_uri()}"])
        await loads["a"].served_more(3)
        await command(served, "rollback")
        await loads["a"].served_more(3)
    # A small letter is 1.0's adapter on 1.0, a capital one 1.1's on 1.1; no answer is anything else.
    assert {(answer.version, *set(answer.text)) for answer in loads["a"].answers} == {("1.0", "k"), ("1.1", "K")}
    assert set().union(*map(makers, loads["tiny"].answers)) == {"1.0", "1.1"}
    await command(served, "swap", "--source", str(pair / "v2"), "--version", "1.1", "--on-incompatible", "Unload")
    assert (await say(served, "a")).text == "K" * 24  # what belongs to that base is known, and came with it
    await command(served, "adapter", "unload", "a")


async def test_killed_worker_and_killed_front_come_back_with_their_adapters(served: Served, spoken: Path) -> None:
    await load(served, "a", spoken / "k", "--pinned")
    await load(served, "b", spoken / "z")
    victim = served.worker_pid()
    os.kill(victim, signal.SIGKILL)
    while served.state().restarts == 0 or not served.ready():
        await asyncio.sleep(0.05)
    assert [(await say(served, name)).text for name in ("a", "b")] == ["k" * 24, "z" * 24]
    await command(served, "adapter", "unload", "b")
    served.kill()
    await asyncio.to_thread(served.start().wait_ready)
    assert (await say(served, "a")).text == "k" * 24
    assert "model_not_found" in str((await say(served, "b")).error)
    assert states(served) == {"a": "Ready"}
    assert makers(await say(served, "tiny")) == {"1.0"}


async def test_assigned_adapters_are_there_from_the_first_request_and_change_with_the_base(
    tmp_path: Path, pair: Path, spoken: Path
) -> None:
    """The mounted assignment alone, without an operator: at start, in a swap that is not told of it, as it changes."""
    bases = {letter: build_manifest(pair / model).digest for letter, model in (("k", "v1"), ("K", "v2"))}
    sources = [AssignedSource(uri=(spoken / name).as_uri(), base_digest=base) for name, base in bases.items()]
    stable = AssignmentTarget(version="1.0", uri=(pair / "v1").as_uri(), digest=bases["k"])
    assigned = Assignment(
        owner_uid="owner", epoch=1, revision=1, stable=stable, adapters_revision=1,
        adapters=[
            AssignedAdapter(name="a", sources=sources),
            AssignedAdapter(name="b", sources=sources, pod_uids=["another"]),
        ],
    )  # fmt: skip
    mount = tmp_path / "assignment"
    mount.mkdir()
    file = mount / ASSIGNMENT_KEY
    file.write_bytes(encode(assigned))
    options = ["--version", "1.0", "--lora-slots", "2", "--lora-max-rank", "8", "--assignment-dir", str(mount)]
    served = Served(tmp_path / "pod", pair / "v1", options=options, roots=[pair])
    try:
        served.start().wait_ready()
        assert (await say(served, "a")).text == "k" * 24
        assert states(served) == {"a": "Ready"}
        await swap(served, pair / "v2", "1.1")
        assert (await say(served, "a")).text == "K" * 24
        file.write_bytes(encode(msgspec.structs.replace(assigned, adapters=[], adapters_revision=2)))
        while states(served):
            await asyncio.sleep(0.1)
        assert "model_not_found" in str((await say(served, "a")).error)
    finally:
        served.stop()
        print(served.tail(lines=100))


async def both_say(served: Served, name: str) -> list[str]:
    """Ask twice at a time, which reaches both replicas, and return what they say."""
    with served.slowly():
        begun = [asyncio.Event() for _ in range(2)]
        asked = [asyncio.create_task(say(served, name, tokens=300, begun=event)) for event in begun]
        for event in begun:
            await event.wait()
        assert [rank.running for rank in served.state().ranks] == [1, 1], "each replica got one"
    return sorted({letter for answer in await asyncio.gather(*asked) for letter in answer.text or answer.failure})


@pytest.mark.full
async def test_replicas_serve_adapters_while_one_of_them_is_killed(tmp_path: Path, pair: Path, spoken: Path) -> None:
    options = ["--version", "1.0", "--lora-slots", "2", "--lora-max-rank", "8", "--data-parallel", "2"]
    served = Served(tmp_path / "pod", pair / "v1", options=options, roots=[pair])
    try:
        served.start().wait_ready()
        await load(served, "a", spoken / "k", "--pinned")
        await load(served, "b", spoken / "z")
        assert await both_say(served, "a") == ["k"]
        ranks = served.state().ranks
        os.kill(ranks[1].pid, signal.SIGKILL)
        await until_gone(ranks[1], lambda: served.state().ranks)
        # The replica that is left has its adapters, takes new ones and lets others go.
        assert [(await say(served, name)).text for name in ("a", "b")] == ["k" * 24, "z" * 24]
        assert set(states(served).values()) == {"Ready"}
        await command(served, "adapter", "unload", "b")
        await load(served, "c", spoken / "x")
        assert (await say(served, "c")).text == "x" * 24
        while served.state().restarts == 0:
            assert (await say(served, "a", tokens=4)).text == "kkkk"
        assert (served.state().ranks[0].pid, served.state().ranks[0].restarts) == (ranks[0].pid, 0)
        # The one that came back has what the other has.
        assert [await both_say(served, name) for name in ("a", "c")] == [["k"], ["x"]]
        await load(served, "a", spoken / "q")
        assert await both_say(served, "a") == ["q"]
        for name in ("a", "c"):
            await command(served, "adapter", "unload", name)
        assert "model_not_found" in str((await say(served, "a")).error)
        assert states(served) == {}
    finally:
        served.stop()
        print(served.tail(lines=100))
