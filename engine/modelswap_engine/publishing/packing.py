"""The pack that a version is published with: what differs from its base, for pods that hold that.

Nothing depends on a pack, so one that cannot be made, or is not much smaller than the tensors, is left out and said
why; only who asks for it by name has the publish fail. It is there before the manifest is. How a pack is written is
not known here (``modelswap_engine.delta``).
"""

import asyncio
import hashlib
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

import msgspec

from modelswap_engine.checkpoint import saving
from modelswap_engine.checkpoint.crew import Progress
from modelswap_engine.checkpoint.manifest import Manifest
from modelswap_engine.delta.build import Built, Side, TooLarge, build, differing
from modelswap_engine.delta.layout import pack_name
from modelswap_engine.protocol.errors import Cancelled, ModelswapError
from modelswap_engine.publishing.port import Place, Version
from modelswap_engine.publishing.sides import OfVersion
from modelswap_engine.sources.remote.port import FileStat

SHARE: Final = 0.5
"""Of the bytes of the tensors that differ: a pack that takes more is not worth its place and the reading."""
LEAST_BYTES: Final = 1 << 20
"""Where fewer bytes differ, a request more costs as much."""


@dataclass(frozen=True, kw_only=True)
class PackOptions:
    """What is asked of a pack.

    Attributes:
        folder: a local copy of the base, which is read instead of the base itself.
        required: see :class:`Packing`.
        progress: see :class:`Packing`.
    """

    folder: Path | None = None
    required: bool = False
    progress: Progress | None = None


class Packed(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What became of the pack.

    Attributes:
        name: its file.
        bytes: of the pack; 0 where none was made, or it is there from before.
        dense_bytes: of the tensors that it stands for.
        already_there: an earlier try had uploaded it.
        missing: why there is none; "" where there is one.
    """

    name: str
    bytes: int = 0
    dense_bytes: int = 0
    already_there: bool = False
    missing: str = ""


class PackFile(msgspec.Struct, frozen=True, kw_only=True):
    """A pack to be put; see :class:`publishing.port.File`."""

    name: str
    size: int
    content: str


@dataclass(frozen=True, kw_only=True)
class Packing:
    """How a version is packed.

    Attributes:
        base: what pods may hold.
        required: make it however large it is, and fail where it cannot be made.
        progress: told (bytes done, bytes in all) of the tensors that differ, from any thread.
    """

    base: Side
    required: bool = False
    progress: Progress | None = None

    @property
    def name(self) -> str:
        """What the pack is called beside the version."""
        return pack_name(self.base.manifest.digest)

    async def put(
        self, version: Version, place: Place, there: Mapping[str, FileStat]
    ) -> tuple[Packed, dict[str, FileStat]]:
        """Make the pack and put it to the place; return what became of it, and what was put.

        Args:
            version: that is published.
            place: where to.
            there: its files.

        Raises:
            ModelswapError: it is required, and cannot be had.
        """
        dense = sum(entry.nbytes for entry in differing(self.base.manifest, version.manifest))
        packed = Packed(name=self.name, dense_bytes=dense)
        if dense < LEAST_BYTES and not self.required:
            return msgspec.structs.replace(packed, missing="less than 1 MiB of tensors differs"), {}
        try:
            size = there[self.name].size if self.name in there else 0
            if size and await place.content(self.name) == self._content(version.manifest, size):
                return msgspec.structs.replace(packed, already_there=True), {}
            size, stat = await self._made(version, place)
        except TooLarge:
            why = "it would take more than half of the tensors that differ"
            return msgspec.structs.replace(packed, missing=why), {}
        except Cancelled:
            raise
        except ModelswapError as error:
            if self.required:
                raise
            return msgspec.structs.replace(packed, missing=error.message), {}
        return msgspec.structs.replace(packed, bytes=size), {self.name: stat}

    def _content(self, target: Manifest, size: int) -> str:
        """What tells a whole one from all else: any pack between the two versions will do, but none that was cut."""
        return hashlib.sha256(f"{self.base.manifest.digest} {target.digest} {size}".encode()).hexdigest()

    async def _made(self, version: Version, place: Place) -> tuple[int, FileStat]:
        with _spool() as file:
            built = await self._build(version, file)
            content = self._content(version.manifest, built.size)
            upload = PackFile(name=self.name, size=built.size, content=content)
            return built.size, await place.put(upload, _data(built))

    async def _build(self, version: Version, file: IO[bytes]) -> Built:
        stop, target = threading.Event(), OfVersion(version)
        share = 0.0 if self.required else SHARE
        work = asyncio.create_task(
            asyncio.to_thread(build, self.base, target, file, share=share, progress=self.progress, stop=stop)
        )
        try:
            return await asyncio.shield(work)
        finally:
            stop.set()
            await asyncio.wait([work])  # nobody may write to a file that is closed


@contextmanager
def _spool() -> Iterator[IO[bytes]]:
    try:
        with tempfile.TemporaryFile() as file:
            yield file
    except OSError as error:
        raise saving.unwritable(
            Path(tempfile.gettempdir()), error, volume="the folder of temporary files (TMPDIR)"
        ) from None


async def _data(built: Built) -> AsyncIterator[bytes]:
    pieces = built.pieces()
    while (data := await asyncio.to_thread(next, pieces, None)) is not None:
        yield data
