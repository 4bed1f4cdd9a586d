"""Weights exchanged inside the real vLLM while it runs: its own loading and packing, our transaction."""

import asyncio
import itertools
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import torch

from modelswap_engine.backends.inprocess import wire
from modelswap_engine.backends.port import RequestPolicy
from modelswap_engine.backends.vllm.control import VllmControl
from tests.support.engine_ranks import LONG, PROMPTS, SECONDS, Client, Ranks, codes, good, reload
from tests.support.engines import EngineServer
from tests.support.held import StoppableVllm, held
from tests.support.models import BAD_KINDS, LOWER, UPPER, Pair, bad_checkpoint, edit_tensor, tiny_llama
from tests.support.orders import digest_of, hashes_of, stage_order

pytestmark = pytest.mark.engine

ATTEMPTS = 5


@pytest.fixture
async def control(vllm: EngineServer, session: aiohttp.ClientSession) -> AsyncIterator[VllmControl]:
    made = VllmControl(vllm.url, session)
    await made.facts(seconds=SECONDS)
    yield made
    await made.resume(seconds=SECONDS)  # a test that failed leaves no pause to those after it


@pytest.fixture
async def client(vllm: EngineServer, session: aiohttp.ClientSession) -> Client:
    return Client(session, vllm.url)


@pytest.fixture
async def ranks(control: VllmControl, pair: Pair) -> Ranks:
    """The engine on v1, by its own full reload, and adopted."""
    await reload(control, pair.old)
    made = Ranks(control)
    assert good(await made.adopt(pair.old)).reply.digest == digest_of(pair.old)
    return made


async def swap(ranks: Ranks, old: Path, new: Path, operation: str) -> None:
    good(await ranks.stage(old, new, operation))
    for answers in await ranks.exchange(operation):
        assert good(answers).reply.digest == digest_of(new)
    assert await ranks.control.flush(seconds=SECONDS)
    good(await ranks.call(wire.ReleaseCall(operation_id=operation, previous=False)))


@pytest.mark.full  # the conformance suite asks the same of the backend
async def test_some_layers_then_all_then_back_equal_to_fresh_loads(
    control: VllmControl, client: Client, pair: Pair, tmp_path: Path
) -> None:
    other = tiny_llama(tmp_path / "other", seed=7, hidden=128)
    wanted: dict[Path, list[list[int]]] = {}
    for folder in (pair.new, other, pair.old):
        await reload(control, folder)
        wanted[folder] = [await client.ids(prompt, tokens=64) for prompt in (*PROMPTS, LONG)]
    assert len({str(ids) for ids in wanted.values()}) == 3
    ranks = Ranks(control)
    good(await ranks.adopt(pair.old))
    versions = [pair.old, pair.new, other, pair.old]
    for number, (old, new) in enumerate(itertools.pairwise(versions)):
        running = [asyncio.ensure_future(client.ids(prompt, tokens=64)) for prompt in PROMPTS]
        good(await ranks.stage(old, new, f"op-{number}"))  # beside them
        assert await asyncio.gather(*running) == wanted[old][: len(PROMPTS)]  # the drain
        steps = await ranks.exchange(f"op-{number}")
        assert await control.flush(seconds=SECONDS)
        assert {good(answers).reply.digest for answers in steps} == {digest_of(new)}
        assert [await client.ids(prompt, tokens=64) for prompt in (*PROMPTS, LONG)] == wanted[new]
        good(await ranks.call(wire.ReleaseCall(operation_id=f"op-{number}", previous=False)))


@pytest.mark.full  # the conformance suite asks the same of the backend
async def test_an_answer_is_of_one_version(ranks: Ranks, client: Client, pair: Pair) -> None:
    assert set("".join(await client.texts())) <= set(LOWER)
    streams = [asyncio.ensure_future(client.collect(prompt)) for prompt in PROMPTS]
    good(await ranks.stage(pair.old, pair.new, "op"))
    for text in await asyncio.gather(*streams):
        assert len(text) == 200
        assert set(text) <= set(LOWER)
    for answers in await ranks.exchange("op"):
        good(answers)
    assert await ranks.control.flush(seconds=SECONDS)
    assert set("".join(await client.texts())) <= set(UPPER)


@pytest.mark.full  # the conformance suite asks the same of the backend
async def test_rollback_is_exact(ranks: Ranks, client: Client, pair: Pair) -> None:
    before = await client.texts()
    good(await ranks.stage(pair.old, pair.new, "op"))
    for answers in await ranks.exchange("op"):
        good(answers)
    assert await ranks.control.flush(seconds=SECONDS)
    assert await client.texts() != before
    undone = good(await ranks.call(wire.RollbackCall(operation_id="op")))
    assert undone.reply.digest == digest_of(pair.old)
    assert good(await ranks.verify("op")).reply.digest == digest_of(pair.old)
    assert await ranks.control.flush(seconds=SECONDS)
    assert await client.texts() == before


@pytest.mark.full  # test_vllm_proxy asks it of the sidecar
async def test_every_tensor_is_proven_packed_ones_included(ranks: Ranks, pair: Pair) -> None:
    answer = good(await ranks.outcome(wire.HashesCall(work=ranks.work(), pattern="*", still=True)))
    assert answer.hashes is not None
    assert (answer.hashes.tensors, answer.hashes.unverifiable) == (hashes_of(pair.old), ())


