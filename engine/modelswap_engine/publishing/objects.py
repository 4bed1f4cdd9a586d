"""A folder of an object store that a version is published to: large files in parts, the manifest only where none is.

What a file consists of is noted with it (:data:`CONTENT`), so a publish that broke off knows what it need not send
again. Readers do not look at the note: they hash what they get.
"""

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import obstore
from obstore import exceptions

from modelswap_engine.checkpoint.manifest import MANIFEST_FILE, MAX_MANIFEST_BYTES
from modelswap_engine.protocol.errors import AlreadyPublished, PublishFailed, SourceChanged, SourceDenied
from modelswap_engine.publishing.port import File, whole
from modelswap_engine.sources.objects import NO_RIGHT, ObjectFolder, ObjectSettings, meaning, means_denied
from modelswap_engine.sources.remote.contents import read_whole
from modelswap_engine.sources.remote.port import FileStat

CONTENT: Final = "modelswapcontent"
"""Name of the note, such as every store takes it: no dashes."""
PART_BYTES: Final = 8 << 20
PARTS_AT_ONCE: Final = 4
MAX_PARTS: Final = 9000
"""Stores take 10 000 parts of a file."""
SENDING: Final = ObjectSettings(stall=300.0, whole=1800.0, retries=5)
"""Within ``stall`` seconds a part must have been sent and answered, on slow lines too."""


class ObjectPlace:
    """See the module, and :class:`publishing.port.Place`.

    Args:
        folder: opened with the patience of :data:`SENDING`.
    """

    def __init__(self, folder: ObjectFolder) -> None:
        self.uri = folder.uri
        self._folder = folder

    async def files(self, names: Iterable[str]) -> Mapping[str, FileStat]:
        """List the folder."""
        return await self._folder.files(names)

    async def manifest(self, stat: FileStat) -> bytes:
        """Read the manifest that is there."""
        return await read_whole(self._folder, MANIFEST_FILE, stat, limit=MAX_MANIFEST_BYTES)

    async def content(self, name: str) -> str:
        """Return the note beside a file."""
        with self._telling(name):
            found = await obstore.get_async(self._folder.store, name, options={"head": True})
        return str(found.attributes.get(CONTENT, ""))

    async def put(self, upload: File, data: AsyncIterator[bytes]) -> FileStat:
        """Upload a file, in parts where it is large; parts that were not completed are aborted."""
        note = {CONTENT: upload.content}
        store = self._folder.store
        data = whole(upload, data)
        with self._telling(upload.name, size=upload.size):
            if upload.size <= PART_BYTES:
                content = b"".join([piece async for piece in data])
                result = await obstore.put_async(store, upload.name, content, attributes=note, use_multipart=False)
            else:
                result = await obstore.put_async(
                    store,
                    upload.name,
                    data,
                    attributes=note,
                    chunk_size=max(PART_BYTES, -(-upload.size // MAX_PARTS)),
                    max_concurrency=PARTS_AT_ONCE,
                )
        return FileStat(size=upload.size, revision=result["e_tag"] or result["version"] or "")

    async def show(self, manifest: bytes, *, sent: Mapping[str, FileStat]) -> None:
        """Create the manifest; a store that cannot create on condition was asked a moment before."""
        now = await self.files([MANIFEST_FILE, *sent])
        for name, stat in sent.items():
            if name not in now or not _like(now[name], stat):
                raise SourceChanged(
                    f"{self.uri}: {name} is not what was just uploaded: somebody else publishes here",
                    advice="publish to a folder of its own",
                    details={"file": name},
                )
        try:
            with self._telling(MANIFEST_FILE, size=len(manifest)):
                await self._create(manifest, free=MANIFEST_FILE not in now)
        except exceptions.AlreadyExistsError:
            if await self._is(manifest):  # an answer was lost and it was asked for twice, or two published the same
                return
            raise AlreadyPublished(
                f"{self.uri}: another version was published here meanwhile", advice="publish to a folder of its own"
            ) from None

    async def _create(self, manifest: bytes, *, free: bool) -> None:
        try:
            await obstore.put_async(self._folder.store, MANIFEST_FILE, manifest, mode="create")
        except (NotImplementedError, exceptions.BaseError) as error:
            if isinstance(error, exceptions.AlreadyExistsError) or not free or not _unknown(error):
                raise
            await obstore.put_async(self._folder.store, MANIFEST_FILE, manifest, use_multipart=False)

    async def _is(self, manifest: bytes) -> bool:
        there = await self.files([MANIFEST_FILE])
        return MANIFEST_FILE in there and await self.manifest(there[MANIFEST_FILE]) == manifest

    async def close(self) -> None:
        """Its connections belong to the library's pool."""
        await self._folder.close()

    @contextmanager
    def _telling(self, name: str, *, size: int = 0) -> Iterator[None]:
        try:
            yield
        except exceptions.AlreadyExistsError:
            raise
        except (exceptions.BaseError, OSError, ValueError) as error:
            if isinstance(error, NO_RIGHT) or means_denied(str(error)):
                raise SourceDenied(
                    f"{self.uri}: {name} may not be written with these credentials",
                    advice="check that they are not expired, and that they allow s3:PutObject, s3:GetObject and "
                    "s3:ListBucket or the like",
                    details={"file": name},
                ) from None
            raise PublishFailed(
                f"{self.uri}: {name}, bytes 0 to {size}, cannot be written: {meaning(str(error))}",
                advice="publish again, what is there already is not sent again; check the store's address and space",
                details={"file": name, "range": f"0-{size}"},
            ) from None


def _like(one: FileStat, other: FileStat) -> bool:
    """Compare a listed file with an uploaded one; not every store puts quotes around ETags in both answers."""
    tags = {stat.revision.strip('"') for stat in (one, other)}
    return one.size == other.size and (len(tags) == 1 or "" in tags)


def _unknown(error: BaseException) -> bool:
    """Say whether a store does not know conditions."""
    return isinstance(error, NotImplementedError | exceptions.NotSupportedError) or "501" in str(error)
