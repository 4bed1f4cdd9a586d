"""Which of SGLang's models may have their weights exchanged inside its process, and why the others may not.

A list of what was tried, not of what should work: a model may derive other state from its weights when it is loaded,
and such state would stay what it was. It imports no SGLang.
"""

import dataclasses
from typing import Final

from modelswap_engine.backends.inprocess.experimental import Experiment, untried

TRIED: Final = frozenset({"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
"""Dense models whose loading copies tensors and nothing else."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """How an engine was started, as far as it matters here."""

    architecture: str
    device: str
    quantization: str
    role: str
    pipeline_ranks: int
    data_ranks: int
    packed: bool
    graphs: bool = False
    experiments: frozenset[Experiment] = frozenset()


def refusal(setting: Setting) -> str:
    """Say why weights cannot be exchanged inside this engine; "" when they can."""
    if setting.architecture not in TRIED:
        return f"{setting.architecture}: it was not tried"
    if setting.role != "target":
        return f"{setting.role}: a draft model has weights that a version does not hold"
    if setting.device != "cpu" and Experiment.DEVICES not in setting.experiments:
        return untried(f"device {setting.device}: weights on an accelerator", Experiment.DEVICES)
    if setting.graphs and Experiment.GRAPHS not in setting.experiments:
        return untried("captured graphs hold on to weights: start SGLang with --disable-cuda-graph", Experiment.GRAPHS)
    if setting.quantization:
        return f"quantization {setting.quantization}: weights are put into other forms when they are loaded"
    if setting.packed:
        return "weights are packed for this processor (AMX) when they are loaded, which is not exchanged yet"
    if setting.pipeline_ranks > 1:
        return f"{setting.pipeline_ranks} pipeline stages: each rank has other layers, which was not tried"
    if setting.data_ranks > 1:
        return f"{setting.data_ranks} data parallel engines: a call does not reach them all between the same steps"
    return ""