@pytest.mark.full  # the conformance suite asks the same of the backend
async def test_a_version_that_the_engine_does_not_hold_is_not_adopted(
    control: VllmControl, client: Client, pair: Pair
) -> None:
    await reload(control, pair.old)
    ranks = Ranks(control)
    assert codes(await ranks.adopt(pair.new)) == {"ManifestMismatch"}
    assert set("".join(await client.texts())) <= set(LOWER)


@pytest.mark.full  # the conformance suite asks the same of the backend
@pytest.mark.parametrize("kind", BAD_KINDS)
async def test_what_breaks_the_engine_by_its_own_routes_is_refused_before_anything_is_touched(
    ranks: Ranks, client: Client, pair: Pair, tmp_path: Path, kind: str
) -> None:
    before = await client.texts()
    bad = bad_checkpoint(pair.old, tmp_path, kind)
    groups = () if kind == "part" else await ranks.groups()
    answers = await ranks.stage_this(stage_order(pair.old, bad, operation_id="op", groups=groups))
    assert codes(answers) == {"ChecksFailed" if kind == "nan" else "IncompatibleModel"}
    assert codes(await ranks.call(wire.CommitCall(operation_id="op"))) == {"NotFound"}
    assert good(await ranks.verify("")).reply.digest == digest_of(pair.old)
    assert await client.texts() == before


@pytest.mark.full  # the conformance suite asks the same of the backend
async def test_cached_prefixes_outlive_a_commit_until_they_are_flushed(
    ranks: Ranks, client: Client, pair: Pair
) -> None:
    wanted = await by_itself_then_back(ranks, client, pair)
    await client.text(LONG)
    good(await ranks.stage(pair.old, pair.new, "op"))
    for answers in await ranks.exchange("op"):
        good(answers)
    assert await client.text(LONG) != wanted
    assert await ranks.control.flush(seconds=SECONDS)
    assert await client.text(LONG) == wanted


async def test_what_a_version_that_overflows_has_cached_is_not_left_to_the_next(
    ranks: Ranks, client: Client, pair: Pair, tmp_path: Path
) -> None:
    """Its weights are numbers, and what it computes with them is not; vLLM multiplies unused ends of blocks by zero."""
    before = await client.texts()
    bad = shutil.copytree(pair.old, tmp_path / "bad")
    edit_tensor(bad, "model.layers.0.mlp.down_proj.weight", lambda tensor: torch.full_like(tensor, 3e38))
    await swap(ranks, pair.old, bad, "there")
    assert await client.texts() != before
    await swap(ranks, bad, pair.old, "back")
    assert await client.texts() == before


async def by_itself_then_back(ranks: Ranks, client: Client, pair: Pair) -> str:
    await swap(ranks, pair.old, pair.new, "there")
    wanted = await client.text(LONG)
    await swap(ranks, pair.new, pair.old, "back")
    return wanted


async def test_a_flush_that_did_not_happen_is_not_taken_for_one(
    control: VllmControl, client: Client, vllm: EngineServer
) -> None:
    engine = StoppableVllm(vllm.url)
    async with held(engine, lambda: client.stream("hold on to some blocks", tokens=400)) as answer:
        assert await control.flush(seconds=SECONDS) is False
        await engine.go_on()
        assert len("".join(await answer.whole())) == 400
    async with asyncio.timeout(SECONDS):
        while not await control.flush(seconds=SECONDS):  # the client hears of the end before all of it is over
            await asyncio.sleep(0.01)


async def test_a_pause_is_read_back_and_not_made_twice(control: VllmControl, client: Client) -> None:
    await control.pause(RequestPolicy.RECOMPUTE, seconds=SECONDS)
    await control.pause(RequestPolicy.RECOMPUTE, seconds=SECONDS)
    assert await control.paused(seconds=SECONDS)
    waiting = asyncio.ensure_future(client.text("parked"))
    await control.resume(seconds=SECONDS)
    assert len(await waiting) == 24
    assert not await control.paused(seconds=SECONDS)


@pytest.mark.full  # no traffic mode that is offered does so
async def test_a_pause_with_requests_running_has_them_computed_again_on_the_new_weights(
    ranks: Ranks, client: Client, pair: Pair
) -> None:
    for attempt in range(ATTEMPTS):  # the answer may have ended before the pause
        good(await ranks.stage(pair.old, pair.new, f"op-{attempt}"))
        stream = client.stream("it goes on", tokens=300)
        text = await anext(stream)
        await ranks.control.pause(RequestPolicy.RECOMPUTE, seconds=SECONDS)
        for answers in await ranks.exchange(f"op-{attempt}"):
            good(answers)
        assert await ranks.control.flush(seconds=SECONDS)
        await ranks.control.resume(seconds=SECONDS)
        text += "".join([piece async for piece in stream])
        assert len(text) == 300
        good(await ranks.call(wire.ReleaseCall(operation_id=f"op-{attempt}", previous=False)))
        if not set(text) <= set(LOWER):
            break
        await swap(ranks, pair.new, pair.old, f"back-{attempt}")
    assert set(text[-20:]) <= set(UPPER)
    assert set(text[:1]) <= set(LOWER)
    assert await client.text(LONG) == await client.text(LONG)


async def test_facts_are_what_the_engine_says(control: VllmControl, pair: Pair) -> None:
    await control.set_version("sha256:v", seconds=SECONDS)
    facts = await control.facts(seconds=SECONDS)
    assert (facts.engine, facts.version, facts.ranks, facts.agent) == ("vllm", "0.32.0", 1, True)
    assert (facts.weight_version, facts.served_model_names) == ("sha256:v", ("tiny",))
    assert facts.boot_id == (await control.facts(seconds=SECONDS)).boot_id != ""
