"""Random Llama models of any size for the bench, with hashes, made once: the values do not matter, the sizes do.

Two shapes: ``WIDE`` makes sizes up to many gigabytes of equal tensors, ``SMALL`` is that of the demo's 135M model, so
that a step takes as long as one of the real model.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

import numpy as np
import numpy.typing as npt

from demo.folder import key_of, make
from modelswap_engine.backends.port import TensorRange
from tests.support.cache import cache_root

_FILE: Final = "model.safetensors"
MOST_CHANGED: Final = 256
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a model is made of."""

    name: str
    hidden: int
    inner: int
    vocabulary: int
    heads: int
    kv_heads: int
    tied: bool

    def layer(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Return the tensors of one layer."""
        kv = self.hidden * self.kv_heads // self.heads
        return (
            ("input_layernorm.weight", (self.hidden,)),
            ("mlp.down_proj.weight", (self.hidden, self.inner)),
            ("mlp.gate_proj.weight", (self.inner, self.hidden)),
            ("mlp.up_proj.weight", (self.inner, self.hidden)),
            ("post_attention_layernorm.weight", (self.hidden,)),
            ("self_attn.k_proj.weight", (kv, self.hidden)),
            ("self_attn.o_proj.weight", (self.hidden, self.hidden)),
            ("self_attn.q_proj.weight", (self.hidden, self.hidden)),
            ("self_attn.v_proj.weight", (kv, self.hidden)),
        )

    def tensors(self, layers: int) -> Shapes:
        """Return all tensors of a model."""
        shapes: Shapes = {} if self.tied else {"lm_head.weight": (self.vocabulary, self.hidden)}
        shapes["model.embed_tokens.weight"] = (self.vocabulary, self.hidden)
        for number in range(layers):
            shapes |= {f"model.layers.{number}.{name}": shape for name, shape in self.layer()}
        return shapes | {"model.norm.weight": (self.hidden,)}


WIDE: Final = Shape(name="wide", hidden=1024, inner=2816, vocabulary=4096, heads=16, kv_heads=16, tied=False)
SMALL: Final = Shape(name="small", hidden=576, inner=1536, vocabulary=49152, heads=9, kv_heads=3, tied=True)
SMALL_LAYERS: Final = 30


@dataclass(frozen=True, slots=True)
class BenchModel:
    """A checkpoint, and the tensors of a second one that differ, those that change first in front.

    Both are folders as well, ``base`` and ``other`` in ``folder``; the second one is whole where it was asked for.
    """

    shape: Shape
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
    names = [
        f"model.layers.{layer}.self_attn.{name}_proj.weight" for layer in range(layers - 1, -1, -1) for name in "qkvo"
    ]
    return names[:MOST_CHANGED]


def layers_for(nbytes: int) -> int:
    """Return the number of layers of the wide shape that comes nearest to a size."""
    layer = 2 * sum(math.prod(shape) for _, shape in WIDE.layer())
    rest = 2 * (2 * WIDE.vocabulary * WIDE.hidden + WIDE.hidden)
    return max(2, round((nbytes - rest) / layer))


def ensure_model(nbytes: int) -> BenchModel:
    """Make a wide model of about a size unless it is in the cache."""
    return ensure(WIDE, layers_for(nbytes), whole=False)


def ensure(shape: Shape, layers: int, *, whole: bool) -> BenchModel:
    """Write the two checkpoints unless they are in the cache, and read where their tensors lie.

    Args:
        shape: of the model.
        layers: of the model.
        whole: the second one is a checkpoint that can be served, and differs in its last three layers.
    """
    folder = model_folder() / f"bench-{shape.name}-{layers}{'-pair' if whole else ''}"
    changed = changeable(layers)[: 12 if whole else None]

    def build(unfinished: Path) -> None:
        shapes = shape.tensors(layers)
        _write(unfinished, "base", shapes, seed=0)
        _write(unfinished, "other", shapes if whole else {name: shapes[name] for name in changed}, seed=1, only=changed)
        for place in (unfinished, unfinished / "base", unfinished / "other"):
            (place / "config.json").write_text(json.dumps(_config(shape, layers), indent=1))

    key = key_of(Path(__file__), *(str(value) for value in dataclasses.astuple(shape)), str(layers), str(whole))
    make(folder, key, build)
    other = _ranges(folder, "other")
    return BenchModel(shape, layers, _ranges(folder, "base"), {name: other[name] for name in changed}, folder)


def model_folder() -> Path:
    """Return where bench models are kept."""
    return cache_root() / "models"


def _config(shape: Shape, layers: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": shape.tied,
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


def _write(folder: Path, name: str, shapes: Shapes, *, seed: int, only: Collection[str] = ()) -> None:
    """Write a checkpoint, and its hashes beside it; with ``only``, the other tensors are those of seed 0."""
    (folder / name).mkdir()
    hashes: dict[str, str] = {}
    with (folder / name / _FILE).open("wb") as file:
        _write_header(file, shapes)
        for tensor, data in _values(shapes, seed=seed, only=only):
            hashes[tensor] = hashlib.sha256(data).hexdigest()
            file.write(data)
    (folder / f"{name}.json").write_text(json.dumps(hashes))


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


def _values(shapes: Shapes, *, seed: int, only: Collection[str]) -> Iterator[tuple[str, bytes]]:
    """Yield bf16 values of about the usual spread: one random block per shape, made different by its low bits."""
    blocks: dict[tuple[tuple[int, ...], int], npt.NDArray[np.uint16]] = {}
    for number, (name, shape) in enumerate(shapes.items()):
        kind = shape, seed if not only or name in only else 0
        if kind not in blocks:
            random = np.random.default_rng([*kind[0], kind[1]])
            values = np.ones(shape, np.float32) if len(shape) == 1 else random.standard_normal(shape, np.float32) * 0.02
            blocks[kind] = (values.view(np.uint32) >> 16).astype(np.uint16)
        yield name, (blocks[kind] ^ np.uint16(number % 8)).tobytes()


def _ranges(folder: Path, name: str) -> dict[str, TensorRange]:
    file = folder / name / _FILE
    hashes = json.loads((folder / f"{name}.json").read_text())
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
