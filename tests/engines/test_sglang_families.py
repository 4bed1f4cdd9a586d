"""Every architecture that may be exchanged inside SGLang, on the real one: there, equal to its own load, and back."""

from collections.abc import Callable
from pathlib import Path

import pytest

from modelswap_engine.backends.inprocess import wire
from modelswap_engine.backends.sglang.architectures import TRIED
from modelswap_engine.backends.sglang.client import SglangClient
from modelswap_engine.backends.sglang.control import SglangControl
from tests.support.engine_ranks import LONG, PROMPTS, SECONDS, Ranks, good
from tests.support.models import tiny_llama, tiny_qwen2, tiny_qwen3
from tests.support.orders import digest_of, hashes_of
from tests.support.sglang import SMALL, Client, Sglang, with_our_half

pytestmark = pytest.mark.engine

Maker = Callable[[Path, int], Path]


def llama(out: Path, seed: int) -> Path:
    return tiny_llama(out, seed=seed, dtype="bfloat16")


def qwen2(out: Path, seed: int) -> Path:
    return tiny_qwen2(out, seed=seed, dtype="bfloat16")


def qwen3(out: Path, seed: int) -> Path:
    return tiny_qwen3(out, seed=seed, head_dim=32, dtype="bfloat16")


FAMILIES = [
    pytest.param(qwen2, id="Qwen2ForCausalLM", marks=pytest.mark.full),  # biases, the embedding is the head
    pytest.param(qwen3, id="Qwen3ForCausalLM"),  # norms in the attention, a head tied to the embedding
    pytest.param(llama, id="LlamaForCausalLM", marks=pytest.mark.full),
]


def test_each_architecture_on_the_list_is_here() -> None:
    assert {param.id for param in FAMILIES} == TRIED


@pytest.mark.parametrize("make", FAMILIES)
async def test_there_and_back(make: Maker, tmp_path: Path) -> None:
    old, new = make(tmp_path / "old", 1), make(tmp_path / "new", 2)
    server = Sglang(tmp_path / "sglang", options=SMALL, variables=with_our_half(tmp_path / "beside"))
    control, client = SglangControl(SglangClient(server.url)), Client(server.url)
    try:
        server.start(old).wait_ready()
        await control.facts(seconds=SECONDS)
        ranks = Ranks(control)
        assert good(await ranks.adopt(old)).reply.digest == digest_of(old)
        before = await says(client)
        good(await ranks.stage(old, new, "op"))
        for answers in await ranks.exchange("op"):
            assert good(answers).reply.digest == digest_of(new)
        assert await control.flush(seconds=SECONDS)
        exchanged, sums = await says(client), await client.checksum()
        answer = good(await ranks.outcome(wire.HashesCall(work=ranks.work(), pattern="*")))
        assert answer.hashes is not None
        assert answer.hashes.tensors == hashes_of(new)
        assert answer.hashes.unverifiable == ()

        good(await ranks.call(wire.RollbackCall(operation_id="op")))
        assert good(await ranks.verify("op")).reply.digest == digest_of(old)
        assert await control.flush(seconds=SECONDS)
        assert await says(client) == before != exchanged

        await control.load_full(str(new), digest_of(new), seconds=SECONDS)
        assert (await says(client), await client.checksum()) == (exchanged, sums)
    finally:
        await client.close()
        await control.close()
        server.kill()


async def says(client: Client) -> list[list[int]]:
    return [(await client.ask(prompt)).tokens for prompt in (*PROMPTS, LONG)]
