"""The versions that are made from the demo's base model, each as a function that fills an empty folder.

Imports torch and safetensors when a function runs; refuses to know when a folder has to be made again.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from modelswap_engine.checkpoint.build import build_manifest
from modelswap_engine.checkpoint.manifest import MANIFEST_FILE, encode

if TYPE_CHECKING:
    import torch

WEIGHTS: Final = "model.safetensors"
_ODD_SHAPED: Final = "mlp.down_proj.weight"


def write_tuned(folder: Path, *, base: Path, report: Callable[[str], None]) -> None:
    """Write version 1.1: the base with a last layer that was trained for less than a minute."""
    from demo.finetune import trained_layer

    _write_changed(folder, base=base, changed=trained_layer(base, report=report))


def write_corrupt(folder: Path, *, base: Path, tuned: Path) -> None:
    """Write a version whose manifest is right and whose bytes are not: one bit of a changed tensor is flipped.

    Its last layer lies halfway between the two others', so that its digest is neither's.
    """
    old, new = _tensors(base), _tensors(tuned)
    changed = {
        name: ((old[name].float() + tensor.float()) / 2).to(tensor.dtype)
        for name, tensor in new.items()
        if not tensor.equal(old[name])
    }
    _write_changed(folder, base=base, changed=changed)
    _flip_bit(folder / WEIGHTS, max(changed))


def write_misshapen(folder: Path, *, base: Path) -> None:
    """Write a version in which the last layer's down projection lacks a column."""
    name = max((name for name in _tensors(base) if name.endswith(_ODD_SHAPED)), key=_layer_number)
    _write_changed(folder, base=base, changed={name: _tensors(base)[name][:, :-1].contiguous()})


def write_manifest(folder: Path) -> None:
    """Do what ``modelswap manifest build`` does."""
    (folder / MANIFEST_FILE).write_bytes(encode(build_manifest(folder)))


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / WEIGHTS)


def _write_changed(folder: Path, *, base: Path, changed: dict[str, torch.Tensor]) -> None:
    """Write the base with some tensors replaced; all others keep their bytes."""
    from safetensors.torch import save_file

    for file in base.iterdir():
        if file.suffix in {".json", ".jinja"} and file.name != MANIFEST_FILE:
            shutil.copyfile(file, folder / file.name)
    tensors = _tensors(base)
    if unknown := changed.keys() - tensors.keys():
        raise KeyError(f"not in {base}: {sorted(unknown)}")
    save_file(tensors | changed, folder / WEIGHTS, {"format": "pt"})
    write_manifest(folder)


def _layer_number(name: str) -> int:
    return int(name.split(".layers.")[1].split(".")[0])


def _flip_bit(file: Path, name: str) -> None:
    with file.open("r+b") as handle:
        (length,) = struct.unpack("<Q", handle.read(8))
        begin, _ = json.loads(handle.read(length))[name]["data_offsets"]
        where = 8 + length + begin
        handle.seek(where)
        (value,) = handle.read(1)
        handle.seek(where)
        handle.write(bytes([value ^ 1]))
