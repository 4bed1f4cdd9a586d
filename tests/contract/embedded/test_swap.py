"""Swapping versions of a running model, through the backend port and a real worker process."""

import asyncio
from pathlib import Path

import pytest

from modelswap_engine.backends.port import FinishReason, RequestPolicy, Sampling, StageRetained, Tokens
from tests.contract.embedded.conftest import Checkpoints, Engine
from tests.support.orders import accepted, answer, collect, digest_of, hashes_of, ids, prompt, refused, stage_order

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="session")]

_LONG = "A prompt that fills several pages of the cache: " + "the quick brown fox jumps over the lazy dog. " * 3


async def _tokens(stream: object, count: int, into: list[Tokens]) -> None:
    """Read a stream until it has given ``count`` tokens."""
    while len(ids(into)) < count:
        into.append(await anext(stream))


async def test_a_load_is_proven_and_answers(engine: Engine, checkpoints: Checkpoints) -> None:
    (rank,) = engine.backend.ranks()
    assert rank.alive
    assert rank.digest == digest_of(checkpoints.v1)
    assert await engine.holds(checkpoints.v1)
    items = await collect(engine.backend.generate(prompt(_LONG, tokens=20)))
    assert len(ids(items)) == 20
    assert max(ids(items)) < 132
    assert items[-1].finish is FinishReason.LENGTH
    assert {item.digest for item in items} == {digest_of(checkpoints.v1)}


async def test_after_a_swap_answers_are_those_of_a_fresh_load(engine: Engine, checkpoints: Checkpoints) -> None:
    old = await answer(engine.backend, _LONG)
    await engine.load(checkpoints.v2)
    fresh = await answer(engine.backend, _LONG)
    await engine.load(checkpoints.v1)
    assert await answer(engine.backend, _LONG) == old
    assert await engine.swap(checkpoints.v1, checkpoints.v2) == 0
    # The same prompt is in the cache under the old version: a stale page would show here.
    assert await answer(engine.backend, _LONG) == fresh
    assert fresh != old
    assert await engine.holds(checkpoints.v2)
    assert engine.backend.ranks()[0].digest == digest_of(checkpoints.v2)


async def test_only_what_differs_is_read(engine: Engine, checkpoints: Checkpoints) -> None:
    order = stage_order(checkpoints.v1, checkpoints.v2, operation_id="only")
    assert {item.name for item in order.tensors} == set(checkpoints.changed)
    reply = accepted(await engine.backend.stage(order))
    size = sum(item.nbytes for item in order.tensors)
    assert reply.fetched_bytes == size
    assert (await engine.backend.memory()).staged_bytes == size
    accepted(await engine.backend.release("only", previous=False))
    assert (await engine.backend.memory()).staged_bytes == 0
    assert await engine.holds(checkpoints.v1)


async def test_decoding_goes_on_while_a_version_is_staged(engine: Engine, checkpoints: Checkpoints) -> None:
    undisturbed = await answer(engine.backend, _LONG, tokens=200)
    stream = engine.backend.generate(prompt(_LONG, tokens=200))
    items: list[Tokens] = []
    await _tokens(stream, 5, items)
    operation = await engine.prepared(checkpoints.v1, checkpoints.v2)
    items += await collect(stream)
    assert ids(items) == undisturbed
    accepted(await engine.backend.release(operation, previous=False))


