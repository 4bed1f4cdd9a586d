"""LoRA adapters that lie, ask for more than is done here, or are none at all: refused before anything is touched."""

import contextlib
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelswap_engine.backends.adapters import AdapterLayout
from modelswap_engine.lora.config import parse_config
from modelswap_engine.lora.digest import adapter_digest
from modelswap_engine.lora.fit import Fit, check_base, fit
from modelswap_engine.protocol.errors import (
    AdapterLimit,
    IncompatibleAdapter,
    InvalidCheckpoint,
    ModelswapError,
    Refused,
    SourceNotAllowed,
    SourceNotFound,
    UnsupportedAdapter,
    UnsupportedFormat,
)
from modelswap_engine.sources.file import FileSource
from tests.support.adapters import CONFIG, FIELDS, LAYOUT, MODULE, WEIGHTS, matrix, pair, write_adapter
from tests.support.checkpoints import Tensor, pack, safetensors

STEM = f"base_model.model.{MODULE}"


async def fitted(folder: Path, *, layout: AdapterLayout = LAYOUT) -> Fit:
    adapter = await FileSource(roots=[folder.parent], cache=None).open_adapter(folder.as_uri())
    return fit("a", parse_config(adapter.config), adapter.tensors, layout)


def parsed(**fields: Any) -> Any:
    return parse_config(json.dumps(FIELDS | fields).encode())


async def test_a_plain_adapter_fits(tmp_path: Path) -> None:
    found = await fitted(write_adapter(tmp_path / "a"))
    assert [(p.target.name, p.rank, p.scaling) for p in found.pairs] == [(MODULE, 2, 2.0)]
    assert (found.rank, found.nbytes) == (2, 2 * (4 + 6) * 4)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_dora", True), ("bias", "all"), ("bias", "lora_only"), ("modules_to_save", ["lm_head"]),
        ("trainable_token_indices", [1]), ("layer_replication", [[0, 1]]), ("lora_bias", True),
        ("target_parameters", ["mlp.experts.gate_up_proj"]), ("alora_invocation_tokens", [1]),
        ("init_lora_weights", "pissa"), ("init_lora_weights", "olora"), ("init_lora_weights", "loftq"),
        ("init_lora_weights", "lora_ga"), ("use_qalora", True), ("peft_type", "IA3"), ("peft_type", None),
        ("arrow_config", {}), ("a_key_of_tomorrow", True), ("a_key_of_tomorrow", "x"), ("use_bdlora", {"nblocks": 2}),
    ],
)  # fmt: skip
def test_what_is_not_done_here_is_refused_by_its_key(key: str, value: object) -> None:
    with pytest.raises(UnsupportedAdapter) as caught:
        parsed(**{key: value})
    assert caught.value.details["key"] == key
    assert key in caught.value.message
    assert caught.value.advice


@pytest.mark.parametrize(
    ("key", "value"), [("a_key_of_tomorrow", False), ("a_key_of_tomorrow", None), ("fan_in_fan_out", True)]
)
def test_what_asks_for_nothing_passes(key: str, value: object) -> None:
    assert parsed(**{key: value}).rank == 2


@pytest.mark.parametrize(
    "fields",
    [
        {"r": 0}, {"r": -1}, {"r": True}, {"r": 2.0}, {"r": "2"}, {"r": 10**9}, {"lora_alpha": "x"},
        {"lora_alpha": True}, {"lora_alpha": 1e300}, {"rank_pattern": []}, {"rank_pattern": {"q_proj": 0}},
        {"alpha_pattern": {"q_proj": None}}, {"target_modules": []}, {"target_modules": [1]}, {"use_rslora": 1},
        {"layers_pattern": 5}, {"layers_pattern": [5]},
        {"layers_to_transform": ["0"]}, {"layers_to_transform": [-1]}, {"exclude_modules": 3},
    ],
)  # fmt: skip
def test_values_of_the_wrong_kind(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidCheckpoint):
        parsed(**fields)


