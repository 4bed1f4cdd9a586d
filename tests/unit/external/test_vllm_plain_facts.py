"""Which starts of vLLM may have their weights exchanged over its routes: as one was tried, and no other."""

from typing import Any

import pytest

from modelswap_engine.backends.vllm.plain_facts import Started

LLAMA = "LlamaForCausalLM"


def config(**changes: dict[str, Any] | None) -> dict[str, Any]:
    """Return what vLLM says of the start that was tried, with changes by part."""
    parts: dict[str, Any] = {
        "model_config": {"model": "/models/v1", "dtype": "torch.float32", "quantization": None, "enforce_eager": True},
        "parallel_config": {"world_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1},
        "device_config": {"device": "cpu"},
        "speculative_config": None,
        "lora_config": None,
    }
    return {part: {**(found or {}), **changes[part]} if changes.get(part) else found for part, found in parts.items()}


def test_what_was_tried_is_allowed() -> None:
    started = Started(config(), version="0.32.0")
    assert started.refusal(LLAMA) == ""
    assert (started.dtype, started.loaded_from, started.whole) == ("float32", "/models/v1", True)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_config": {"quantization": "fp8"}}, "quantized"),
        ({"model_config": {"enforce_eager": False}}, "--enforce-eager"),
        ({"parallel_config": {"pipeline_parallel_size": 2}}, "pipeline"),
        ({"parallel_config": {"data_parallel_size": 2}}, "data parallel"),
        ({"device_config": {"device": "cuda:0"}}, "cuda"),
        ({"speculative_config": {"model": "draft"}}, "draft"),
        ({"lora_config": {"max_loras": 1}}, "adapters"),
    ],
)
def test_all_else_is_refused_with_a_reason(changes: dict[str, Any], reason: str) -> None:
    assert reason in Started(config(**changes), version="0.32.0").refusal(LLAMA)


def test_other_models_and_releases_and_silence_are_refused() -> None:
    assert "not tried" in Started(config(), version="0.32.0").refusal("SomethingNew")
    assert "0.33.0" in Started(config(), version="0.33.0").refusal(LLAMA)
    assert "VLLM_SERVER_DEV_MODE" in Started({}, version="0.32.0").refusal(LLAMA)


def test_of_a_split_model_no_checksum_is_that_of_a_file() -> None:
    assert not Started(config(parallel_config={"world_size": 2}), version="0.32.0").whole