async def test_recomputed_requests_go_on_as_on_a_fresh_load(engine: Engine, checkpoints: Checkpoints) -> None:
    texts = [_LONG, "short", "another one"]
    requests = [prompt(text, tokens=150, request_id=text) for text in texts]
    items: list[list[Tokens]] = [[] for _ in requests]
    with engine.slowly():
        streams = [engine.backend.generate(request) for request in requests]
        for stream, into in zip(streams, items, strict=True):
            await _tokens(stream, 8, into)
        assert await engine.swap(checkpoints.v1, checkpoints.v2, policy=RequestPolicy.RECOMPUTE) == 3
    for stream, into in zip(streams, items, strict=True):
        into.extend(await collect(stream))
    await engine.load(checkpoints.v2)
    for request, into in zip(requests, items, strict=True):
        old = [token for item in into if item.digest == digest_of(checkpoints.v1) for token in item.tokens]
        new = [token for item in into if item.digest == digest_of(checkpoints.v2) for token in item.tokens]
        assert len(old) >= 8
        assert len(old) + len(new) == 150
        assert max(old) < 132 <= min(new)
        continued = prompt("", tokens=len(new))
        continued = type(continued)(
            request_id="c", prompt=(*request.prompt, *old), max_new_tokens=len(new), eos=continued.eos
        )
        assert ids(await collect(engine.backend.generate(continued))) == new


async def test_aborted_requests_end_and_say_so(engine: Engine, checkpoints: Checkpoints) -> None:
    items: list[Tokens] = []
    with engine.slowly():
        streams = [engine.backend.generate(prompt(_LONG, tokens=800, request_id=f"{n}")) for n in range(3)]
        await _tokens(streams[0], 3, items)
        assert await engine.swap(checkpoints.v1, checkpoints.v2, policy=RequestPolicy.ABORT) == 3
    for stream in streams:
        last = (await collect(stream))[-1]
        assert last.finish is FinishReason.ABORT
    assert engine.backend.running() == 0
    assert min(await answer(engine.backend, "after")) >= 132


async def test_a_commit_that_expects_no_requests_refuses_to_touch_running_ones(
    engine: Engine, checkpoints: Checkpoints
) -> None:
    undisturbed = await answer(engine.backend, _LONG, tokens=300)
    operation = await engine.prepared(checkpoints.v1, checkpoints.v2)
    items: list[Tokens] = []
    with engine.slowly():
        stream = engine.backend.generate(prompt(_LONG, tokens=300))
        await _tokens(stream, 3, items)
        accepted(await engine.backend.pause(operation, timeout=20))
    assert refused(await engine.backend.commit(operation, RequestPolicy.NONE_RUNNING)) == "Busy"
    accepted(await engine.backend.rollback(operation))
    accepted(await engine.backend.verify(operation, strict=True))
    accepted(await engine.backend.resume(operation))
    accepted(await engine.backend.release(operation, previous=False))
    assert ids(items + await collect(stream)) == undisturbed
    assert await engine.holds(checkpoints.v1)


async def test_a_rollback_restores_every_byte(engine: Engine, checkpoints: Checkpoints) -> None:
    before = await answer(engine.backend, _LONG)
    operation = await engine.prepared(checkpoints.v1, checkpoints.v2)
    accepted(await engine.backend.pause(operation, timeout=20))
    accepted(await engine.backend.commit(operation, RequestPolicy.NONE_RUNNING))
    assert accepted(await engine.backend.rollback(operation)).digest == digest_of(checkpoints.v1)
    accepted(await engine.backend.verify(operation, strict=True))
    accepted(await engine.backend.resume(operation))
    accepted(await engine.backend.release(operation, previous=False))
    assert await engine.holds(checkpoints.v1)
    assert await answer(engine.backend, _LONG) == before
    assert (await engine.backend.memory()).staged_bytes == 0


async def test_the_retained_version_comes_back_without_reading(engine: Engine, checkpoints: Checkpoints) -> None:
    before = await answer(engine.backend, _LONG)
    await engine.swap(checkpoints.v1, checkpoints.v2)
    assert (await engine.backend.memory()).previous_bytes > 0
    back = StageRetained(operation_id="back", digest=digest_of(checkpoints.v1), directory=str(checkpoints.v1))
    reply = accepted(await engine.backend.stage(back))
    assert reply.fetched_bytes == 0
    accepted(await engine.backend.prepare("back"))
    await engine.commit("back")
    accepted(await engine.backend.release("back", previous=True))
    assert await engine.holds(checkpoints.v1)
    assert await answer(engine.backend, _LONG) == before
    assert (await engine.backend.memory()).previous_bytes == 0
    gone = StageRetained(operation_id="gone", digest=digest_of(checkpoints.v2), directory=str(checkpoints.v2))
    assert refused(await engine.backend.stage(gone)) == "NotFound"


