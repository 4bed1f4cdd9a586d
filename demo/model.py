"""`python -m demo.model`: make the demo's checkpoints in the cache, unless they are there already.

| folder | what it is |
|---|---|
| smollm2-1.0 | SmolLM2-135M-Instruct as bf16 safetensors |
| smollm2-1.1 | the same with a last layer trained to begin answers with "Ahoy!" |
| smollm2-1.2-corrupt | a manifest that is right, one bit that is not |
| smollm2-1.2-shape | one tensor of another shape |
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from demo import base, checkpoints, finetune
from demo.console import complain, megabytes, say, step
from demo.folder import is_made, key_of, make
from modelswap_engine.checkpoint.diff import diff
from modelswap_engine.checkpoint.manifest import MANIFEST_FILE, Manifest, decode
from tests.support.cache import cache_root


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One folder and how to make it."""

    folder: Path
    key: str
    write: Callable[[Path], None]


@dataclass(frozen=True, slots=True)
class DemoModels:
    """Where the demo's checkpoints are."""

    base: Path
    tuned: Path
    corrupt: Path
    misshapen: Path

    @classmethod
    def under(cls, root: Path) -> DemoModels:
        """Name the folders of a model cache."""
        return cls(*(root / f"smollm2-{version}" for version in ("1.0", "1.1", "1.2-corrupt", "1.2-shape")))


def manifest_of(folder: Path) -> Manifest:
    """Read the manifest that a checkpoint ships."""
    return decode((folder / MANIFEST_FILE).read_bytes())


def plan(models: DemoModels) -> tuple[Checkpoint, ...]:
    """Return the checkpoints in the order in which they are made; each key covers those it is made from."""
    first = key_of(Path(base.__file__), importlib.metadata.version(base.PACKAGE))
    tuned = key_of(first, Path(finetune.__file__))
    bad = key_of(tuned, Path(checkpoints.__file__))
    return (
        Checkpoint(models.base, first, _write_base),
        Checkpoint(
            models.tuned, tuned, lambda folder: checkpoints.write_tuned(folder, base=models.base, report=_progress)
        ),
        Checkpoint(
            models.corrupt,
            bad,
            lambda folder: checkpoints.write_corrupt(folder, base=models.base, tuned=models.tuned),
        ),
        Checkpoint(models.misshapen, bad, lambda folder: checkpoints.write_misshapen(folder, base=models.base)),
    )


def _write_base(folder: Path) -> None:
    base.write_base(folder)
    checkpoints.write_manifest(folder)


def ensure_models(root: Path | None = None) -> DemoModels:
    """Make what is missing and return where it all is.

    Raises:
        RuntimeError: version 1.1 is not the base with some tensors changed.
    """
    models = DemoModels.under(root or cache_root() / "models")
    made = False
    for checkpoint in plan(models):
        if is_made(checkpoint.folder, checkpoint.key):
            continue
        made = True
        with step(f"making {checkpoint.folder.name}"):
            make(checkpoint.folder, checkpoint.key, checkpoint.write)
    if made:
        _hold_against_each_other(models)
    return models


def _hold_against_each_other(models: DemoModels) -> None:
    old, new = manifest_of(models.base), manifest_of(models.tuned)
    found = diff(old, new)
    if found.added or found.removed or found.reshaped or found.retyped or found.side_changed or not found.changed:
        raise RuntimeError(
            f"{models.tuned} differs from {models.base} in more than the values of some tensors: {found}"
        )
    changed = sum(new.by_name[name].nbytes for name in found.changed)
    say(
        f"1.1 differs from 1.0 in {len(found.changed)} of {len(new.tensors)} tensors, "
        f"{megabytes(changed)} of {megabytes(new.total_bytes)}"
    )


def _progress(text: str) -> None:
    say(text)


def main() -> int:
    """Make the checkpoints and name them."""
    try:
        models = ensure_models()
    except (OSError, RuntimeError, ImportError) as error:
        complain(str(error), advice="run `make env`; if that changes nothing, remove the models folder of the cache")
        return 1
    for folder in (models.base, models.tuned, models.corrupt, models.misshapen):
        say(f"{folder}  {manifest_of(folder).digest}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
