"""What `modelswap diff` of two checkpoints with manifests takes, from the shell's prompt to its answer.

The weights are files with holes and the hashes are made up: the command reads headers and manifests, nothing else.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from bench.turns import Budget
from modelswap_engine.checkpoint import manifest as manifests
from modelswap_engine.checkpoint.canonical import side_file
from modelswap_engine.checkpoint.layout import SINGLE_FILE
from modelswap_engine.checkpoint.manifest import MANIFEST_FILE, TensorEntry, make_manifest

_WIDTH: Final = 2048
_LAYERS: Final = 30
_SHAPES: Final[Mapping[str, tuple[int, ...]]] = {
    **{f"self_attn.{part}_proj.weight": (_WIDTH, _WIDTH) for part in "qkvo"},
    **{f"mlp.{part}_proj.weight": (4 * _WIDTH, _WIDTH) for part in ("gate", "up", "down")},
    "input_layernorm.weight": (_WIDTH,),
}
_CONFIG: Final = json.dumps({"architectures": ["LlamaForCausalLM"]}).encode()


class DiffRow(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Median seconds of the whole command, over ``turns`` turns; ``nbytes`` of each of the two checkpoints."""

    seconds: float
    nbytes: int
    tensors: int
    turns: int


def measure_diff(budget: Budget, *, seconds: float = 6.0) -> DiffRow:
    """Time the command on two checkpoints that differ in one kind of tensor."""
    with tempfile.TemporaryDirectory(prefix="modelswap-diff-") as place:
        old, new = Path(place, "a"), Path(place, "b")
        nbytes = _write(old, changed="")
        _write(new, changed="q_proj")
        command = [sys.executable, "-m", "modelswap_engine", "diff", str(old), str(new)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        taken = []
        for _ in budget.turns(most=9, seconds=seconds, least=3):
            started = time.monotonic()
            subprocess.run(command, check=True, capture_output=True, env=environment)
            taken.append(time.monotonic() - started)
    return DiffRow(seconds=statistics.median(taken), nbytes=nbytes, tensors=_LAYERS * len(_SHAPES), turns=len(taken))


def _write(folder: Path, *, changed: str) -> int:
    """Write a checkpoint whose manifest says that tensors of this name are others; return its bytes."""
    folder.mkdir()
    header: dict[str, dict[str, object]] = {}
    entries: dict[str, TensorEntry] = {}
    end = 0
    for layer in range(_LAYERS):
        for kind, shape in _SHAPES.items():
            name = f"model.layers.{layer}.{kind}"
            nbytes = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + nbytes]}
            mark = f"{name} {bool(changed) and changed in name}"
            entries[name] = TensorEntry(
                name=name,
                dtype="BF16",
                shape=shape,
                nbytes=nbytes,
                file=SINGLE_FILE,
                offset=end,
                sha256=hashlib.sha256(mark.encode()).hexdigest(),
            )
            end += nbytes
    text = json.dumps(header).encode()
    start = 8 + len(text)
    with (folder / SINGLE_FILE).open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        stream.truncate(start + end)
    (folder / "config.json").write_bytes(_CONFIG)
    tensors = {name: msgspec.structs.replace(entry, offset=start + entry.offset) for name, entry in entries.items()}
    sides = {"config.json": side_file("config.json", _CONFIG)}
    manifest = make_manifest(tensors, sides, architecture="LlamaForCausalLM")
    (folder / MANIFEST_FILE).write_bytes(manifests.encode(manifest))
    return end
