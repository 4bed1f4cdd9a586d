"""Writing the side files of a version to a folder that engines and tokenizers read: all of them, or none."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from modelswap_engine.checkpoint.canonical import side_file
from modelswap_engine.checkpoint.manifest import Manifest, SideFile
from modelswap_engine.protocol.errors import InvalidCheckpoint, SourceUnreadable


def materialise(destination: Path, manifest: Manifest, contents: Mapping[str, bytes]) -> None:
    """Make a read-only folder with exactly the side files of a manifest; one that means the same already is left alone.

    Args:
        destination: the folder.
        manifest: says what they must be.
        contents: name → bytes, verified.

    Raises:
        SourceUnreadable: the disk does not take it.
    """
    try:
        if not (destination.is_dir() and _holds(destination, manifest)):
            _write_all(destination, contents)
    except OSError as error:
        raise SourceUnreadable(
            f"{destination}: cannot write the side files: {error.strerror or error}",
            advice="check that the state directory is writable and has space",
        ) from None


def _holds(directory: Path, manifest: Manifest) -> bool:
    # By meaning: another save of the same version has the same digest and must not disturb who uses the folder.
    if {entry.name for entry in directory.iterdir()} != {side.name for side in manifest.side_files}:
        return False
    return all(_same(side, (directory / side.name).read_bytes()) for side in manifest.side_files)


def _same(side: SideFile, data: bytes) -> bool:
    if hashlib.sha256(data).hexdigest() == side.sha256:
        return True
    try:
        return side_file(side.name, data).canonical_sha256 == side.canonical_sha256
    except InvalidCheckpoint:
        return False


def _write_all(destination: Path, side_files: Mapping[str, bytes]) -> None:
    destination.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", dir=destination.parent))
    try:
        for name, data in side_files.items():
            _write(temporary / name, data)
        temporary.chmod(0o755)
        if destination.exists():  # left by somebody else, and wrong
            shutil.rmtree(destination)
        temporary.rename(destination)
        _sync(destination.parent)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _write(path: Path, data: bytes) -> None:
    with path.open("xb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
        os.fchmod(stream.fileno(), 0o444)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
