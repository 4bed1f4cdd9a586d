"""Weights exchanged inside the real SGLang while it runs, with its overlapping schedule: its loading, our commit."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from modelswap_engine.backends.inprocess import wire
from modelswap_engine.backends.sglang.client import SglangClient
from modelswap_engine.backends.sglang.control import SglangControl
from tests.support.engine_ranks import LONG, PROMPTS, SECONDS, Ranks, codes, good
from tests.support.models import BAD_KINDS, HALF, Pair, bad_checkpoint, tiny_llama
from tests.support.orders import digest_of, hashes_of, stage_order
from tests.support.sglang import Client, Sglang

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def control(sglang: Sglang) -> AsyncIterator[SglangControl]:
    made = SglangControl(SglangClient(sglang.url))
    await made.facts(seconds=SECONDS)
    yield made
    await made.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(sglang: Sglang) -> AsyncIterator[Client]:
    made = Client(sglang.url)
    yield made
    await made.close()


@pytest_asyncio.fixture(loop_scope="module")
async def ranks(control: SglangControl, pair: Pair) -> Ranks:
    """The engine on v1, by its own full load, and adopted."""
    await reload(control, pair.old)
    made = Ranks(control)
    assert good(await made.adopt(pair.old)).reply.digest == digest_of(pair.old)
    return made


async def reload(control: SglangControl, folder: Path) -> None:
    """Have the engine load a version as it would do by itself: what a swap must be equal to."""
    await control.load_full(str(folder), digest_of(folder), seconds=SECONDS)


async def answers(client: Client, *, tokens: int = 24) -> list[list[int]]:
    return [(await client.ask(prompt, tokens=tokens)).tokens for prompt in (*PROMPTS, LONG)]


async def exchanged(ranks: Ranks, operation: str) -> str:
    """Commit and prove what is staged, and flush; returns the digest."""
    digests = {good(step).reply.digest for step in await ranks.exchange(operation)}
    assert await ranks.control.flush(seconds=SECONDS)
    (digest,) = digests
    return digest


async def test_our_half_is_found(control: SglangControl) -> None:
    facts = await control.facts(seconds=SECONDS)
    assert (facts.engine, facts.version, facts.agent, facts.ranks) == ("sglang", "0.5.23", True, 1)


@pytest.mark.full  # the conformance suite asks the same of the backend
async def test_some_layers_then_all_then_back_equal_to_its_own_loads(
    control: SglangControl, client: Client, pair: Pair, tmp_path: Path
) -> None:
    other = tiny_llama(tmp_path / "other", seed=7, hidden=128)
    wanted: dict[Path, list[list[int]]] = {}
    for folder in (pair.new, other, pair.old):
        await reload(control, folder)
        wanted[folder] = await answers(client)
    assert len({str(tokens) for tokens in wanted.values()}) == 3
    ranks = Ranks(control)
    good(await ranks.adopt(pair.old))
    for number, (old, new) in enumerate(itertools.pairwise([pair.old, pair.new, other, pair.old])):
        running = [asyncio.ensure_future(client.ask(prompt, tokens=24)) for prompt in PROMPTS]
        good(await ranks.stage(old, new, f"op-{number}"))  # beside them
        drained = [answer.tokens for answer in await asyncio.gather(*running)]
        assert drained == wanted[old][: len(PROMPTS)]
        assert await exchanged(ranks, f"op-{number}") == digest_of(new)
        assert await answers(client) == wanted[new]
        good(await ranks.call(wire.ReleaseCall(operation_id=f"op-{number}", previous=False)))


@pytest.mark.full  # the conformance suite asks the same of the backend
async def test_rollback_is_exact(ranks: Ranks, client: Client, pair: Pair) -> None:
    before, checksum = await answers(client), await client.checksum()
    good(await ranks.stage(pair.old, pair.new, "op"))
    await exchanged(ranks, "op")
    assert await client.checksum() != checksum
    undone = good(await ranks.call(wire.RollbackCall(operation_id="op")))
    assert undone.reply.digest == digest_of(pair.old)
    assert good(await ranks.verify("op")).reply.digest == digest_of(pair.old)
    assert await ranks.control.flush(seconds=SECONDS)
    assert await client.checksum() == checksum
    assert await answers(client) == before


async def test_a_whole_commit_drops_the_cache_and_names_the_weights_in_one_call(
    ranks: Ranks, client: Client, pair: Pair
) -> None:
    async def cached() -> tuple[str, int, int]:
        asked = await client.ask(LONG)
        return str(asked.meta["weight_version"]), int(asked.meta["cached_tokens"]), max(asked.tokens)

    assert [(await cached())[1] > 0 for _ in range(2)] == [False, True]
    good(await ranks.stage(pair.old, pair.new, "op"))
    good(await ranks.call(wire.PrepareCall(operation_id="op")))
    commit = wire.CommitCall(operation_id="op", whole=True)
    async with client.held(LONG) as answer:
        assert codes(await ranks.call(commit)) == {"Busy"}  # nothing was changed, and nothing forgotten
        await client.go_on()
        assert (await answer.whole())[-1].finish == "length"
    while await client.running():
        await asyncio.sleep(0.01)
    for call, folder, upper in ((commit, pair.new, True), (wire.RollbackCall("op", whole=True), pair.old, False)):
        answer = good(await ranks.call(call))
        assert (answer.forgot, answer.proved, answer.named) == (True, True, True)
        assert (await ranks.control.facts(seconds=SECONDS)).weight_version == digest_of(folder)
        label, held, token = await cached()
        assert (label, held, token >= HALF) == (digest_of(folder), 0, upper)
        asked = await client.ask(LONG)
        assert set(asked.versions) <= {digest_of(folder)}
        assert asked.meta["cached_tokens"] > 0


async def test_every_tensor_is_proven_padded_ones_included_while_requests_run(
    ranks: Ranks, client: Client, pair: Pair
) -> None:
    running = asyncio.ensure_future(client.ask(LONG, tokens=100))
    answer = good(await ranks.outcome(wire.HashesCall(work=ranks.work(), pattern="*")))
    assert answer.hashes is not None
    assert (answer.hashes.tensors, answer.hashes.unverifiable) == (hashes_of(pair.old), ())
    assert max((await running).tokens) < HALF


@pytest.mark.full  # the conformance suite asks the same of the backend
async def test_a_version_that_the_engine_does_not_hold_is_not_adopted(
    control: SglangControl, client: Client, pair: Pair
) -> None:
    await reload(control, pair.old)
    assert codes(await Ranks(control).adopt(pair.new)) == {"ManifestMismatch"}
    assert max((await client.ask(LONG)).tokens) < HALF


@pytest.mark.full  # test_sglang_families looks at them, too
async def test_its_own_checksums_see_the_same_bytes(ranks: Ranks, client: Client, pair: Pair) -> None:
    good(await ranks.stage(pair.old, pair.new, "op"))
    await exchanged(ranks, "op")
    inside = await client.checksum()
    await reload(ranks.control, pair.new)
    assert await client.checksum() == inside


@pytest.mark.full  # the conformance suite asks the same of the backend
@pytest.mark.parametrize("kind", BAD_KINDS)
async def test_what_ends_the_engine_by_its_own_routes_is_refused_before_anything_is_touched(
    ranks: Ranks, client: Client, pair: Pair, tmp_path: Path, kind: str
) -> None:
    before = await answers(client)
    bad = bad_checkpoint(pair.old, tmp_path, kind)
    groups = () if kind == "part" else await ranks.groups()
    refused = await ranks.stage_this(stage_order(pair.old, bad, operation_id="op", groups=groups))
    assert codes(refused) == {"ChecksFailed" if kind == "nan" else "IncompatibleModel"}
    assert good(await ranks.verify("")).reply.digest == digest_of(pair.old)
    assert await answers(client) == before
