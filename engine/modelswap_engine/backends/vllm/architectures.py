"""Which of vLLM's models may have their weights exchanged inside its process, and why the others may not.

A list of what was tried, not of what should work: a model may derive other state from its weights when it is loaded,
and such state would stay what it was. It imports no vLLM.
"""

import dataclasses
from typing import Final

from modelswap_engine.backends.inprocess.experimental import Experiment, untried

TRIED: Final = frozenset({"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
"""Dense models whose loading copies tensors and nothing else."""

REFUSED: Final = (
    ("Moe", "the experts of a layer are one fused parameter with a form of its own, which is not exchanged yet"),
    ("Mixtral", "the experts of a layer are one fused parameter with a form of its own, which is not exchanged yet"),
    ("DeepseekV", "its attention keeps matrices that are worked out from the weights when they are loaded"),
    ("Mamba", "its layers keep state that is worked out from the weights when they are loaded"),
    ("Jamba", "its layers keep state that is worked out from the weights when they are loaded"),
    ("ConditionalGeneration", "models with more than text were not tried"),
    ("Transformers", "models that run through transformers' own classes were not tried"),
)
"""Part of a class's name, and the reason; the first that fits counts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """How an engine was started, as far as it matters here."""

    architecture: str
    device: str
    quantization: str
    compiled: bool
    pipeline_ranks: int
    data_ranks: int
    speculative: bool
    experiments: frozenset[Experiment] = frozenset()


def refusal(setting: Setting) -> str:
    """Say why weights cannot be exchanged inside this engine; "" when they can."""
    if setting.architecture not in TRIED:
        reason = next((why for part, why in REFUSED if part in setting.architecture), "it was not tried")
        return f"{setting.architecture}: {reason}"
    if setting.device != "cpu" and Experiment.DEVICES not in setting.experiments:
        return untried(f"device {setting.device}: weights on an accelerator", Experiment.DEVICES)
    if setting.quantization:
        return f"quantization {setting.quantization}: weights are put into other forms when they are loaded"
    if setting.compiled and Experiment.GRAPHS not in setting.experiments:
        eager = "compiled code and captured graphs hold on to weights: start vLLM with --enforce-eager"
        return untried(eager, Experiment.GRAPHS)
    if setting.pipeline_ranks > 1:
        return f"{setting.pipeline_ranks} pipeline stages: each rank has other layers, which was not tried"
    if setting.data_ranks > 1:
        return f"{setting.data_ranks} data parallel engines: a call does not reach them all between the same steps"
    if setting.speculative:
        return "speculative decoding: the draft model has weights of its own"
    return ""
