"""Which models may have their weights exchanged inside vLLM: only what was tried, and each refusal has a reason."""

import dataclasses

import pytest

from modelswap_engine.backends.vllm.architectures import TRIED, Setting, refusal

GOOD = Setting(
    architecture="LlamaForCausalLM",
    device="cpu",
    quantization="",
    compiled=False,
    pipeline_ranks=1,
    data_ranks=1,
    speculative=False,
)


@pytest.mark.parametrize("architecture", sorted(TRIED))
def test_what_was_tried_is_allowed(architecture: str) -> None:
    assert refusal(dataclasses.replace(GOOD, architecture=architecture)) == ""


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"architecture": "Qwen3MoeForCausalLM"}, "experts"),
        ({"architecture": "MixtralForCausalLM"}, "experts"),
        ({"architecture": "DeepseekV3ForCausalLM"}, "worked out from the weights"),
        ({"architecture": "SomethingNew"}, "it was not tried"),
        ({"device": "cuda"}, "graphs"),
        ({"quantization": "fp8"}, "fp8"),
        ({"compiled": True}, "--enforce-eager"),
        ({"pipeline_ranks": 2}, "2 pipeline stages"),
        ({"data_ranks": 2}, "2 data parallel"),
        ({"speculative": True}, "draft"),
    ],
)
def test_all_else_is_refused_with_a_reason(change: dict[str, object], reason: str) -> None:
    assert reason in refusal(dataclasses.replace(GOOD, **change))  # type: ignore[arg-type]
