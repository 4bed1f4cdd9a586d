"""Which models may have their weights exchanged inside vLLM: only what was tried, and each refusal has a reason."""

import dataclasses

import pytest

from modelswap_engine.backends.inprocess.experimental import VARIABLE, Experiment, allowed
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
        ({"device": "cuda"}, "MODELSWAP_EXPERIMENTAL=devices"),
        ({"quantization": "fp8"}, "fp8"),
        ({"compiled": True}, "--enforce-eager"),
        ({"pipeline_ranks": 2}, "2 pipeline stages"),
        ({"data_ranks": 2}, "2 data parallel"),
        ({"speculative": True}, "draft"),
    ],
)
def test_all_else_is_refused_with_a_reason(change: dict[str, object], reason: str) -> None:
    assert reason in refusal(dataclasses.replace(GOOD, **change))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "experiment"),
    [({"device": "cuda"}, Experiment.DEVICES), ({"compiled": True}, Experiment.GRAPHS)],
)
def test_what_nobody_has_tried_can_be_asked_for_by_its_name(change: dict[str, object], experiment: Experiment) -> None:
    setting = dataclasses.replace(GOOD, **change)  # type: ignore[arg-type]
    assert f"{VARIABLE}={experiment}" in refusal(setting)
    assert refusal(dataclasses.replace(setting, experiments=frozenset({experiment}))) == ""
    (other,) = {Experiment.DEVICES, Experiment.GRAPHS} - {experiment}
    assert refusal(dataclasses.replace(setting, experiments=frozenset({other}))) != ""


def test_names_of_experiments_are_read_from_the_environment() -> None:
    assert allowed({VARIABLE: " Copy,graphs, nonsense,"}) == {Experiment.COPY, Experiment.GRAPHS}
    assert allowed({}) == frozenset()
