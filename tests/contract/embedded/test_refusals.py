"""What cannot be served is refused by name, and nothing that is live has changed."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from modelswap_engine.backends.port import PromptTrial, Sampling, Stage
from modelswap_engine.protocol.errors import BadRequest
from tests.contract.embedded.conftest import Checkpoints, Engine
from tests.support.orders import (
    accepted,
    answer,
    collect,
    digest_of,
    ids,
    load_order,
    prompt,
    ranges,
    refused,
    stage_order,
)

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="session")]

_TENSOR = "model.layers.2.mlp.down_proj.weight"


def _flipped(order: Stage, directory: Path) -> Stage:
    from tests.support import models

    models.flip_byte(directory, _TENSOR, position=100)
    return order


def _truncated(order: Stage, directory: Path) -> Stage:
    file = directory / "model.safetensors"
    with file.open("r+b") as handle:
        handle.truncate(file.stat().st_size - 5000)
    return order


def _gone(order: Stage, directory: Path) -> Stage:
    (directory / "model.safetensors").unlink()
    return order


def _edited(change: Callable) -> Callable[[Stage, Path], Stage]:
    def make(order: Stage, directory: Path) -> Stage:
        from tests.support import models

        models.edit_tensor(directory, _TENSOR, change)
        found = tuple(item for item in ranges(directory) if item.name == _TENSOR)
        return Stage(operation_id=order.operation_id, digest="sha256:x", directory=order.directory, tensors=found)

    return make


def _with_nan(tensor):
    tensor[3, 3] = float("nan")
    return tensor


def _unknown(order: Stage, directory: Path) -> Stage:
    from msgspec.structs import replace

    return replace(order, tensors=(replace(order.tensors[0], name="model.layers.9.new.weight"),))


_BAD = {
    "flipped byte": (_flipped, "ManifestMismatch"),
    "truncated file": (_truncated, "InvalidCheckpoint"),
    "missing file": (_gone, "SourceUnreadable"),
    "not finite": (_edited(_with_nan), "ChecksFailed"),
    "output not finite": (_edited(lambda tensor: tensor.fill_(3e38)), "ChecksFailed"),
    "other shape": (_edited(lambda tensor: tensor[:, :-1]), "IncompatibleModel"),
    "other dtype": (_edited(lambda tensor: tensor.half()), "IncompatibleModel"),
    "unknown tensor": (_unknown, "IncompatibleModel"),
}


@pytest.mark.parametrize("kind", _BAD)
async def test_a_bad_version_is_refused_while_staging(
    shared: Engine, checkpoints: Checkpoints, tmp_path: Path, kind: str
) -> None:
    spoil, code = _BAD[kind]
    if shared.backend.ranks()[0].digest != digest_of(checkpoints.v1):
        await shared.load(checkpoints.v1)
    before = await answer(shared.backend, "before")
    bad = Path(shutil.copytree(checkpoints.v2, tmp_path / "bad"))
    order = spoil(stage_order(checkpoints.v1, bad, operation_id=kind), bad)
    (reply,) = await shared.backend.stage(order)
    assert reply.error is not None
    assert reply.error.code == code, reply.error
    if kind not in {"unknown tensor", "missing file", "truncated file", "output not finite"}:
        assert reply.error.details["tensor"] == _TENSOR
    assert reply.error.advice
    assert refused(await shared.backend.prepare(kind)) == "NotFound"
    assert await shared.holds(checkpoints.v1)
    assert await answer(shared.backend, "before") == before
    assert (await shared.backend.memory()).staged_bytes == 0


async def test_a_file_that_changes_after_staging_changes_nothing_live(
    engine: Engine, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(checkpoints.v2, tmp_path / "copy"))
    operation = await engine.prepared(checkpoints.v1, copy)
    file = copy / "model.safetensors"
    with file.open("r+b") as handle:
        handle.write(bytes(file.stat().st_size))
    await engine.commit(operation)
    file.write_bytes(b"")
    assert await engine.holds(checkpoints.v2)
    assert min(await answer(engine.backend, "after")) >= 132


def _without(directory: Path, name: str) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(directory / "model.safetensors")
    del tensors[name]
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def _configured(directory: Path, **keys: object) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


_UNLOADABLE = {
    "missing tensor": (lambda d: _without(d, _TENSOR), "IncompatibleModel"),
    "quantized": (lambda d: _configured(d, quantization_config={"quant_method": "fp8"}), "IncompatibleModel"),
    "unknown architecture": (
        lambda d: _configured(d, model_type="evil", auto_map={"AutoConfig": "evil.Config"}),
        "IncompatibleModel",
    ),
    "other size": (lambda d: _configured(d, hidden_size=32), "IncompatibleModel"),
    "no config": (lambda d: (d / "config.json").unlink(), "InvalidCheckpoint"),
}


@pytest.mark.parametrize("kind", _UNLOADABLE)
async def test_what_cannot_be_loaded_is_refused_and_the_next_load_works(
    shared: Engine, checkpoints: Checkpoints, tmp_path: Path, kind: str
) -> None:
    spoil, code = _UNLOADABLE[kind]
    bad = Path(shutil.copytree(checkpoints.v1, tmp_path / "bad"))
    (bad / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    spoil(bad)
    assert refused(await shared.backend.load(load_order(bad))) == code
    assert not (tmp_path / "ran").exists()
    assert shared.backend.ranks()[0].digest == ""
    accepted(await shared.backend.load(load_order(checkpoints.v1)))
    assert len(await answer(shared.backend, "works", tokens=3)) == 3


async def test_requests_that_would_break_a_step_are_refused(engine: Engine) -> None:
    good = prompt("good", tokens=4)
    limit = engine.backend.max_tokens
    assert limit == 16 * 64
    for bad in (
        prompt("x" * limit, tokens=1),
        prompt("x", tokens=limit),
        prompt("", tokens=4),
        prompt("x", tokens=0),
        prompt("x", sampling=Sampling(temperature=-1.0)),
        prompt("x", sampling=Sampling(temperature=1.0, top_p=0.0)),
        type(good)(request_id="r", prompt=(1, 264), max_new_tokens=4),
        type(good)(request_id="r", prompt=(-1,), max_new_tokens=4),
    ):
        with pytest.raises(BadRequest):
            engine.backend.generate(bad)
    assert engine.backend.running() == 0
    # The longest request that is allowed fills the whole cache, and runs.
    longest = prompt("x" * (limit - 5), tokens=5)
    assert len([item async for item in engine.backend.generate(longest)]) == 5


async def test_prompts_are_tried_on_what_is_staged_while_the_old_version_answers(
    engine: Engine, checkpoints: Checkpoints
) -> None:
    backend = engine.backend
    undisturbed = await answer(backend, "meanwhile", tokens=60)
    order = stage_order(checkpoints.v1, checkpoints.v2, operation_id="tried")
    accepted(await backend.stage(order))
    stream = backend.generate(prompt("meanwhile", tokens=60))
    words = prompt("a prompt").prompt
    assert refused(await backend.try_out("tried", [PromptTrial(prompt=words, max_logprob_delta=0.5)])) == "ChecksFailed"
    trials = [PromptTrial(prompt=words), PromptTrial(prompt=words, max_logprob_delta=1e6)]
    assert accepted(await backend.try_out("tried", trials)).digest == digest_of(checkpoints.v2)
    assert ids(await collect(stream)) == undisturbed
    assert refused(await backend.try_out("other", trials)) == "NotFound"
    accepted(await backend.release("tried", previous=False))
    assert await engine.holds(checkpoints.v1)
