"""LoRA adapters from plain bytes, without torch: every byte and every key chosen by the test."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modelswap_engine.backends.adapters import AdapterLayout, AdapterTarget
from tests.support.checkpoints import Tensor, safetensors

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
MODULE = "model.layers.0.self_attn.q_proj"
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""All linear layers of a block."""
RANK, INPUTS, OUTPUTS = 2, 4, 6
LAYOUT = AdapterLayout(
    slots=2,
    max_rank=8,
    targets=(
        AdapterTarget(name=MODULE, inputs=INPUTS, outputs=OUTPUTS),
        AdapterTarget(name="model.layers.1.self_attn.q_proj", inputs=INPUTS, outputs=OUTPUTS),
    ),
    refused={"lm_head": "it is the output head", "model.layers.0.mlp.experts": "its experts are fused"},
)
FIELDS: dict[str, Any] = {
    "peft_type": "LORA", "r": RANK, "lora_alpha": 4, "target_modules": ["q_proj"], "bias": "none",
    "task_type": "CAUSAL_LM", "peft_version": "0.21.0", "base_model_name_or_path": "x", "use_dora": False,
}  # fmt: skip


def matrix(rows: int, columns: int, *, dtype: str = "F32", fill: int = 0) -> Tensor:
    """Return a tensor of bytes."""
    size = {"F32": 4, "BF16": 2, "F16": 2, "F64": 8, "I64": 8}[dtype]
    return (dtype, (rows, columns), bytes([fill]) * (rows * columns * size))


def pair(module: str = MODULE, *, rank: int = RANK, inputs: int = INPUTS, outputs: int = OUTPUTS) -> dict[str, Tensor]:
    """Return the two tensors of one module."""
    stem = f"base_model.model.{module}"
    return {f"{stem}.lora_A.weight": matrix(rank, inputs), f"{stem}.lora_B.weight": matrix(outputs, rank)}


def write_adapter(
    directory: Path,
    *,
    fields: Mapping[str, Any] | bytes = FIELDS,
    tensors: Mapping[str, Tensor] | bytes | None = None,
) -> Path:
    """Write an adapter's folder and return it; bytes are written as they are."""
    directory.mkdir(parents=True, exist_ok=True)
    config = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    weights = tensors if isinstance(tensors, bytes) else safetensors(pair() if tensors is None else tensors)
    (directory / CONFIG).write_bytes(config)
    (directory / WEIGHTS).write_bytes(weights)
    return directory
