"""Publishing to a URI: the place is chosen by its scheme, the base is read, then the version is made and sent."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from modelswap_engine.checkpoint.build import check_shipped
from modelswap_engine.checkpoint.crew import Progress
from modelswap_engine.checkpoint.layout import Read
from modelswap_engine.checkpoint.manifest import MANIFEST_FILE, Manifest, Provenance
from modelswap_engine.delta.build import Side
from modelswap_engine.protocol.errors import AlreadyPublished, BadRequest, UnsupportedScheme
from modelswap_engine.publishing.base import allowed_beside, read_base
from modelswap_engine.publishing.mounted import MountedPlace
from modelswap_engine.publishing.objects import SENDING, ObjectPlace
from modelswap_engine.publishing.packing import Packing, PackOptions
from modelswap_engine.publishing.port import Place, Version
from modelswap_engine.publishing.publisher import Base, Published, Sign, publish, show
from modelswap_engine.publishing.sides import Elsewhere, local_copy
from modelswap_engine.sources.credentials import Credentials
from modelswap_engine.sources.file import FileSource
from modelswap_engine.sources.objects import SCHEMES, ObjectStores
from modelswap_engine.sources.remote.contents import RemoteContents, read_remote
from modelswap_engine.sources.remote.folders import Folders
from modelswap_engine.sources.remote.hashing import hash_remote
from modelswap_engine.sources.remote.port import Opener
from modelswap_engine.sources.remote.schemes import ByScheme

MOUNTED: Final = "file"
MakeVersion = Callable[[Read | None], Version]
"""Called in a thread with what was read of the base, where one is named."""


def is_mounted(uri: str) -> bool:
    """Say whether a URI is of a folder here."""
    return uri.partition(":")[0].lower() == MOUNTED


def is_object_store(uri: str) -> bool:
    """Say whether a URI is of what can be published to by parts and conditions."""
    return uri.partition(":")[0].lower() in SCHEMES


class Anywhere:
    """Places to publish to.

    Args:
        credentials: name of mounted credentials; "" takes what the process has of itself.
        credentials_dir: folder with one sub-folder of mounted credentials for each name.
        allow: prefixes that the base's manifest may name beside the buckets of the base and of the version.
        opener: of places that a base may be in; object stores when None.
    """

    def __init__(
        self,
        *,
        credentials: str = "",
        credentials_dir: Path | None = None,
        allow: Sequence[str] = (),
        opener: Opener | None = None,
    ) -> None:
        self._credentials = credentials
        known = Credentials(credentials_dir)
        self._targets = ObjectStores(known, settings=SENDING)
        self._allow = tuple(allow)
        self._opener = opener or ByScheme(dict.fromkeys(SCHEMES, ObjectStores(known)))

    async def publish(
        self,
        make: MakeVersion,
        uri: str,
        *,
        base: str = "",
        pack: PackOptions | None = None,
        sign: Sign | None = None,
        progress: Progress | None = None,
    ) -> Published:
        """Publish a version.

        Args:
            make: gives the version.
            uri: its folder, a new one.
            base: URI of a published version of which it is a change; "" for none.
            pack: how what differs from the base is packed beside the version; None leaves that out, and so do mounted
                folders, where pods read tensors where they lie.
            sign: signs the manifest; one that the version came with is kept where it still fits.
            progress: told (bytes handed to the place, bytes to upload) on the event loop.

        Raises:
            UnsupportedScheme, SourceNotAllowed, CredentialsNotMounted, BadRequest: that cannot be published to.
            AlreadyPublished, SourceDenied, PublishFailed: see :func:`publishing.publisher.publish`.
            SourceNotFound, ManifestMismatch, InvalidCheckpoint, UnsupportedFormat, SourceUnreadable: of the base, or
                of the version itself.
        """
        uri = uri.rstrip("/")
        place = await self._place(uri, base=base)
        try:
            if not base:
                return await publish(await asyncio.to_thread(make, None), place, sign=sign, progress=progress)
            if is_mounted(base):
                here, read = await _mounted(base.rstrip("/"), pack)
                version = await asyncio.to_thread(make, read)
                return await publish(version, place, base=here, sign=sign, progress=progress)
            allowed = allowed_beside([uri, base], self._allow)
            async with Folders(self._opener, base.rstrip("/"), credentials=self._credentials, allowed=allowed) as at:
                found, contents = await read_base(at, base)
                packing = await _packing(pack, found, contents, at) if pack is not None else None
                version = await asyncio.to_thread(make, contents)
                return await publish(version, place, base=found, packing=packing, sign=sign, progress=progress)
        finally:
            await place.close()

    async def manifest(self, uri: str, *, progress: Progress | None = None) -> Manifest:
        """Return what a checkpoint is: what its manifest says, held against the headers, or what its bytes hash to.

        Raises:
            Refused, SourceDenied, SourceUnreadable, SourceChanged: see :func:`read_remote`.
        """
        async with self._folders(uri) as folders:
            contents = await read_remote(folders)
            if contents.manifest is not None:
                check_shipped(contents.manifest, contents, file=MANIFEST_FILE)
                return contents.manifest
            return await hash_remote(contents, folders, progress=progress)

    async def build(
        self,
        uri: str,
        *,
        provenance: Provenance | msgspec.UnsetType = msgspec.UNSET,
        sign: Sign | None = None,
        progress: Progress | None = None,
    ) -> Manifest:
        """Hash the checkpoint in an object store and write its manifest beside it.

        Raises:
            AlreadyPublished: it has one.
            UnsupportedScheme: nothing can be written there.
            Refused, SourceDenied, SourceUnreadable, SourceChanged, PublishFailed: as in reading and publishing.
        """
        uri = uri.rstrip("/")
        place = await self._place(uri, base="")
        try:
            async with self._folders(uri) as folders:
                contents = await read_remote(folders)
                if contents.manifest is not None:
                    raise AlreadyPublished(
                        f"{uri}: it has a manifest",
                        advice=f"what is served must not change; to write it anew, remove {MANIFEST_FILE} first",
                    )
                manifest = await hash_remote(contents, folders, progress=progress)
            manifest = msgspec.structs.replace(manifest, provenance=provenance)
            await show(manifest, place, signature=sign, sent=contents.places[""])
            return manifest
        finally:
            await place.close()

    def _folders(self, uri: str) -> Folders:
        allowed = allowed_beside([uri], self._allow)
        return Folders(self._opener, uri.rstrip("/"), credentials=self._credentials, allowed=allowed)

    async def _place(self, uri: str, *, base: str) -> Place:
        scheme = uri.partition(":")[0].lower()
        if base and (scheme == MOUNTED) != is_mounted(base):
            raise BadRequest(
                "only one of the version and its base lies in a mounted folder: no pod reads both",
                advice="leave the base out",
            )
        if scheme == MOUNTED:
            return MountedPlace(uri)
        if not is_object_store(uri):
            raise UnsupportedScheme(
                f"nothing can be published to {scheme[:32]}:",
                advice=f"use one of: {', '.join(f'{name}:' for name in [MOUNTED, *sorted(SCHEMES)])}",
                details={"scheme": scheme[:32]},
            )
        allowed_beside([uri])
        return ObjectPlace(await self._targets.open(uri, credentials=self._credentials))


async def _mounted(uri: str, pack: PackOptions | None) -> tuple[Base, Read]:
    """Read a base that lies here; whether pods may is for them to say."""
    if pack is not None and (pack.required or pack.folder is not None):
        raise BadRequest(
            "pods read tensors of mounted folders where they lie, and no pack",
            advice="leave out --delta and --base-dir",
        )
    found = await FileSource(roots=[Path("/")], cache=None).resolve(uri)
    return Base(uri=uri, manifest=found.manifest), found.contents


async def _packing(options: PackOptions, base: Base, contents: RemoteContents, folders: Folders) -> Packing:
    side: Side = Elsewhere(base.uri, base.manifest, contents, folders)
    if options.folder is not None:
        side = await asyncio.to_thread(local_copy, options.folder, base.manifest, contents)
    return Packing(base=side, required=options.required, progress=options.progress)
