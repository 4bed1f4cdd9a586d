"""Checkpoints that lie elsewhere, whatever the protocol: resolved once to what cannot change, kept by content.

A version whose digest is pinned and whose manifest is here is not asked for: a restarted pod starts without network.
Without a manifest at the source all bytes travel once, and are known by the revisions of the files after that.
"""

import asyncio
import contextlib
import hashlib
from collections import deque
from collections.abc import Collection
from functools import partial
from typing import NamedTuple
from weakref import WeakValueDictionary

from modelswap_engine.checkpoint import build
from modelswap_engine.checkpoint import manifest as manifests
from modelswap_engine.checkpoint.manifest import MANIFEST_FILE, Manifest
from modelswap_engine.protocol.errors import ManifestMismatch, ModelswapError
from modelswap_engine.sources.allowed import Allowed
from modelswap_engine.sources.port import Mounted
from modelswap_engine.sources.remote.adapter import RemoteAdapter, open_adapter
from modelswap_engine.sources.remote.checkpoint import RemoteCheckpoint, hashes_of, moved_from
from modelswap_engine.sources.remote.contents import RemoteContents, read_remote
from modelswap_engine.sources.remote.fetch import Fetcher
from modelswap_engine.sources.remote.folders import Folders
from modelswap_engine.sources.remote.port import Opener
from modelswap_engine.sources.remote.records import Found, Records, revision_of
from modelswap_engine.sources.remote.sharing import NOBODY, Sharing
from modelswap_engine.store.content import ContentStore

ADAPTERS = "adapter:"
ADAPTERS_HELD = 64
"""Of so many adapters, the last ones, the blobs are kept from making room."""


