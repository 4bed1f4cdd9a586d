"""Tiny safetensors checkpoints from plain bytes: no torch, no numpy, every byte chosen by the test."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Tensor = tuple[str, tuple[int, ...], bytes]
"""dtype, shape, data."""

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4}
TENSORS: dict[str, Tensor] = {
    "a.weight": ("BF16", (2, 3), bytes(range(12))),
    "b.weight": ("F32", (2,), bytes(range(100, 108))),
    "c.bias": ("I64", (), bytes(8)),
}


def pack(header: object, data: bytes = b"") -> bytes:
    """Return a safetensors file with this header, whatever it says; a header of bytes is taken as it is."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def safetensors(tensors: Mapping[str, Tensor], *, metadata: Mapping[str, str] | None = None) -> bytes:
    """Return a valid safetensors file."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    data = b""
    for name, (dtype, shape, content) in tensors.items():
        offsets = [len(data), len(data) + len(content)]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
        data += content
    return pack(header, data)


def write_checkpoint(
    directory: Path,
    tensors: Mapping[str, Tensor] = TENSORS,
    *,
    side_files: Mapping[str, bytes | dict[str, Any]] | None = None,
    shards: int = 1,
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """Write a checkpoint folder and return it; ``shards`` > 1 spreads the tensors in turn and adds the index."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in ({"config.json": CONFIG} if side_files is None else side_files).items():
        (directory / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    if shards == 1:
        (directory / SINGLE).write_bytes(safetensors(tensors, metadata=metadata))
        return directory
    weight_map: dict[str, str] = {}
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in list(tensors)[number::shards]}
        (directory / file).write_bytes(safetensors(part, metadata=metadata))
        weight_map |= dict.fromkeys(part, file)
    write_index(directory, weight_map)
    return directory


def write_index(directory: Path, weight_map: object) -> None:
    """Write an index that says this, true or not."""
    (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}))
