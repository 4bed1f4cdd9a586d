"""Two instances side by side in a real worker process: what each answers, what they share, how one of them ends."""

import msgspec
import pytest

from modelswap_engine.backends.port import FinishReason, RequestPolicy, StageRetained, Tokens
from tests.contract.embedded.conftest import Checkpoints, Engine
from tests.support.orders import accepted, answer, collect, digest_of, ids, prompt, refused, stage_order, take

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="session")]

LONG = "A prompt that fills several pages of the cache: " + "the quick brown fox jumps over the lazy dog. " * 3


async def open_second(engine: Engine, checkpoints: Checkpoints) -> str:
    """Stage v2 and bring up an instance with it beside v1; return the operation."""
    operation = engine.operation()
    order = stage_order(checkpoints.v1, checkpoints.v2, operation_id=operation)
    accepted(await engine.backend.stage(order))
    assert accepted(await engine.backend.prepare(operation, overlap=True)).digest == digest_of(checkpoints.v2)
    return operation


async def switch(engine: Engine, operation: str) -> None:
    assert accepted(await engine.backend.commit(operation, RequestPolicy.OVERLAP)).method == "instance"
    accepted(await engine.backend.verify(operation, strict=True))


async def said(engine: Engine, version: str, *, tokens: int = 16) -> list[Tokens]:
    """Ask the instance of a version."""
    asked = msgspec.structs.replace(prompt(LONG, tokens=tokens), version=version)
    return await collect(engine.backend.generate(asked))


async def test_old_requests_end_on_the_old_weights_while_new_ones_have_the_new(
    engine: Engine, checkpoints: Checkpoints
) -> None:
    v1, v2 = digest_of(checkpoints.v1), digest_of(checkpoints.v2)
    undisturbed = await answer(engine.backend, LONG, tokens=400)
    await engine.load(checkpoints.v2)
    fresh = await answer(engine.backend, LONG)
    await engine.load(checkpoints.v1)
    alone = await engine.backend.memory()
    stream = engine.backend.generate(msgspec.structs.replace(prompt(LONG, tokens=400), version=v1))
    items = await take(stream, 5)
    operation = await open_second(engine, checkpoints)
    # Until the commit everybody gets the old version.
    assert {item.digest for item in await said(engine, v1)} == {v1}
    both = await engine.backend.memory()
    changed = sum(item.nbytes for item in stage_order(checkpoints.v1, checkpoints.v2, operation_id="").tensors)
    assert both.kv_cache_bytes == 2 * alone.kv_cache_bytes
    assert both.kv_cache_bytes <= alone.kv_cache_bytes + alone.instance_bytes
    # Of the weights only what differs is there twice.
    assert (both.model_bytes, both.previous_bytes) == (alone.model_bytes, changed)
    await switch(engine, operation)
    new = await said(engine, v2)
    assert (ids(new), {item.digest for item in new}) == (fresh, {v2})
    late = await said(engine, v1)  # let in before the switch
    assert (ids(late), {item.digest for item in late}) == (undisturbed[:16], {v1})
    items += await collect(stream)
    assert (ids(items), {item.digest for item in items}) == (undisturbed, {v1})
    assert accepted(await engine.backend.retire(operation)).requests == 0
    accepted(await engine.backend.release(operation, previous=False))
    assert (await engine.backend.memory()).kv_cache_bytes == alone.kv_cache_bytes
    assert await engine.holds(checkpoints.v2)
    assert engine.backend.ranks()[0].digest == v2
    # The weights core is where it would be after any other swap: the way back reads nothing, in any mode.
    back = StageRetained(operation_id="back", digest=v1, directory=str(checkpoints.v1))
    assert accepted(await engine.backend.stage(back)).fetched_bytes == 0
    accepted(await engine.backend.prepare("back", overlap=True))
    await switch(engine, "back")
    accepted(await engine.backend.retire("back"))
    accepted(await engine.backend.release("back", previous=False))
    assert await answer(engine.backend, LONG, tokens=400) == undisturbed
    assert await engine.holds(checkpoints.v1)
    assert await engine.swap(checkpoints.v1, checkpoints.v2) == 0
    assert await answer(engine.backend, LONG) == fresh


async def test_stragglers_end_with_an_error_and_their_memory_comes_back(
    engine: Engine, checkpoints: Checkpoints
) -> None:
    v1, v2 = digest_of(checkpoints.v1), digest_of(checkpoints.v2)
    alone = await engine.backend.memory()
    with engine.slowly():
        streams = [
            engine.backend.generate(msgspec.structs.replace(prompt(LONG, tokens=800, request_id=f"{n}"), version=v1))
            for n in range(2)
        ]
        for stream in streams:
            await take(stream, 3)
        operation = await open_second(engine, checkpoints)
        assert refused(await engine.backend.retire(operation)) == "Internal"  # it serves: nothing is committed
        await switch(engine, operation)
        beside = engine.backend.generate(msgspec.structs.replace(prompt(LONG, tokens=100), version=v2))
        items = await take(beside, 3)
        assert accepted(await engine.backend.retire(operation)).requests == 2
    for stream in streams:
        last = (await collect(stream))[-1]
        assert (last.finish, last.digest) == (FinishReason.ERROR, v1)
        assert "version before" in last.error
    items += await collect(beside)
    assert (len(ids(items)), {item.digest for item in items}) == (100, {v2})
    assert accepted(await engine.backend.retire(operation)).requests == 0
    accepted(await engine.backend.release(operation, previous=True))
    left = await engine.backend.memory()
    assert (left.kv_cache_bytes, left.previous_bytes) == (alone.kv_cache_bytes, 0)


@pytest.mark.parametrize("after", ["prepare", "commit"])
async def test_a_second_instance_taken_back_leaves_no_trace(
    engine: Engine, checkpoints: Checkpoints, after: str
) -> None:
    undisturbed = await answer(engine.backend, LONG, tokens=300)
    alone = await engine.backend.memory()
    stream = engine.backend.generate(prompt(LONG, tokens=300))
    items = await take(stream, 5)
    operation = await open_second(engine, checkpoints)
    assert refused(await engine.backend.stage(stage_order(checkpoints.v1, checkpoints.v2, operation_id="x"))) == "Busy"
    if after == "commit":
        accepted(await engine.backend.commit(operation, RequestPolicy.OVERLAP))
        assert accepted(await engine.backend.rollback(operation)).digest == digest_of(checkpoints.v1)
        accepted(await engine.backend.verify(operation, strict=True))
    accepted(await engine.backend.release(operation, previous=True))
    items += await collect(stream)
    assert ids(items) == undisturbed
    assert await engine.holds(checkpoints.v1)
    left = await engine.backend.memory()
    assert (left.kv_cache_bytes, left.previous_bytes, left.staged_bytes) == (alone.kv_cache_bytes, 0, 0)
    assert await engine.swap(checkpoints.v1, checkpoints.v2) == 0