@pytest.mark.parametrize("key", ["rank_pattern", "alpha_pattern"])
@pytest.mark.parametrize("name", ["(a+)+$", "q_proj|v_proj", ".*", "", "x" * 600, "q proj"])
def test_expressions_are_not_run(key: str, name: str) -> None:
    with pytest.raises(UnsupportedAdapter):
        parsed(**{key: {name: 4}})


def test_an_expression_for_targets_is_not_run_and_the_tensors_decide() -> None:
    assert parsed(target_modules="(a+)+$").targets is None


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"{", b"\xff", b'{"r": NaN, "peft_type": "LORA"}', b'{"r": 1, "r": 2, "peft_type": "LORA"}',
     b"[" * 100_000, b'{"peft_type": "LORA", "r": 1' + b" " * (1 << 20) + b"}"],
)  # fmt: skip
def test_configs_that_are_no_config(data: bytes) -> None:
    with pytest.raises(InvalidCheckpoint):
        parse_config(data)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@given(fields=st.dictionaries(st.sampled_from([*FIELDS, "rank_pattern", "alpha_pattern", "x", "layers_pattern"]), JSON))
def test_any_config_is_read_or_refused_with_a_reason(fields: dict[str, Any]) -> None:
    with contextlib.suppress(InvalidCheckpoint, UnsupportedAdapter):
        config = parse_config(json.dumps({"peft_type": "LORA"} | fields).encode())
        assert math.isfinite(config.scaling_of(MODULE))


