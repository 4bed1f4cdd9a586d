"""A validated checkpoint in a local folder: ranges into its files, copies of its side files, and whether it changed."""

import asyncio
import hashlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

from modelswap_engine.backends.port import TensorRange
from modelswap_engine.checkpoint.canonical import side_file
from modelswap_engine.checkpoint.files import stamp_of
from modelswap_engine.checkpoint.layout import Contents
from modelswap_engine.checkpoint.manifest import Manifest, SideFile
from modelswap_engine.protocol.errors import InvalidCheckpoint, SourceChanged, SourceUnreadable

_ADVICE: Final = "write new versions to a new folder instead of overwriting one"


class LocalCheckpoint:
    """What :class:`FileSource` resolves to; see :class:`sources.port.Resolved`.

    Args:
        uri: what was asked for.
        manifest: complete.
        contents: the folder as it was read; the side files are copied from these very bytes.
    """

    def __init__(self, *, uri: str, manifest: Manifest, contents: Contents) -> None:
        self._uri, self._manifest, self._contents = uri, manifest, contents

    @property
    def uri(self) -> str:
        """The URI that was asked for."""
        return self._uri

    @property
    def manifest(self) -> Manifest:
        """The whole manifest."""
        return self._manifest

    @property
    def header_bytes(self) -> int:
        """Bytes read for headers, index, shipped manifest and side files."""
        return self._contents.header_bytes

    def range_of(self, name: str) -> TensorRange:
        """Say where the bytes of a tensor are."""
        entry = self._manifest.by_name[name]
        return TensorRange(
            name=entry.name,
            dtype=entry.dtype,
            shape=entry.shape,
            path=str(self._contents.paths[entry.file]),
            offset=entry.offset,
            nbytes=entry.nbytes,
            sha256=entry.sha256,
        )

    async def copy_side_files(self, destination: Path) -> None:
        """Make ``destination`` a read-only folder with exactly the manifest's side files."""
        await asyncio.to_thread(self._copy_side_files, destination)

    async def unchanged(self) -> None:
        """Check that no file was touched since it was resolved."""
        await asyncio.to_thread(self._unchanged)

    def _copy_side_files(self, destination: Path) -> None:
        side_files = self._verified()
        try:
            if destination.is_dir() and _holds(destination, self._manifest):
                return
            _materialise(destination, side_files)
        except OSError as error:
            raise SourceUnreadable(
                f"{destination}: cannot write the side files: {error.strerror or error}",
                advice="check that the state directory is writable and has space",
            ) from None

    def _verified(self) -> dict[str, bytes]:
        found = self._contents.side_files
        for side in self._manifest.side_files:
            if hashlib.sha256(found.get(side.name, b"")).hexdigest() != side.sha256:
                raise SourceChanged(f"{side.name}: not the bytes of the manifest", advice=_ADVICE)
        return found

    def _unchanged(self) -> None:
        for name, stamp in self._contents.stamps.items():
            try:
                now = stamp_of(os.stat(self._contents.paths[name], follow_symlinks=False))
            except FileNotFoundError:
                now = None
            except OSError as error:
                raise SourceUnreadable(f"{name}: {error.strerror}", details={"file": name}) from None
            if now != stamp:
                what = "removed" if now is None else "overwritten or replaced"
                raise SourceChanged(
                    f"{self._uri}: {name} was {what} after it was resolved", advice=_ADVICE, details={"file": name}
                )


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


def _materialise(destination: Path, side_files: dict[str, bytes]) -> None:
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
