"""The act of publishing: files first, what makes a folder a checkpoint after them, the manifest last.

So nobody ever sees a part of a version, and one that broke off can be repeated: what is there already, by size and
content, stays. Nothing that was published is ever overwritten.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Final

import msgspec

from modelswap_engine.checkpoint import manifest as manifests
from modelswap_engine.checkpoint.crew import Progress
from modelswap_engine.checkpoint.layout import SIGNATURE_FILE
from modelswap_engine.checkpoint.manifest import MANIFEST_FILE, Manifest
from modelswap_engine.checkpoint.rules import refuse
from modelswap_engine.protocol.errors import AlreadyPublished, SourceChanged
from modelswap_engine.publishing.packing import Packed, Packing
from modelswap_engine.publishing.plan import ENTRANCES, Plan, Upload, plan_based, plan_whole
from modelswap_engine.publishing.port import Place, Version
from modelswap_engine.sources.remote.port import FileStat

if TYPE_CHECKING:
    from hashlib import _Hash

FILES_AT_ONCE: Final = 4
_HEAD_PIECE: Final = 4 << 20
Sign = Callable[[bytes], bytes]
"""Returns the signature of a manifest, b"" for none; blocks."""


class Base(msgspec.Struct, frozen=True, kw_only=True):
    """A version that was published before, and what it is."""

    uri: str
    manifest: Manifest


class Published(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A version as it can be served.

    Attributes:
        digest: its content digest.
        uri: its folder.
        bytes_sent: what was uploaded now, of files; the manifest does not count.
        total_bytes: of all its tensors.
        files_sent: how many files were uploaded now.
        changed_tensors: how many tensors the base does not have; all of them without a base.
        already_there: it was published before, and nothing was done.
        pack: what became of the pack beside it, where one was to be made.
    """

    digest: str
    uri: str
    bytes_sent: int = 0
    total_bytes: int = 0
    files_sent: int = 0
    changed_tensors: int = 0
    already_there: bool = False
    pack: Packed | None = None


async def publish(
    version: Version,
    place: Place,
    *,
    base: Base | None = None,
    packing: Packing | None = None,
    sign: Sign | None = None,
    progress: Progress | None = None,
) -> Published:
    """Publish a version.

    Args:
        version: what.
        place: where to.
        base: another version in a place that all readers reach; only what it does not have is uploaded.
        packing: makes a pack of what differs, beside the version.
        sign: signs the manifest; one that the version came with is kept where it still fits.
        progress: told (bytes handed to the place, bytes to upload) on the event loop.

    Raises:
        AlreadyPublished: there is another version, or a checkpoint without a manifest.
        SourceChanged, SourceUnreadable: of the version's own bytes.
        PublishFailed, SourceDenied, SourceUnreadable: the place does not take it now.
        ModelswapError: of the pack, where it is required.
    """
    plan = (
        plan_whole(version.manifest, version.files, version.side_files)
        if base is None
        else plan_based(version.manifest, version.side_files, base=base.manifest, place=base.uri)
    )
    beside = [packing.name] if packing is not None else []
    there = await place.files([MANIFEST_FILE, *ENTRANCES, *beside, *(upload.name for upload in plan.uploads)])
    tensors = [entry for upload in plan.uploads for entry in upload.tensors]
    answer = Published(
        digest=plan.manifest.digest,
        uri=place.uri,
        total_bytes=plan.manifest.total_bytes,
        changed_tensors=len(tensors),
    )
    if MANIFEST_FILE in there:
        await _refuse_other(place, there[MANIFEST_FILE], plan.manifest)
        return msgspec.structs.replace(answer, already_there=True)
    left = await _left(plan, place, there)
    for name in ENTRANCES:
        if name in there and name not in {upload.name for upload in plan.uploads} - {upload.name for upload in left}:
            raise AlreadyPublished(
                f"{place.uri}: {name} of another checkpoint is there, without a manifest",
                advice="publish to a new folder: somebody may read this one",
                details={"file": name},
            )
    sending = _Sending(version, place, total=sum(upload.size for upload in left), progress=progress)
    await sending.all([upload for upload in left if upload.name not in ENTRANCES])
    await sending.all([upload for upload in left if upload.name in ENTRANCES])
    pack, put = await packing.put(version, place, there) if packing is not None else (None, {})
    await show(plan.manifest, place, signature=sign or version.signature, sent={**sending.sent, **put})
    sent = sending.total + (pack.bytes if pack is not None else 0)
    return msgspec.structs.replace(answer, bytes_sent=sent, files_sent=len(left) + len(put), pack=pack)


