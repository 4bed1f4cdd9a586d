"""Which models may have their weights exchanged inside SGLang: only what was tried, and each refusal has a reason."""

import dataclasses

import pytest

from modelswap_engine.backends.inprocess.experimental import VARIABLE, Experiment
from modelswap_engine.backends.sglang.architectures import TRIED, Setting, refusal

GOOD = Setting(
    architecture="LlamaForCausalLM",
    device="cpu",
    quantization="",
    role="target",
    pipeline_ranks=1,
    data_ranks=1,
    packed=False,
)


@pytest.mark.parametrize("architecture", sorted(TRIED))
def test_what_was_tried_is_allowed(architecture: str) -> None:
    assert refusal(dataclasses.replace(GOOD, architecture=architecture)) == ""


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"architecture": "SomethingNew"}, "it was not tried"),
        ({"role": "draft"}, "draft"),
        ({"quantization": "fp8"}, "fp8"),
        ({"packed": True}, "AMX"),
        ({"pipeline_ranks": 2}, "2 pipeline stages"),
        ({"data_ranks": 2}, "2 data parallel"),
    ],
)
def test_all_else_is_refused_with_a_reason(change: dict[str, object], reason: str) -> None:
    assert reason in refusal(dataclasses.replace(GOOD, **change))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "experiment"), [({"device": "cuda"}, Experiment.DEVICES), ({"graphs": True}, Experiment.GRAPHS)]
)
def test_what_nobody_has_tried_can_be_asked_for_by_its_name(change: dict[str, object], experiment: Experiment) -> None:
    setting = dataclasses.replace(GOOD, **change)  # type: ignore[arg-type]
    assert f"{VARIABLE}={experiment}" in refusal(setting)
    assert refusal(dataclasses.replace(setting, experiments=frozenset({experiment}))) == ""
