"""From a folder to its manifest: computed from the bytes, or the shipped one held against the headers."""

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from modelswap_engine.checkpoint.canonical import architecture_of, side_file
from modelswap_engine.checkpoint.crew import Progress
from modelswap_engine.checkpoint.hashing import hash_tensors
from modelswap_engine.checkpoint.layout import Contents, Read, read_contents
from modelswap_engine.checkpoint.manifest import Manifest, SideFile, TensorEntry, make_manifest
from modelswap_engine.protocol.errors import ManifestMismatch

_REBUILD = "write it again with: modelswap manifest build DIR"


def build_manifest(
    directory: Path,
    *,
    roots: Sequence[Path] | None = None,
    progress: Progress | None = None,
    stop: threading.Event | None = None,
) -> Manifest:
    """Read, validate and hash a local checkpoint.

    Args:
        directory: the folder.
        roots: folders that links in it may lead to; the folder itself when None.
        progress: told (bytes done, bytes in all), from any thread but never from two at once.
        stop: set from elsewhere, it ends the work.

    Raises:
        Refused: the folder holds no valid safetensors checkpoint; the message names file and tensor.
        SourceUnreadable, SourceChanged, Cancelled: not now.
    """
    directory = directory.resolve()
    allowed = tuple(root.resolve() for root in roots) if roots is not None else (directory,)
    contents = read_contents(directory, roots=allowed)
    return hash_contents(contents, roots=allowed, progress=progress, stop=stop)


def hash_contents(
    contents: Contents,
    *,
    roots: Sequence[Path],
    progress: Progress | None = None,
    stop: threading.Event | None = None,
) -> Manifest:
    """Hash the tensors of a folder whose headers were read.

    Raises:
        SourceUnreadable, SourceChanged, Cancelled: not now.
    """
    hashes = hash_tensors(
        contents.tensors.values(),
        directory=contents.directory,
        roots=roots,
        stamps=contents.stamps,
        progress=progress,
        stop=stop,
    )
    return with_hashes(contents, hashes)


def with_hashes(contents: Read, hashes: Mapping[str, str]) -> Manifest:
    """Return the manifest of what was read, the hashes of its tensors being known (name → sha256)."""
    tensors = {name: msgspec.structs.replace(entry, sha256=hashes[name]) for name, entry in contents.tensors.items()}
    return make_manifest(tensors, side_entries(contents), architecture=architecture_of(contents.side_files))


def side_entries(contents: Read) -> dict[str, SideFile]:
    """Return the manifest entries of side files.

    Raises:
        InvalidCheckpoint: one of them is not valid JSON.
    """
    return {name: side_file(name, data) for name, data in contents.side_files.items()}


def check_shipped(manifest: Manifest, contents: Read, *, file: str) -> None:
    """Hold a shipped manifest against the headers and side files; only tensor hashes are taken on trust.

    Raises:
        ManifestMismatch: it describes another checkpoint; the message names the first difference.
    """
    check_tensors(manifest, contents, file=file)
    _compare_side_files(manifest, contents, file=file)


def check_tensors(manifest: Manifest, contents: Read, *, file: str) -> None:
    """Hold the tensors of a manifest against the headers.

    Raises:
        ManifestMismatch: another tensor, shape, dtype, size or place.
    """
    for name in sorted(manifest.by_name.keys() | contents.tensors.keys()):
        listed, found = manifest.by_name.get(name), contents.tensors.get(name)
        if listed is None or found is None:
            where = "is not in the manifest" if listed is None else "is not in the files"
            raise ManifestMismatch(
                f"{file}: tensor {name!r} {where}", advice=_REBUILD, details={"file": file, "tensor": name}
            )
        _compare(listed, found, file=file)


def _compare(listed: TensorEntry, found: TensorEntry, *, file: str) -> None:
    for field in ("dtype", "shape", "nbytes", "file", "offset"):
        stated, actual = getattr(listed, field), getattr(found, field)
        if stated != actual:
            raise ManifestMismatch(
                f"{file}: tensor {found.name!r}: {field} {stated!r} is stated, {found.file} says {actual!r}",
                advice=_REBUILD,
                details={"file": file, "tensor": found.name, "expected": str(stated), "actual": str(actual)},
            )


def _compare_side_files(manifest: Manifest, contents: Read, *, file: str) -> None:
    listed = {side.name: side for side in manifest.side_files}
    found = side_entries(contents)
    for name in sorted(listed.keys() | found.keys()):
        if listed.get(name) != found.get(name):
            raise ManifestMismatch(
                f"{file}: side file {name!r} is not the one that the manifest describes",
                advice=_REBUILD,
                details={"file": file, "sideFile": name},
            )
    architecture = architecture_of(contents.side_files)
    if manifest.architecture != architecture:
        raise ManifestMismatch(
            f"{file}: architecture {manifest.architecture!r} is stated, config.json says {architecture!r}",
            advice=_REBUILD,
            details={"file": file, "expected": manifest.architecture, "actual": architecture},
        )
