"""Orders to materialise from real checkpoint folders, and what lies under a materialiser's root."""

from pathlib import Path

from modelswap_engine.backends.external.materialise import CURRENT, PREVIOUS
from modelswap_engine.backends.port import Load
from modelswap_engine.checkpoint.build import build_manifest
from modelswap_engine.sources.file import FileSource
from tests.support.checkpoints import TENSORS, Tensor, write_checkpoint

SIDE = {"config.json": {"architectures": ["LlamaForCausalLM"], "hidden_size": 4}, "merges.txt": b"a b"}


def content(number: int) -> dict[str, Tensor]:
    """Return tensors that only one version has."""
    return {**TENSORS, "b.weight": ("F32", (2,), bytes([number] * 8)), "empty": ("F32", (0,), b"")}


def publish(models: Path, number: int, *, shards: int = 1) -> Path:
    """Write the checkpoint of a version and return its folder."""
    return write_checkpoint(models / f"m-{number}", content(number), side_files=SIDE, shards=shards)


async def order(folder: Path, scratch: Path) -> Load:
    """Resolve a checkpoint folder and say "load all of it", as the coordinator does."""
    resolved = await FileSource(roots=[folder.parent], cache=None).resolve(folder.as_uri())
    directory = scratch / "sides" / resolved.manifest.digest.removeprefix("sha256:")
    await resolved.copy_side_files(directory)
    return Load(
        operation_id="load",
        digest=resolved.manifest.digest,
        directory=str(directory),
        tensors=tuple(resolved.range_of(entry.name) for entry in resolved.manifest.tensors),
    )


def digest_in(folder: Path) -> str:
    """Read a folder as a checkpoint and return what it holds, all bytes hashed."""
    return build_manifest(folder).digest


def folders(root: Path) -> set[str]:
    """Return the digests whose folders are there under their names."""
    return {f"sha256:{entry.name}" for entry in (root / "checkpoints").iterdir() if not entry.name.startswith(".")}


def leftovers(root: Path) -> list[str]:
    """Return what a killed process has left: drafts, and folders that were being removed."""
    beside = [entry.name for entry in root.iterdir() if entry.name not in {"checkpoints", CURRENT, PREVIOUS}]
    return beside + [entry.name for entry in (root / "checkpoints").iterdir() if entry.name.startswith(".")]
