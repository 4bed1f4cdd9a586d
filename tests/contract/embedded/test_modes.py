"""What happens to running requests and to cached pages when the weights change, by mode, in a real worker process.

The pages are small (16 tokens), so that every prompt here leaves some behind that a wrong key would find.
"""

import asyncio
from pathlib import Path

import msgspec
import pytest

from modelswap_engine.backends.port import FinishReason, Generate, RequestPolicy, Tokens
from tests.contract.embedded.conftest import Checkpoints, Engine
from tests.support.orders import accepted, answer, collect, digest_of, ids, prompt, take

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="session")]

LONG = "A prompt that fills several pages of the cache: " + "the quick brown fox jumps over the lazy dog. " * 3


def made_by(items: list[Tokens], digest: str) -> list[int]:
    return [token for item in items if item.digest == digest for token in item.tokens]


def continued(request: Generate, tokens: list[int], *, more: int) -> Generate:
    """Return the request whose prompt is another one's prompt and the beginning of its answer."""
    return msgspec.structs.replace(request, prompt=(*request.prompt, *tokens), max_new_tokens=more)


async def test_frozen_requests_go_on_with_their_old_pages(engine: Engine, checkpoints: Checkpoints) -> None:
    v1, v2 = digest_of(checkpoints.v1), digest_of(checkpoints.v2)
    requests = [prompt(text, tokens=150, request_id=text) for text in (LONG, "short", "another one")]
    with engine.slowly():
        streams = [engine.backend.generate(request) for request in requests]
        items = [await take(stream, 8) for stream in streams]
        assert await engine.swap(checkpoints.v1, checkpoints.v2, policy=RequestPolicy.FREEZE) == 3
    for stream, into in zip(streams, items, strict=True):
        into.extend(await collect(stream))
    await engine.load(checkpoints.v2)
    for request, into in zip(requests, items, strict=True):
        old, new = made_by(into, v1), made_by(into, v2)
        assert len(old) >= 8
        assert len(old) + len(new) == 150
        assert max(old) < 132 <= min(new)
        # Computing prompt and tokens again with the new weights would have given something else.
        again = ids(await collect(engine.backend.generate(continued(request, old, more=len(new)))))
        assert again != new


async def test_nobody_finds_the_pages_of_a_frozen_request(engine: Engine, checkpoints: Checkpoints) -> None:
    request = prompt(LONG, tokens=300)
    empty = (await engine.backend.memory()).kv_free_bytes
    with engine.slowly():
        stream = engine.backend.generate(request)
        items = await take(stream, 20)
        assert await engine.swap(checkpoints.v1, checkpoints.v2, policy=RequestPolicy.FREEZE) == 1
        assert (await engine.backend.memory()).kv_cached_bytes == 0
    beside = await answer(engine.backend, LONG)
    items += await collect(stream)
    # Pages that it completed after the swap would be found by whoever sends its whole text.
    after = continued(request, ids(items), more=16)
    behind = ids(await collect(engine.backend.generate(after)))
    await engine.load(checkpoints.v2)
    assert beside == await answer(engine.backend, LONG)
    assert behind == ids(await collect(engine.backend.generate(after)))
    assert len(ids(items)) == 300
    assert empty == (await engine.backend.memory()).kv_free_bytes + (await engine.backend.memory()).kv_cached_bytes


@pytest.mark.parametrize("policy", [RequestPolicy.FREEZE, RequestPolicy.RECOMPUTE, RequestPolicy.ABORT])
async def test_every_page_comes_back(engine: Engine, checkpoints: Checkpoints, policy: RequestPolicy) -> None:
    empty = await engine.backend.memory()
    assert empty.kv_cached_bytes == 0
    # Two of them share pages while they are frozen.
    with engine.slowly():
        streams = [engine.backend.generate(prompt(LONG, tokens=200, request_id=f"{n}")) for n in range(3)]
        for stream in streams:
            await take(stream, 8)
        assert (await engine.backend.memory()).kv_free_bytes < empty.kv_free_bytes
        await engine.swap(checkpoints.v1, checkpoints.v2, policy=policy)
    for stream in streams:
        await collect(stream)
    left = await engine.backend.memory()
    assert left.kv_free_bytes + left.kv_cached_bytes == empty.kv_free_bytes
    assert (left.kv_cached_bytes > 0) == (policy is RequestPolicy.RECOMPUTE)
    await engine.swap(checkpoints.v2, checkpoints.v1)
    assert (await engine.backend.memory()).kv_free_bytes == empty.kv_free_bytes


async def test_a_commit_taken_back_leaves_frozen_requests_as_they_were(
    engine: Engine, checkpoints: Checkpoints
) -> None:
    undisturbed = await answer(engine.backend, LONG, tokens=300)
    operation = await engine.prepared(checkpoints.v1, checkpoints.v2)
    with engine.slowly():
        stream = engine.backend.generate(prompt(LONG, tokens=300))
        items = await take(stream, 20)
        accepted(await engine.backend.pause(operation, timeout=20))
    assert accepted(await engine.backend.commit(operation, RequestPolicy.FREEZE)).requests == 1
    accepted(await engine.backend.rollback(operation))
    accepted(await engine.backend.verify(operation, strict=True))
    accepted(await engine.backend.resume(operation))
    accepted(await engine.backend.release(operation, previous=False))
    items += await collect(stream)
    assert ids(items) == undisturbed
    assert {item.digest for item in items} == {digest_of(checkpoints.v1)}


async def test_pages_are_shared_within_an_adapter_only(
    engine: Engine, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    from tests.support.lora import adapter_order, speaking

    names = []
    for slot, letter in enumerate("kq"):
        order = await adapter_order(speaking(checkpoints.v1, tmp_path / letter, letter), engine.backend.adapters())
        accepted(await engine.backend.load_adapter(order))
        accepted(await engine.backend.place_adapter(order.adapter_id, slot))
        names.append(order.adapter_id)

    async def kept_after(adapter: str) -> int:
        items = await collect(engine.backend.generate(msgspec.structs.replace(prompt(LONG, tokens=4), adapter=adapter)))
        assert items[-1].finish is FinishReason.LENGTH, items[-1].error
        return (await engine.backend.memory()).kv_cached_bytes

    once = await kept_after("")
    assert once > 0
    assert await kept_after("") == once
    assert await kept_after(names[0]) == 2 * once
    assert await kept_after(names[1]) == 3 * once
    assert await kept_after(names[0]) == 3 * once


async def test_recomputed_requests_come_back_one_after_the_other(engine: Engine, checkpoints: Checkpoints) -> None:
    """No step computes more than a batch, so the first go on while the last are still being computed again."""
    count, tokens = 4, 90
    operation = await engine.prepared(checkpoints.v1, checkpoints.v2)
    texts = [f"{number} {'x' * 140}" for number in range(count)]
    with engine.slowly():
        streams = [engine.backend.generate(prompt(text, tokens=tokens, request_id=text)) for text in texts]
        items = [await take(stream, 1) for stream in streams]
        assert await engine.commit(operation, RequestPolicy.RECOMPUTE) == count
    arrivals: list[int] = []
    v2 = digest_of(checkpoints.v2)

    async def note(number: int) -> None:
        async for item in streams[number]:
            items[number].append(item)
            arrivals.extend([number] * (item.digest == v2))

    await asyncio.gather(*(note(number) for number in range(count)))
    # More tokens than a batch of 128 in each prompt: the last has to wait for more than a step per request before it.
    first, last = arrivals.index(0), arrivals.index(count - 1)
    assert arrivals[first:last].count(0) >= count - 1
    assert [len(ids(into)) for into in items] == [tokens] * count
