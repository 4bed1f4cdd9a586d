"""LoRA adapters in a real worker process, against the same adapters merged into their base by peft."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from modelswap_engine.backends.adapters import LoadAdapter
from modelswap_engine.backends.port import FinishReason, RequestPolicy
from tests.contract.embedded.conftest import Checkpoints, Engine
from tests.support.orders import accepted, answer, collect, digest_of, hashes_of, ids, prompt, refused, take

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="session")]

TEXTS = ["Once upon a time", "in a galaxy far, far away there was", "x", "The quick brown fox jumps over " * 4]
LLAMA = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


async def serve(engine: Engine, folder: Path, *, slot: int) -> LoadAdapter:
    """Load an adapter and put it into a slot."""
    from tests.support.lora import adapter_order

    order = await adapter_order(folder, engine.backend.adapters())
    accepted(await engine.backend.load_adapter(order))
    accepted(await engine.backend.place_adapter(order.adapter_id, slot))
    return order


async def ask(engine: Engine, text: str, adapter: str, *, tokens: int = 12) -> list[int]:
    request = msgspec.structs.replace(prompt(text, tokens=tokens), adapter=adapter)
    items = await collect(engine.backend.generate(request))
    assert items[-1].finish is FinishReason.LENGTH, items[-1].error
    return ids(items)


async def together(engine: Engine, asked: list[tuple[str, str]]) -> list[list[int]]:
    """Ask all at once, so that they share batches."""
    return list(await asyncio.gather(*(ask(engine, text, adapter) for text, adapter in asked)))


async def alone(engine: Engine, checkpoint: Path) -> list[list[int]]:
    """Return the answers of a checkpoint without adapters."""
    await engine.load(checkpoint)
    return [await answer(engine.backend, text, tokens=12) for text in TEXTS]


@pytest.fixture(scope="module")
def adapters(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters of v1: different ranks and modules, rslora, a rank and an alpha for single modules."""
    from tests.support.lora import random_adapter

    folder = tmp_path_factory.mktemp("adapters")
    base = checkpoints.v1
    random_adapter(base, folder / "all", seed=1, r=8, lora_alpha=8, target_modules=LLAMA, spread=0.15)
    patterns: dict[str, Any] = {"rank_pattern": {"layers.1.self_attn.q_proj": 2}, "alpha_pattern": {"v_proj": 9}}
    random_adapter(base, folder / "some", seed=2, r=3, use_rslora=True, target_modules=["q_proj", "v_proj"], **patterns)
    return folder


async def test_each_request_of_a_batch_is_answered_by_its_own_adapter(
    engine: Engine, checkpoints: Checkpoints, adapters: Path
) -> None:
    wanted = {name: await alone(engine, adapters / f"{name}-merged") for name in ("all", "some")}
    wanted[""] = await alone(engine, checkpoints.v1)
    held = {name: (await serve(engine, adapters / name, slot=number)).adapter_id
            for number, name in enumerate(("all", "some"))}  # fmt: skip
    assert wanted["all"] != wanted["some"] != wanted[""] != wanted["all"]
    asked = [(text, name) for text in TEXTS for name in ("all", "", "some", "all", "")]
    got = await together(engine, [(text, held.get(name, "")) for text, name in asked])
    assert got == [wanted[name][TEXTS.index(text)] for text, name in asked]
    # The base is still the base, under the names that its checkpoint has, byte for byte.
    assert await engine.holds(checkpoints.v1)
    for name in held.values():
        accepted(await engine.backend.drop_adapter(name))
    assert (await engine.backend.memory()).adapter_bytes == 0


@pytest.mark.parametrize("kind", ["qwen2", "gpt2", "mixtral"])
async def test_other_architectures(shared: Engine, checkpoints: Checkpoints, tmp_path: Path, kind: str) -> None:
    from tests.support import models
    from tests.support.lora import random_adapter

    modules = {"qwen2": LLAMA, "gpt2": ["c_attn", "c_proj", "c_fc"], "mixtral": LLAMA[:4]}[kind]
    base = getattr(models, f"tiny_{kind}")(tmp_path / "base")
    random_adapter(base, tmp_path / "adapter", seed=3, r=4, lora_alpha=4, target_modules=modules, spread=0.15)
    wanted = await alone(shared, tmp_path / "adapter-merged")
    plain = await alone(shared, base)
    order = await serve(shared, tmp_path / "adapter", slot=0)
    asked = [(text, adapter) for text in TEXTS for adapter in (order.adapter_id, "")]
    expected = [answers[TEXTS.index(text)] for text in TEXTS for answers in (wanted, plain)]
    assert wanted != plain
    assert await together(shared, asked) == expected
    refusals = shared.backend.adapters().refused
    head = "transformer.wte" if kind == "gpt2" else "model.embed_tokens"
    assert refusals[head] == "it is an embedding"
    if kind == "mixtral":
        assert refusals["model.layers.0.mlp.experts"] == "its experts are fused into one parameter"


