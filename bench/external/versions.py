"""Three versions of a model for real engines: a base, one with a tenth of its layers changed, one with all tensors.

A changed tensor has the lowest bit of each of its values flipped: another tensor, as finite as before, and made as fast
as a file is copied. Refuses to know engines.
"""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from bench.models import ensure_model, model_folder
from demo.checkpoints import WEIGHTS, write_manifest
from demo.folder import key_of, make
from demo.model import ensure_models, manifest_of
from modelswap_engine.backends.port import Stage, TensorRange
from modelswap_engine.checkpoint.manifest import MANIFEST_FILE

_VALUE_BYTES: Final = 2
_TOKENIZER: Final = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """Folders of whole checkpoints with manifests."""

    name: str
    base: Path
    tenth: Path
    whole: Path

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors of one version."""
        return manifest_of(self.base).total_bytes

    def order(self, folder: Path, *, operation_id: str) -> Stage:
        """Return the order to stage all tensors of a version."""
        manifest = manifest_of(folder)
        return Stage(
            operation_id=operation_id,
            digest=manifest.digest,
            directory=str(folder),
            tensors=tuple(
                TensorRange(
                    name=item.name,
                    dtype=item.dtype,
                    shape=item.shape,
                    path=str(folder / item.file),
                    offset=item.offset,
                    nbytes=item.nbytes,
                    sha256=item.sha256,
                )
                for item in manifest.tensors
            ),
        )

    def changed_bytes(self, folder: Path) -> int:
        """Return the bytes of the tensors in which a version differs from the base."""
        base = manifest_of(self.base).by_name
        return sum(item.nbytes for item in manifest_of(folder).tensors if item.sha256 != base[item.name].sha256)


def small() -> Versions:
    """Return versions of the demo's model, SmolLM2-135M."""
    return _versions("SmolLM2-135M", ensure_models().base)


def random(nbytes: int) -> Versions:
    """Return versions of a random Llama of about a size. Its tokenizer is the demo's: engines want one."""
    model, tokens = ensure_model(nbytes), ensure_models().base
    folder = model_folder() / f"{model.folder.name}-served"

    def build(unfinished: Path) -> None:
        for file in (model.folder / "base").iterdir():
            shutil.copyfile(file, unfinished / (WEIGHTS if file.suffix == ".safetensors" else file.name))
        for name in _TOKENIZER:
            if (tokens / name).exists():
                shutil.copyfile(tokens / name, unfinished / name)
        write_manifest(unfinished)

    make(folder, key_of(Path(__file__), str(model.folder.name)), build)
    return _versions(f"random Llama of {model.layers} layers", folder)


def _versions(name: str, base: Path) -> Versions:
    manifest = manifest_of(base)
    layers = json.loads((base / "config.json").read_text())["num_hidden_layers"]
    last = {f"layers.{number}." for number in range(layers - math.ceil(layers / 10), layers)}
    tenth = {item.name for item in manifest.tensors if any(layer in item.name for layer in last)}
    return Versions(
        name=name,
        base=base,
        tenth=_flipped(base, "tenth", tenth),
        whole=_flipped(base, "whole", {item.name for item in manifest.tensors}),
    )


def _flipped(base: Path, what: str, names: set[str]) -> Path:
    folder = model_folder() / f"bench-{base.name.removeprefix('bench-')}-{what}"

    def build(unfinished: Path) -> None:
        for file in base.iterdir():
            if file.is_file() and file.name != MANIFEST_FILE and not file.name.startswith("."):
                shutil.copyfile(file, unfinished / file.name)
        for item in manifest_of(base).tensors:
            if item.name in names:
                values = np.memmap(
                    unfinished / item.file,
                    np.uint16,
                    mode="r+",
                    offset=item.offset,
                    shape=(item.nbytes // _VALUE_BYTES,),
                )
                values ^= 1
                values.flush()
        write_manifest(unfinished)

    make(folder, key_of(Path(__file__), base / MANIFEST_FILE), build)
    return folder
