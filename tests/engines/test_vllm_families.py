"""Every architecture that may be exchanged inside vLLM, on the real one; with adapters around its layers, too.

What they must say comes from transformers, in float32: vLLM's own reload is not right for all of them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from safetensors.torch import load_file

from modelswap_engine.backends.inprocess import wire
from modelswap_engine.backends.vllm.architectures import TRIED
from modelswap_engine.backends.vllm.control import VllmControl
from tests.support import engines
from tests.support.engine_ranks import PROMPTS, SECONDS, Client, Ranks, codes, good, reload
from tests.support.lora import random_adapter
from tests.support.models import greedy, tiny_llama, tiny_qwen2, tiny_qwen3
from tests.support.orders import digest_of

pytestmark = pytest.mark.engine

Maker = Callable[[Path, int], Path]
TOKENS = 16
LORA = ("--enable-lora", "--max-lora-rank", "8", "--max-loras", "1")


def llama(out: Path, seed: int) -> Path:
    return tiny_llama(out, seed=seed, hidden=128)


def qwen2(out: Path, seed: int) -> Path:
    return tiny_qwen2(out, seed=seed, hidden=128)


def qwen3(out: Path, seed: int) -> Path:
    return tiny_qwen3(out, seed=seed, head_dim=32)


# In each run the other tests drive a Llama here, and a Qwen3 in SGLang.
FAMILIES = [
    pytest.param(qwen2, LORA, id="Qwen2ForCausalLM", marks=pytest.mark.full),  # biases, a tied head
    pytest.param(qwen3, (), id="Qwen3ForCausalLM", marks=pytest.mark.full),  # norms, a head tied to the embedding
    pytest.param(llama, LORA, id="LlamaForCausalLM", marks=pytest.mark.full),
]


def test_each_architecture_on_the_list_is_here() -> None:
    assert {param.id for param in FAMILIES} == TRIED


@pytest.mark.parametrize(("make", "options"), FAMILIES)
async def test_there_and_back(
    make: Maker, options: tuple[str, ...], session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    old, new = make(tmp_path / "old", 1), make(tmp_path / "new", 2)
    wanted = {folder: expected(folder, tmp_path / f"adapter-{folder.name}", bool(options)) for folder in (old, new)}
    server = engines.vllm(old, tmp_path, "--distributed-executor-backend", "uni", *options)
    with engines.running(server):
        control, client = VllmControl(server.url, session), Client(session, server.url)
        await control.facts(seconds=SECONDS)
        names = ["tiny"]
        if options:
            await load_adapter(session, server.url, tmp_path / "adapter-old")
            names.append("adapter")

        async def says() -> list[list[int]]:
            return [await client.ids(prompt, model=name, tokens=TOKENS) for name in names for prompt in PROMPTS]

        ranks = Ranks(control)
        assert good(await ranks.adopt(old)).reply.digest == digest_of(old)
        good(await ranks.stage(old, new, "op"))
        assert await says() == wanted[old]
        for answers in await ranks.exchange("op"):
            assert good(answers).reply.digest == digest_of(new)
        assert await control.flush(seconds=SECONDS)
        assert await says() == wanted[new]
        good(await ranks.call(wire.RollbackCall(operation_id="op")))
        assert good(await ranks.verify("op")).reply.digest == digest_of(old)
        assert await control.flush(seconds=SECONDS)
        assert await says() == wanted[old]
        await a_reload_is_believed_only_as_far_as_it_went(ranks, new, wanted[new], says)


async def a_reload_is_believed_only_as_far_as_it_went(
    ranks: Ranks, folder: Path, wanted: list[list[int]], says: Callable[[], Any]
) -> None:
    """vLLM 0.32 forgets to pack a tied head again on CPU: every tensor is right, and every answer wrong."""
    await reload(ranks.control, folder)
    right = await says() == wanted
    assert codes(await ranks.adopt(folder)) == ({""} if right else {"ManifestMismatch"})


def expected(folder: Path, adapter: Path, with_adapter: bool) -> list[list[int]]:
    """Return what a version says by itself, and with an adapter merged into it."""
    if not with_adapter:
        return greedy(folder, PROMPTS, tokens=TOKENS)
    random_adapter(folder, adapter, seed=3, r=8, target_modules=["q_proj", "o_proj"])
    first = adapter.with_name("adapter-old") / "adapter_model.safetensors"
    mine = load_file(adapter / "adapter_model.safetensors")
    assert all(torch.equal(tensor, mine[name]) for name, tensor in load_file(first).items())  # one adapter, two bases
    merged = adapter.with_name(f"{adapter.name}-merged")
    return greedy(folder, PROMPTS, tokens=TOKENS) + greedy(merged, PROMPTS, tokens=TOKENS)


async def load_adapter(session: aiohttp.ClientSession, url: str, folder: Path) -> None:
    body = {"lora_name": "adapter", "lora_path": str(folder)}
    async with session.post(f"{url}/v1/load_lora_adapter", json=body) as answer:
        assert answer.status == 200, await answer.text()