async def test_a_commit_needs_a_pause_and_a_proof_before_it_goes_on(engine: Engine, checkpoints: Checkpoints) -> None:
    operation = await engine.prepared(checkpoints.v1, checkpoints.v2)
    assert refused(await engine.backend.commit(operation, RequestPolicy.NONE_RUNNING)) == "Internal"
    accepted(await engine.backend.pause(operation, timeout=20))
    accepted(await engine.backend.commit(operation, RequestPolicy.NONE_RUNNING))
    assert refused(await engine.backend.resume(operation)) == "Internal"
    assert engine.backend.ranks()[0].digest == ""
    accepted(await engine.backend.verify(operation, strict=False))
    accepted(await engine.backend.resume(operation))
    assert engine.backend.ranks()[0].digest == digest_of(checkpoints.v2)


async def test_nothing_is_produced_during_a_pause(engine: Engine) -> None:
    undisturbed = await answer(engine.backend, _LONG, tokens=300)
    items: list[Tokens] = []
    with engine.slowly():
        stream = engine.backend.generate(prompt(_LONG, tokens=300))
        await _tokens(stream, 3, items)
        accepted(await engine.backend.pause("hold", timeout=20))
    # The memory call is answered after all that the worker had sent before it.
    await engine.backend.memory()
    rest = asyncio.ensure_future(collect(stream))
    await asyncio.sleep(0)
    late = engine.backend.generate(prompt("late", tokens=4))
    for _ in range(5):
        await engine.backend.memory()
    assert not rest.done()
    accepted(await engine.backend.resume("hold"))
    assert ids(items + await rest) == undisturbed
    assert len(ids(await collect(late))) == 4


async def test_a_closed_stream_ends_its_generation(engine: Engine, checkpoints: Checkpoints) -> None:
    streams = [engine.backend.generate(prompt(_LONG, tokens=800, request_id=f"{n}")) for n in range(2)]
    items: list[Tokens] = []
    await _tokens(streams[0], 2, items)
    for stream in streams:
        await stream.aclose()
    assert engine.backend.running() == 0
    # Legal only when really nothing runs.
    assert await engine.swap(checkpoints.v1, checkpoints.v2) == 0


async def test_sampling_is_reproducible_by_seed_only(engine: Engine) -> None:
    async def draw(**how: float) -> list[int]:
        return ids(
            await collect(engine.backend.generate(prompt(_LONG, tokens=40, sampling=Sampling(**how))))  # type: ignore[arg-type]
        )

    greedy = await answer(engine.backend, _LONG, tokens=40)
    seeded = await draw(temperature=1.5, seed=11)
    company, again = await asyncio.gather(draw(temperature=1.5, seed=12), draw(temperature=1.5, seed=11))
    assert seeded == again
    assert seeded != company
    assert seeded != greedy
    assert await draw(temperature=1.5) != await draw(temperature=1.5)
    assert await draw(temperature=1.5, top_k=1) == greedy
    assert await draw(temperature=1.5, top_p=1e-6) == greedy
    assert max(seeded) < 132


async def test_a_seeded_answer_survives_recomputation(engine: Engine, checkpoints: Checkpoints) -> None:
    request = prompt(_LONG, tokens=120, sampling=Sampling(temperature=1.0, seed=5))
    undisturbed = ids(await collect(engine.backend.generate(request)))
    items: list[Tokens] = []
    with engine.slowly():
        stream = engine.backend.generate(request)
        await _tokens(stream, 10, items)
        assert await engine.swap(checkpoints.v1, checkpoints.v1, policy=RequestPolicy.RECOMPUTE) == 1
    assert ids(items + await collect(stream)) == undisturbed


