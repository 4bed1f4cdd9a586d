"""The ports of publishing: where the bytes of a version come from, and where they go."""

from collections.abc import AsyncIterator, Generator, Iterable, Mapping
from typing import Protocol

from modelswap_engine.checkpoint.manifest import Manifest
from modelswap_engine.protocol.errors import PublishFailed
from modelswap_engine.publishing.plan import Upload
from modelswap_engine.sources.remote.port import FileStat


class Version(Protocol):
    """A version that is to be published: hashed, its bytes at hand."""

    @property
    def manifest(self) -> Manifest:
        """Complete, of :attr:`files`."""

    @property
    def side_files(self) -> Mapping[str, bytes]:
        """By name."""

    @property
    def files(self) -> tuple[Upload, ...]:
        """Its files with tensors, and the index, as they make a checkpoint of its own."""

    def signature(self, manifest: bytes) -> bytes:
        """Return the signature that it came with, where that is of this manifest; else b""."""

    def pieces(self, name: str) -> Generator[bytes | memoryview, None, None]:
        """Yield the bytes of a tensor in pieces of a few MiB; blocks.

        Raises:
            SourceChanged: they are not those that were hashed, where that shows.
            SourceUnreadable: they cannot be read.
        """


class File(Protocol):
    """What is put to a place as one file."""

    @property
    def name(self) -> str:
        """Its name there."""

    @property
    def size(self) -> int:
        """Its bytes."""

    @property
    def content(self) -> str:
        """What tells its bytes from those that may be there under its name (64 hex)."""


class Place(Protocol):
    """A folder that a version is published to; whoever made it closes it."""

    @property
    def uri(self) -> str:
        """Where it is, without credentials."""

    async def files(self, names: Iterable[str]) -> Mapping[str, FileStat]:
        """Return what is there of some files, and maybe of others.

        Raises:
            AlreadyPublished: something is there beside which nothing may be put.
            SourceDenied, SourceUnreadable, PublishFailed: not now.
        """

    async def manifest(self, stat: FileStat) -> bytes:
        """Read the manifest that is there."""

    async def content(self, name: str) -> str:
        """Return the :attr:`File.content` of a file that was put there; "" where it is not known."""

    async def put(self, upload: File, data: AsyncIterator[bytes]) -> FileStat:
        """Write a file, all of it or nothing; at most a few chunks of it are in memory.

        Raises:
            PublishFailed: not now, or fewer or more bytes came than the file has.
            SourceDenied: the credentials do not suffice.
        """

    async def show(self, manifest: bytes, *, sent: Mapping[str, FileStat]) -> None:
        """Write the manifest, provided that there is none and the files are still what was put there.

        Raises:
            AlreadyPublished: another version was published here meanwhile.
            PublishFailed, SourceDenied: not now.
        """

    async def close(self) -> None:
        """Let go of it, and take away what nobody shall see."""


async def whole(upload: File, data: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the bytes of a file; every place takes them through this, so that none keeps a part for the whole.

    Raises:
        PublishFailed: they are fewer or more than the file has.
    """
    count = 0
    async for piece in data:
        count += len(piece)
        yield piece
    if count != upload.size:
        raise PublishFailed(
            f"{upload.name}: {count} bytes were to be written of a file of {upload.size}",
            advice="publish again; if it fails once more, please report it",
            details={"file": upload.name},
        )