async def test_an_adapter_goes_on_over_a_swap_of_its_base(
    engine: Engine, checkpoints: Checkpoints, adapters: Path
) -> None:
    """Preempted and computed again with the new base, still with its adapter; and after it, on the new base."""
    order = await serve(engine, adapters / "all", slot=1)
    request = msgspec.structs.replace(prompt("go on", tokens=120), adapter=order.adapter_id)
    with engine.slowly():
        stream = engine.backend.generate(request)
        items = await take(stream, 8)
        assert await engine.swap(checkpoints.v1, checkpoints.v2, policy=RequestPolicy.RECOMPUTE) == 1
    items += await collect(stream)
    made, old = ids(items), ids([item for item in items if item.digest == digest_of(checkpoints.v1)])
    turn = len(old)
    assert (made[:turn], len(made)) == (old, 120)
    assert await engine.holds(checkpoints.v2)
    rest = msgspec.structs.replace(
        request, prompt=(*request.prompt, *made[:turn]), max_new_tokens=len(made) - turn, request_id="rest"
    )
    assert ids(await collect(engine.backend.generate(rest))) == made[turn:]
    plain = msgspec.structs.replace(rest, adapter="")
    assert ids(await collect(engine.backend.generate(plain))) != made[turn:]


async def test_a_request_keeps_the_adapter_it_began_with(
    engine: Engine, checkpoints: Checkpoints, adapters: Path
) -> None:
    order = await serve(engine, adapters / "all", slot=0)
    request = msgspec.structs.replace(prompt("go on", tokens=150), adapter=order.adapter_id)
    undisturbed = ids(await collect(engine.backend.generate(request)))
    stream = engine.backend.generate(request)
    items = await take(stream, 4)
    accepted(await engine.backend.clear_slot(0))
    await serve(engine, adapters / "some", slot=0)
    accepted(await engine.backend.drop_adapter(order.adapter_id))
    assert ids(items + await collect(stream)) == undisturbed
    # Nobody else gets it: neither a pretended one nor the base answers in its place.
    (last,) = await collect(engine.backend.generate(request))
    assert (last.finish, last.tokens) == (FinishReason.ERROR, ())
    assert "in no slot" in last.error


async def test_cached_prefixes_are_not_shared_between_adapters(
    engine: Engine, checkpoints: Checkpoints, adapters: Path
) -> None:
    long = TEXTS[3]
    first = await serve(engine, adapters / "all", slot=0)
    second = await serve(engine, adapters / "some", slot=1)
    fresh = [await ask(engine, long, name) for name in (first.adapter_id, second.adapter_id, "")]
    again = [await ask(engine, long, name) for name in ("", second.adapter_id, first.adapter_id)]
    assert fresh == again[::-1]


async def test_what_is_not_the_promised_adapter_is_not_loaded(
    engine: Engine, checkpoints: Checkpoints, adapters: Path, tmp_path: Path
) -> None:
    from tests.support.lora import adapter_order

    backend = engine.backend
    order = await adapter_order(adapters / "all", backend.adapters())
    first = order.modules[0]
    lie = msgspec.structs.replace(first, a=msgspec.structs.replace(first.a, sha256="0" * 64))
    other = msgspec.structs.replace(first, scaling=first.scaling * 2)
    for modules, code in [
        ((lie, *order.modules[1:]), "ManifestMismatch"),
        ((other, *order.modules[1:]), "InvalidCheckpoint"),  # peft reads another scaling in the config
        (order.modules[1:], "IncompatibleAdapter"),  # a module that the config names is missing
    ]:
        assert refused(await backend.load_adapter(msgspec.structs.replace(order, modules=modules))) == code
    assert refused(await backend.place_adapter(order.adapter_id, 0)) == "NotFound"
    assert refused(await backend.place_adapter(order.adapter_id, 99)) == "BadRequest"
    assert (await backend.memory()).adapter_bytes == 0


async def test_values_that_are_not_finite_are_refused(engine: Engine, checkpoints: Checkpoints, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    from tests.support.lora import adapter_order, speaking

    folder = speaking(checkpoints.v1, tmp_path / "nan", "k")
    tensors = load_file(folder / "adapter_model.safetensors")
    next(iter(tensors.values()))[0, 0] = float("nan")
    save_file(tensors, folder / "adapter_model.safetensors")
    order = await adapter_order(folder, engine.backend.adapters())
    assert refused(await engine.backend.load_adapter(order)) == "ChecksFailed"


async def test_loading_waits_for_no_pause_and_no_other_adapter(
    engine: Engine, checkpoints: Checkpoints, adapters: Path
) -> None:
    """The ranks stand still in the middle of a swap; adapters come in all the same."""
    operation = await engine.prepared(checkpoints.v1, checkpoints.v2)
    accepted(await engine.backend.pause(operation, timeout=20))
    orders = await asyncio.gather(*(serve(engine, adapters / name, slot=n) for n, name in enumerate(("all", "some"))))
    accepted(await engine.backend.resume(operation))
    accepted(await engine.backend.release(operation, previous=False))
    assert await ask(engine, "x", orders[0].adapter_id) != await ask(engine, "x", orders[1].adapter_id)
    assert hashes_of(checkpoints.v1) == (await engine.backend.hashes("*")).tensors


async def test_a_whole_load_leaves_no_adapter_behind(engine: Engine, checkpoints: Checkpoints, adapters: Path) -> None:
    order = await serve(engine, adapters / "all", slot=0)
    await engine.load(checkpoints.v1)
    assert (await engine.backend.memory()).adapter_bytes == 0
    assert refused(await engine.backend.place_adapter(order.adapter_id, 0)) == "NotFound"
