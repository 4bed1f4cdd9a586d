"""A folder of a mounted volume to publish to: written beside its name, which it gets when all of it is there."""

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from modelswap_engine.checkpoint.manifest import MANIFEST_FILE
from modelswap_engine.checkpoint.saving import sync, write
from modelswap_engine.protocol.errors import AlreadyPublished, PublishFailed
from modelswap_engine.publishing.port import File, whole
from modelswap_engine.sources.file import path_of
from modelswap_engine.sources.remote.port import FileStat


class MountedPlace:
    """See the module, and :class:`publishing.port.Place`.

    Args:
        uri: ``file:///…``; folders above it are made when needed.

    Raises:
        SourceNotAllowed: not such a URI.
    """

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self._folder = path_of(uri)
        self._draft: asyncio.Task[Path] | None = None

    async def files(self, names: Iterable[str]) -> Mapping[str, FileStat]:
        """List the folder, which must be a published one, an empty one or none."""
        with self._telling("it"):
            return await asyncio.to_thread(self._files)

    def _files(self) -> Mapping[str, FileStat]:
        if not self._folder.exists():
            return {}
        found = {file.name: FileStat(size=file.stat().st_size, revision="") for file in self._folder.iterdir()}
        if found and MANIFEST_FILE not in found:
            raise self._taken("files without a manifest are there")
        return found

    async def manifest(self, stat: FileStat) -> bytes:
        """Read the manifest that is there."""
        with self._telling(MANIFEST_FILE):
            return await asyncio.to_thread((self._folder / MANIFEST_FILE).read_bytes)

    async def content(self, name: str) -> str:
        """Nothing is kept of a publish that broke off."""
        return ""

    async def put(self, upload: File, data: AsyncIterator[bytes]) -> FileStat:
        """Write a file; it is on the disk when this returns."""
        with self._telling(upload.name), (await self._drafted() / upload.name).open("xb") as file:
            async for piece in whole(upload, data):
                await asyncio.to_thread(file.write, piece)
            await asyncio.to_thread(_settle, file)
        return FileStat(size=upload.size, revision="")

    async def _drafted(self) -> Path:
        if self._draft is None:
            self._draft = asyncio.create_task(asyncio.to_thread(self._make))
        return await asyncio.shield(self._draft)  # a thread cannot be cancelled, and what it makes is to be removed

    def _make(self) -> Path:
        self._folder.parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(dir=self._folder.parent, prefix=f".{self._folder.name}."))

    async def show(self, manifest: bytes, *, sent: Mapping[str, FileStat]) -> None:
        """Write the manifest, and give the folder its name."""
        with self._telling(MANIFEST_FILE):
            await asyncio.to_thread(self._show, await self._drafted(), manifest)

    def _show(self, made: Path, manifest: bytes) -> None:
        write(made / MANIFEST_FILE, manifest)
        made.chmod(0o755)
        sync(made)
        try:
            made.rename(self._folder)  # over nothing but an empty folder
        except OSError:
            if self._folder.exists():
                raise self._taken("another version was published here meanwhile") from None
            raise
        sync(self._folder.parent)

    def _taken(self, why: str) -> AlreadyPublished:
        return AlreadyPublished(f"{self.uri}: {why}", advice="publish to a new folder: versions are never overwritten")

    async def close(self) -> None:
        """Remove what did not get its name."""
        if self._draft is not None:
            with suppress(OSError):
                await asyncio.to_thread(shutil.rmtree, await self._draft, ignore_errors=True)

    @contextmanager
    def _telling(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise PublishFailed(
                f"{self.uri}: {name} cannot be written: {error.strerror or error}",
                advice="check that the folder is writable and has space",
                details={"file": name},
            ) from None


def _settle(file: BinaryIO) -> None:
    file.flush()
    os.fchmod(file.fileno(), 0o644)
    os.fsync(file.fileno())