async def test_an_end_token_ends_the_answer(engine: Engine) -> None:
    whole = await answer(engine.backend, _LONG, tokens=30)
    end = whole[12]
    items = await collect(engine.backend.generate(prompt(_LONG, tokens=30, eos=(end,))))
    assert ids(items) == whole[: whole.index(end) + 1]
    assert items[-1].finish is FinishReason.STOP


@pytest.mark.parametrize("family", ["qwen2", "gpt2", "mixtral"])
async def test_other_families_swap_bit_exactly(shared: Engine, checkpoints: Checkpoints, family: str) -> None:
    from tests.support import models

    make = {"qwen2": models.tiny_qwen2, "gpt2": models.tiny_gpt2, "mixtral": models.tiny_mixtral}[family]
    changed = {
        "qwen2": ("model.embed_tokens.weight", "model.layers.1.self_attn.q_proj.bias"),
        "gpt2": ("transformer.wte.weight", "transformer.h.1.attn.c_attn.weight"),
        "mixtral": ("model.layers.1.block_sparse_moe.experts.2.w1.weight", "model.layers.0.input_layernorm.weight"),
    }[family]
    old = make(checkpoints.root / family / "old")
    new = models.write_variant(old, checkpoints.root / family / "new", changed, seed=3)
    await shared.load(new)
    fresh = await answer(shared.backend, _LONG)
    await shared.load(old)
    before = await answer(shared.backend, _LONG)
    await shared.swap(old, new)
    assert await answer(shared.backend, _LONG) == fresh != before
    assert await shared.holds(new)
    await shared.swap(new, old)
    assert await answer(shared.backend, _LONG) == before
    assert await shared.holds(old)


async def test_the_layout_names_what_is_fused(shared: Engine, checkpoints: Checkpoints) -> None:
    from tests.support import models

    directory = models.tiny_mixtral(checkpoints.root / "layout", experts=3)
    await shared.load(directory)
    layout = shared.backend.layout()
    assert layout.architecture == "MixtralForCausalLM"
    names = [name for group in layout.groups for name in group]
    assert sorted(names) == sorted(hashes_of(directory))
    fused = {group for group in layout.groups if len(group) > 1}
    experts = "model.layers.{}.block_sparse_moe.experts."
    assert {frozenset(name.split(".")[-2] for name in group) for group in fused} == {
        frozenset({"w1", "w3"}),
        frozenset({"w2"}),
    }
    assert all(any(name.startswith(experts.format(layer)) for layer in (0, 1)) for group in fused for name in group)
    half = stage_order(
        directory,
        models.write_variant(
            directory, checkpoints.root / "layout2", ["model.layers.0.block_sparse_moe.experts.0.w2.weight"], seed=1
        ),
        operation_id="half",
    )
    assert refused(await shared.backend.stage(half)) == "IncompatibleModel"


async def test_many_swaps_leave_no_memory_and_no_cache_page_behind(shared: Engine, checkpoints: Checkpoints) -> None:
    from tests.support import models

    pair = models.disjoint_pair(checkpoints.root / "larger", layers=2, hidden=256)
    versions: list[Path] = [pair.old, pair.new]
    await shared.load(versions[0])
    settled = 0
    for number in range(50):
        await shared.swap(versions[number % 2], versions[(number + 1) % 2])
        # Each answer fills a third of the cache: a page lost per swap would leave no room long before the end.
        text = f"{number} " + "x" * 300
        tokens = await answer(shared.backend, text, tokens=8)
        assert (max(tokens) < 132) if number % 2 else (min(tokens) >= 132)
        if number == 14:
            settled = (await shared.backend.memory()).rss_bytes
    changed = sum(item.nbytes for item in stage_order(pair.old, pair.new, operation_id="").tensors)
    assert changed > 1_000_000
    memory = await shared.backend.memory()
    assert memory.allocator_reserved_bytes >= memory.allocator_used_bytes > memory.model_bytes
    grown = memory.rss_bytes - settled
    # One version kept per swap would be 35 of them.
    assert grown < 10 * changed, f"{grown} bytes more after 35 swaps of {changed} bytes"
