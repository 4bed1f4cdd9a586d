"""Random Llama-like checkpoints of a wanted size, written straight to disk: no torch, one tensor in memory at a time.

All sizes have layers of the same shape and differ in their number, so that k changed tensors are the same bytes in
each. Knows nothing of engines.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

import numpy as np
import numpy.typing as npt

from demo.folder import key_of, make
from modelswap_engine.backends.port import TensorRange
from tests.support.cache import cache_root

HIDDEN: Final = 1024
_INNER: Final = 2816
VOCABULARY: Final = 4096
_FILE: Final = "model.safetensors"
_HASHES: Final = "hashes.json"
_LAYER: Final = (
    ("input_layernorm.weight", (HIDDEN,)),
    ("mlp.down_proj.weight", (HIDDEN, _INNER)),
    ("mlp.gate_proj.weight", (_INNER, HIDDEN)),
    ("mlp.up_proj.weight", (_INNER, HIDDEN)),
    ("post_attention_layernorm.weight", (HIDDEN,)),
    ("self_attn.k_proj.weight", (HIDDEN, HIDDEN)),
    ("self_attn.o_proj.weight", (HIDDEN, HIDDEN)),
    ("self_attn.q_proj.weight", (HIDDEN, HIDDEN)),
    ("self_attn.v_proj.weight", (HIDDEN, HIDDEN)),
)
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class BenchModel:
    """A checkpoint, and a second one that changes the first tensors of ``order`` as far as it is asked for."""

    layers: int
    base: dict[str, TensorRange]
    other: dict[str, TensorRange]
    folder: Path

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(item.nbytes for item in self.base.values())


def changeable(layers: int) -> list[str]:
    """Return tensors of equal size, last layer first; the first k of them are what k changed tensors means."""
    return [
        f"model.layers.{layer}.self_attn.{name}_proj.weight" for layer in range(layers - 1, -1, -1) for name in "qkvo"
    ]


def layers_for(nbytes: int) -> int:
    """Return the number of layers that comes nearest to a size."""
    layer = 2 * sum(math.prod(shape) for _, shape in _LAYER)
    rest = 2 * (2 * VOCABULARY * HIDDEN + HIDDEN)
    return max(2, round((nbytes - rest) / layer))


def ensure_model(nbytes: int) -> BenchModel:
    """Write the two checkpoints unless they are in the cache, and read where their tensors lie."""
    layers = layers_for(nbytes)
    folder = model_folder() / f"bench-{layers}-layers"

    def build(unfinished: Path) -> None:
        (unfinished / "config.json").write_text(json.dumps(_config(layers), indent=1))
        _write(unfinished / "base", _shapes(layers), seed=0)
        shapes = _shapes(layers)
        _write(unfinished / "other", {name: shapes[name] for name in changeable(layers)}, seed=1)

    make(folder, key_of(Path(__file__), str(layers)), build)
    return BenchModel(layers, _ranges(folder / "base"), _ranges(folder / "other"), folder)


def model_folder() -> Path:
    """Return where bench models are kept."""
    return cache_root() / "models"


def _config(layers: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": _INNER,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


def _shapes(layers: int) -> Shapes:
    shapes: Shapes = {"lm_head.weight": (VOCABULARY, HIDDEN), "model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for number in range(layers):
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in _LAYER}
    return shapes | {"model.norm.weight": (HIDDEN,)}


def _write(folder: Path, shapes: Shapes, *, seed: int) -> None:
    folder.mkdir()
    hashes: dict[str, str] = {}
    with (folder / _FILE).open("wb") as file:
        _write_header(file, shapes)
        for number, (name, data) in enumerate(_values(shapes, seed=seed)):
            hashes[name] = hashlib.sha256(data).hexdigest()
            file.write(data)
            if number % 64 == 0:
                file.flush()
    (folder / _HASHES).write_text(json.dumps(hashes))


def _write_header(file: IO[bytes], shapes: Shapes) -> None:
    header: dict[str, object] = {}
    position = 0
    for name, shape in shapes.items():
        end = position + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)


def _values(shapes: Shapes, *, seed: int) -> Iterator[tuple[str, bytes]]:
    """Yield bf16 values of about the usual spread: one random block per shape, made different by its low bits."""
    random = np.random.default_rng(seed)
    blocks: dict[tuple[int, ...], npt.NDArray[np.uint16]] = {}
    for number, (name, shape) in enumerate(shapes.items()):
        if shape not in blocks:
            values = np.ones(shape, np.float32) if len(shape) == 1 else random.standard_normal(shape, np.float32) * 0.02
            blocks[shape] = (values.view(np.uint32) >> 16).astype(np.uint16)
        yield name, (blocks[shape] ^ np.uint16(number % 8)).tobytes()


def _ranges(folder: Path) -> dict[str, TensorRange]:
    file = folder / _FILE
    hashes = json.loads((folder / _HASHES).read_text())
    with file.open("rb") as handle:
        (length,) = struct.unpack("<Q", handle.read(8))
        header = json.loads(handle.read(length))
    return {
        name: TensorRange(
            name=name,
            dtype=entry["dtype"],
            shape=tuple(entry["shape"]),
            path=str(file),
            offset=8 + length + entry["data_offsets"][0],
            nbytes=entry["data_offsets"][1] - entry["data_offsets"][0],
            sha256=hashes[name],
        )
        for name, entry in header.items()
    }