@pytest.mark.parametrize(
    ("tensor", "what"),
    [
        (f"{STEM}.lora_magnitude_vector.weight", "DoRA"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", "embedding"),
        (f"{STEM}.lora_B.bias", "bias"),
        (f"{STEM}.bias", "bias"),
        ("base_model.model.lm_head.modules_to_save.weight", "trained module"),
        ("base_model.model.lm_head.weight", "not a matrix"),
        (f"{STEM}.lora_A.default.weight", "not a matrix"),
        ("q_proj.lora_A.weight", "not a matrix"),
    ],
)
async def test_tensors_that_are_no_plain_pair(tensor: str, what: str, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", tensors=pair() | {tensor: matrix(2, 2)})
    with pytest.raises(UnsupportedAdapter, match=what) as caught:
        await fitted(folder)
    assert caught.value.details["tensor"] == tensor


@pytest.mark.parametrize(
    ("module", "kind"),
    [
        ("lm_head", UnsupportedAdapter),
        ("model.layers.0.mlp.experts.0.w1", UnsupportedAdapter),
        ("model.layers.0.mlp.expertsx", IncompatibleAdapter),
        ("model.layers.7.self_attn.q_proj", IncompatibleAdapter),
        (f"{MODULE}.base_layer", IncompatibleAdapter),
    ],
)
async def test_modules_that_cannot_be_changed(module: str, kind: type[Refused], tmp_path: Path) -> None:
    with pytest.raises(kind) as caught:
        await fitted(write_adapter(tmp_path / "a", tensors=pair(module)))
    assert caught.value.details["module"] == module


@pytest.mark.parametrize(
    "tensors",
    [
        pair(inputs=5), pair(outputs=5), pair(rank=3),
        pair() | {f"{STEM}.lora_A.weight": ("F32", (8,), bytes(32))},
        pair() | {f"{STEM}.lora_A.weight": ("F32", (2, 4, 1), bytes(32))},
    ],
)  # fmt: skip
async def test_other_shapes_than_the_base_and_the_config_say(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    with pytest.raises(IncompatibleAdapter) as caught:
        await fitted(write_adapter(tmp_path / "a", tensors=tensors))
    assert "expected" in caught.value.details


async def test_dtypes_that_are_no_numbers_of_a_model(tmp_path: Path) -> None:
    tensors = pair() | {f"{STEM}.lora_A.weight": matrix(2, 4, dtype="I64")}
    with pytest.raises(UnsupportedAdapter):
        await fitted(write_adapter(tmp_path / "a", tensors=tensors))


async def test_half_a_pair(tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in pair().items() if "lora_A" in name}
    with pytest.raises(InvalidCheckpoint, match="lora_B"):
        await fitted(write_adapter(tmp_path / "a", tensors=tensors))


async def test_no_tensors(tmp_path: Path) -> None:
    with pytest.raises(InvalidCheckpoint, match="no tensors"):
        await fitted(write_adapter(tmp_path / "a", tensors={}))


async def test_ranks_above_the_engines_and_engines_without_slots(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", fields=FIELDS | {"r": 16}, tensors=pair(rank=16))
    with pytest.raises(AdapterLimit, match="rank 16") as caught:
        await fitted(folder)
    assert "--lora-max-rank" in caught.value.advice
    with pytest.raises(AdapterLimit, match="serves no adapters: because"):
        await fitted(write_adapter(tmp_path / "b"), layout=AdapterLayout(reason="because"))


@pytest.mark.parametrize(
    "weights",
    [b"", b"\x80\x02.", b"PK\x03\x04" + bytes(100), pack({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 9]}}),
     safetensors(pair())[:-1], pack(b'{"a":1,"a":2}')],
)  # fmt: skip
async def test_weights_that_are_no_safetensors(weights: bytes, tmp_path: Path) -> None:
    with pytest.raises((InvalidCheckpoint, UnsupportedFormat)):
        await fitted(write_adapter(tmp_path / "a", tensors=weights))


async def test_pickles_and_empty_folders(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a")
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")
    with pytest.raises(UnsupportedFormat, match="pickle"):
        await fitted(folder)
    (folder / "adapter_model.bin").unlink()
    with pytest.raises(UnsupportedFormat, match=WEIGHTS):
        await fitted(folder)
    (folder / CONFIG).unlink()
    with pytest.raises(UnsupportedFormat, match=CONFIG):
        await fitted(folder)


async def test_places_outside_the_roots(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    outside = write_adapter(tmp_path / "outside")
    inside.mkdir()
    source = FileSource(roots=[inside], cache=None)
    for uri in (outside.as_uri(), f"file://{inside}/../outside"):
        with pytest.raises(SourceNotAllowed):
            await source.open_adapter(uri)
    with pytest.raises(SourceNotFound):
        await source.open_adapter(f"file://{inside}/nothing")
    folder = write_adapter(inside / "a")
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to(outside / WEIGHTS)
    with pytest.raises(InvalidCheckpoint, match="leaves"):
        await source.open_adapter(folder.as_uri())
    (folder / WEIGHTS).unlink()
    os.mkfifo(folder / WEIGHTS)
    with pytest.raises(InvalidCheckpoint, match="not a regular file"):
        await source.open_adapter(folder.as_uri())


async def test_bytes_that_change_while_they_are_hashed(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a")
    adapter = await FileSource(roots=[tmp_path], cache=None).open_adapter(folder.as_uri())
    (folder / WEIGHTS).write_bytes(safetensors(pair()) + b"")
    with pytest.raises(ModelswapError) as caught:
        await adapter.hash()
    assert caught.value.retryable


def test_another_base_than_the_one_it_is_bound_to() -> None:
    check_base("a", "", "sha256:live")
    check_base("a", "sha256:live", "sha256:live")
    with pytest.raises(IncompatibleAdapter, match="is for base"):
        check_base("a", "sha256:other", "sha256:live")


async def test_the_digest_is_of_what_an_adapter_adds(tmp_path: Path) -> None:
    async def digest(**fields: Any) -> str:
        folder = write_adapter(tmp_path / "a", fields=FIELDS | fields)
        adapter = await FileSource(roots=[tmp_path], cache=None).open_adapter(folder.as_uri())
        return adapter_digest(parse_config(adapter.config), adapter.tensors, await adapter.hash())

    first = await digest()
    assert await digest(peft_version="0.9", base_model_name_or_path="y", lora_dropout=0.1) == first
    assert len({first, await digest(lora_alpha=8), await digest(use_rslora=True), await digest(r=4)}) == 4