async def show(manifest: Manifest, place: Place, *, signature: Sign | None, sent: Mapping[str, FileStat]) -> None:
    """Put the signature of a manifest, where there is one, and then the manifest; see :meth:`Place.show`."""
    data = manifests.encode(manifest)
    signed = await asyncio.to_thread(signature, data) if signature is not None else b""
    if signed:
        upload = Upload(name=SIGNATURE_FILE, head=signed)

        async def once() -> AsyncIterator[bytes]:
            yield signed

        sent = {**sent, SIGNATURE_FILE: await place.put(upload, once())}
    await place.show(data, sent=sent)


async def _refuse_other(place: Place, stat: FileStat, manifest: Manifest) -> None:
    if stat.size > manifests.MAX_MANIFEST_BYTES:
        refuse(f"{stat.size} bytes; at most {manifests.MAX_MANIFEST_BYTES} are read", file=MANIFEST_FILE)
    found = manifests.decode(await place.manifest(stat))
    if found.digest != manifest.digest:
        raise AlreadyPublished(
            f"{place.uri}: the version {found.digest[:19]}… is there, and this one is {manifest.digest[:19]}…",
            advice="publish to a new folder: versions are never overwritten",
            details={"expected": manifest.digest, "actual": found.digest},
        )


async def _left(plan: Plan, place: Place, there: Mapping[str, FileStat]) -> list[Upload]:
    """Return what is not there yet, the largest first."""
    turns = asyncio.Semaphore(FILES_AT_ONCE)

    async def known(upload: Upload) -> bool:
        if upload.name not in there or there[upload.name].size != upload.size:
            return False
        async with turns:
            return await place.content(upload.name) == upload.content

    found = await asyncio.gather(*(known(upload) for upload in plan.uploads))
    left = [upload for upload, done in zip(plan.uploads, found, strict=True) if not done]
    return sorted(left, key=lambda upload: upload.size, reverse=True)


class _Sending:
    """Files on their way."""

    def __init__(self, version: Version, place: Place, *, total: int, progress: Progress | None) -> None:
        self._version, self._place, self._progress = version, place, progress
        self.total, self._done = total, 0
        self._turns = asyncio.Semaphore(FILES_AT_ONCE)
        self.sent: dict[str, FileStat] = {}

    async def all(self, uploads: Sequence[Upload]) -> None:
        """Send files; when one fails, the others are given up."""
        tasks = [asyncio.create_task(self._one(upload)) for upload in uploads]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _one(self, upload: Upload) -> None:
        async with self._turns:
            self.sent[upload.name] = await self._place.put(upload, self._data(upload))

    async def _data(self, upload: Upload) -> AsyncIterator[bytes]:
        for at in range(0, len(upload.head), _HEAD_PIECE):
            yield self._passed(upload.head[at : at + _HEAD_PIECE])
        for entry in upload.tensors:
            digest = hashlib.sha256()
            with closing(self._version.pieces(entry.name)) as pieces:
                while data := await asyncio.to_thread(_next, pieces, digest):
                    yield self._passed(data)
            if digest.hexdigest() != entry.sha256:
                raise SourceChanged(
                    f"{upload.name}: tensor {entry.name!r} was changed while it was published",
                    advice="publish it again, and let nobody write to it meanwhile",
                    details={"file": upload.name, "tensor": entry.name, "expected": entry.sha256},
                )

    def _passed(self, data: bytes) -> bytes:
        self._done += len(data)
        if self._progress is not None:
            self._progress(self._done, self.total)
        return data


def _next(pieces: "Iterator[bytes | memoryview]", digest: "_Hash") -> bytes:
    """Return the next piece, b"" after the last; what is hashed is the very copy that is sent."""
    data = bytes(next(pieces, b""))
    digest.update(data)
    return data