class RemoteSource:
    """See the module, and :class:`sources.port.Source`.

    Args:
        opener: of the scheme.
        allowed: which URIs may be read.
        store: where bytes come to.
        records: what was found before.
        fetcher: brings bytes.
        sharing: other pods, which are asked before the source is.
        mounted: gives versions of mounted folders, which packs may be of.
    """

    def __init__(
        self,
        opener: Opener,
        *,
        allowed: Allowed,
        store: ContentStore,
        records: Records,
        fetcher: Fetcher,
        sharing: Sharing = NOBODY,
        mounted: Mounted = tuple,
    ) -> None:
        self._opener = opener
        self._allowed = allowed
        self._store = store
        self._records = records
        self._fetcher = fetcher
        self._sharing = sharing
        self._mounted = mounted
        self._adapters: deque[str] = deque()
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def resolve(self, uri: str, *, digest: str = "", credentials: str = "") -> RemoteCheckpoint:
        """Find and validate the checkpoint at a URI; one that is known by its pin is not asked for."""
        self._allowed.check(uri)
        known = await asyncio.to_thread(self._known, uri)
        if known is not None and digest and known[0].digest == digest:
            found, manifest = known
            return self._made(uri, credentials, manifest, found, header_bytes=0)
        async with self._folders(uri, credentials) as folders:
            contents = await read_remote(folders)
            manifest = await self._manifest(contents, folders, known, digest=digest)
        found = Found(uri=uri, digest=manifest.digest, places=contents.places, evidence=contents.evidence)
        await asyncio.to_thread(self._keep, found, manifest, contents)
        return self._made(uri, credentials, manifest, found, header_bytes=contents.header_bytes)

    def _known(self, uri: str) -> tuple[Found, Manifest] | None:
        found = self._records.found(uri)
        manifest = self._records.manifest(found) if found is not None else None
        if found is None or manifest is None:
            return None
        side_files = {side.sha256: side.size for side in manifest.side_files}
        if self._store.look(side_files) or self._store.missing(side_files):
            return None
        return found, manifest

    def _keep(self, found: Found, manifest: Manifest, contents: RemoteContents) -> None:
        self._store.hold(manifest.digest, hashes_of(manifest))
        for side in manifest.side_files:
            self._store.put(side.sha256, contents.side_files[side.name])
        self._records.keep(found, manifest)

    def _made(
        self, uri: str, credentials: str, manifest: Manifest, found: Found, *, header_bytes: int
    ) -> RemoteCheckpoint:
        return RemoteCheckpoint(
            uri=uri,
            credentials=credentials,
            manifest=manifest,
            places=found.places,
            evidence=found.evidence,
            header_bytes=header_bytes,
            store=self._store,
            fetcher=self._fetcher,
            sharing=self._sharing,
            folders=partial(self._folders, uri, credentials),
            mounted=self._mounted,
            turn=self._turn(manifest.digest),
            forget=partial(self._records.forget, uri),
        )

    def _turn(self, digest: str) -> asyncio.Lock:
        turn = self._turns.get(digest)
        if turn is None:
            turn = self._turns[digest] = asyncio.Lock()
        return turn

    def _folders(self, uri: str, credentials: str) -> Folders:
        return Folders(self._opener, uri, credentials=credentials, allowed=self._allowed)

    async def _manifest(
        self, contents: RemoteContents, folders: Folders, known: tuple[Found, Manifest] | None, *, digest: str
    ) -> Manifest:
        if contents.manifest is not None:
            check = partial(build.check_shipped, contents.manifest, contents, file=MANIFEST_FILE)
            await asyncio.to_thread(check)
            return contents.manifest
        revision = revision_of(contents.places)
        if known is not None and revision and revision == known[0].revision:
            with contextlib.suppress(ManifestMismatch):  # a damaged record: the headers are the truth
                build.check_tensors(known[1], contents, file=MANIFEST_FILE)
                return known[1]
        if digest:
            shared = await self._sharing.manifest(digest, prove=partial(_proved, contents, digest))
            if shared is not None and shared.manifest is None:
                raise moved_from((await folders("")).uri, digest, why="its headers or side files are others")
            if shared is not None and shared.manifest is not None:
                return shared.manifest
        return await self._hashed(contents, folders)

    async def _hashed(self, contents: RemoteContents, folders: Folders) -> Manifest:
        """Fetch every tensor, since nothing says what they are."""
        hashes, _ = await self._fetcher.fetch(
            list(contents.tensors.values()), open_folder=folders, places=contents.places
        )
        return build.with_hashes(contents, hashes)

    async def open_adapter(self, uri: str, *, credentials: str = "") -> RemoteAdapter:
        """Find the LoRA adapter at a URI and read its header."""
        self._allowed.check(uri)
        return await open_adapter(
            partial(self._folders, uri, credentials),
            store=self._store,
            fetcher=self._fetcher,
            sharing=self._sharing,
            records=self._records,
            keep=self._keep_adapter,
        )

    def _keep_adapter(self, hashes: frozenset[str]) -> None:
        holder = ADAPTERS + hashlib.sha256("".join(sorted(hashes)).encode()).hexdigest()
        self._store.hold(holder, hashes)
        if holder not in self._adapters:
            self._adapters.append(holder)
        while len(self._adapters) > ADAPTERS_HELD:
            self._store.let_go(self._adapters.popleft())

    async def retain(self, digests: Collection[str]) -> None:
        """Let go of versions that are not in use; their blobs stay until the room is wanted."""
        await asyncio.to_thread(self._retain, set(digests))

    def _retain(self, digests: set[str]) -> None:
        for holder in self._store.holders():
            if not holder.startswith(ADAPTERS) and holder not in digests:
                self._store.let_go(holder)
        self._records.retain(digests)


class _Shared(NamedTuple):
    """What follows from another pod's manifest: that of what the source holds, None where it holds something else."""

    manifest: Manifest | None


def _proved(contents: RemoteContents, digest: str, data: bytes) -> _Shared | None:
    """Return the manifest of what the source holds when another pod's, with its hashes, gives the digest.

    Nothing else of what the pod says is taken: where tensors lie, and the side files, are what the source says. None
    means that the pod lies: a manifest that gives the digest by itself is true, whatever the source holds by now.
    """
    try:
        said = manifests.decode(data)
    except ModelswapError:
        return None
    with contextlib.suppress(ModelswapError, KeyError):
        manifest = build.with_hashes(contents, {entry.name: entry.sha256 for entry in said.tensors})
        if manifest.digest == digest:
            return _Shared(manifest)
    return _Shared(None) if said.complete and said.digest == digest else None
