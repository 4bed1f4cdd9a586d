"""Versions as the two sides of a pack: the one that is published, and its base, here or in another place.

Whoever packs hashes what it reads, so a side need not be believed.
"""

import asyncio
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

import msgspec

from modelswap_engine.checkpoint.layout import read_contents
from modelswap_engine.checkpoint.manifest import Manifest, TensorEntry
from modelswap_engine.delta.local import Folder
from modelswap_engine.delta.pack import ReadBase
from modelswap_engine.protocol.errors import ManifestMismatch, SourceChanged
from modelswap_engine.publishing.port import Version
from modelswap_engine.sources.remote.contents import RemoteContents, read_range
from modelswap_engine.sources.remote.folders import Folders

WINDOW_BYTES: Final = 8 << 20
"""What is read of a base in another place at once."""


class OfVersion:
    """What is published.

    Args:
        version: it.
    """

    def __init__(self, version: Version) -> None:
        self._version = version
        self.name = "the version to publish"
        self.manifest, self.side_files = version.manifest, version.side_files

    @contextmanager
    def reading(self, entry: TensorEntry) -> Iterator[ReadBase]:
        """Give what reads a tensor; see :class:`delta.build.Side`."""
        with closing(self._version.pieces(entry.name)) as pieces:
            yield _Pieces(pieces).read


class _Pieces:
    """Fills views one after the other from pieces."""

    def __init__(self, pieces: Generator[bytes | memoryview, None, None]) -> None:
        self._pieces, self._left = pieces, memoryview(b"")

    def read(self, begin: int, view: memoryview) -> None:
        at = 0
        while at < len(view):
            self._left = self._left or memoryview(next(self._pieces, b""))
            if not self._left:
                raise SourceChanged("a tensor ended early", advice="let nobody write to it while it is published")
            count = min(len(self._left), len(view) - at)
            view[at : at + count] = self._left[:count]
            at, self._left = at + count, self._left[count:]


class Elsewhere:
    """A version in another place. Threads read; the event loop, on which this is made, fetches.

    Args:
        uri: of the version.
        manifest: of it.
        contents: of it.
        folders: its places.
    """

    def __init__(self, uri: str, manifest: Manifest, contents: RemoteContents, folders: Folders) -> None:
        self.name, self.manifest, self.side_files = uri, manifest, contents.side_files
        self._places, self._folders = contents.places, folders
        self._loop = asyncio.get_running_loop()

    @contextmanager
    def reading(self, entry: TensorEntry) -> Iterator[ReadBase]:
        """Give what reads a tensor, some way ahead."""
        yield _Pieces(self._windows(entry)).read

    def _windows(self, entry: TensorEntry) -> Generator[bytes, None, None]:
        for begin in range(0, entry.nbytes, WINDOW_BYTES):
            stop = min(begin + WINDOW_BYTES, entry.nbytes)
            work = self._range(entry, entry.offset + begin, entry.offset + stop)
            yield asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _range(self, entry: TensorEntry, start: int, stop: int) -> bytes:
        folder, stat = await self._folders(entry.place), self._places[entry.place][entry.file]
        return await read_range(folder, entry.file, start, stop, stat=stat)


def local_copy(directory: Path, manifest: Manifest, contents: RemoteContents) -> Folder:
    """Return a version in another place as a folder here has it.

    Args:
        directory: the folder.
        manifest: of the version.
        contents: of the version.

    Raises:
        ManifestMismatch: the folder has other tensors.
        SourceNotFound, InvalidCheckpoint, UnsupportedFormat, SourceUnreadable: it is no checkpoint that can be read.
    """
    directory = directory.resolve()
    found = read_contents(directory, roots=[directory])
    for name in sorted(manifest.by_name.keys() | found.tensors.keys()):
        there, here = manifest.by_name.get(name), found.tensors.get(name)
        if there is None or here is None or (there.dtype, there.shape) != (here.dtype, here.shape):
            raise ManifestMismatch(
                f"{directory}: it is no copy of the base: tensor {name!r} is another, or only in one of them",
                advice="name the folder that the base was published from, or none",
                details={"tensor": name},
            )
    found = msgspec.structs.replace(found, side_files=contents.side_files)
    return Folder(contents=found, manifest=manifest, roots=(directory,))
