"""A version elsewhere: what it is, is known; its bytes come into the content store when they are wanted."""

import asyncio
import hashlib
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

from modelswap_engine.backends.port import TensorRange
from modelswap_engine.checkpoint.layout import Evidence
from modelswap_engine.checkpoint.manifest import MANIFEST_FILE, Manifest, TensorEntry
from modelswap_engine.protocol.errors import DigestMismatch, ManifestMismatch, SourceChanged
from modelswap_engine.protocol.looking import SourceLook
from modelswap_engine.sources import side_files
from modelswap_engine.sources.port import Brought, Mounted, Travelled
from modelswap_engine.sources.remote import looking, packs
from modelswap_engine.sources.remote.contents import Places
from modelswap_engine.sources.remote.fetch import Fetcher
from modelswap_engine.sources.remote.folders import Folders
from modelswap_engine.sources.remote.sharing import Sharing, take
from modelswap_engine.store.content import ContentStore


class RemoteCheckpoint:
    """What :class:`RemoteSource` resolves to; see :class:`sources.port.Resolved`.

    Args:
        uri: what was asked for.
        credentials: with which.
        manifest: complete; the store has its side files.
        places: its files as they were found.
        evidence: of who vouches for it.
        header_bytes: what reading them took; 0 when it was known.
        store: where bytes come to.
        fetcher: brings them from the source.
        sharing: brings them from other pods, before that.
        folders: opens the places again.
        mounted: gives versions that lie here without having been fetched.
        turn: of whoever fetches this version, ahead or for a swap, so that nothing travels twice.
        forget: forgets where it was found, so that the place is looked at again.
    """

    def __init__(
        self,
        *,
        uri: str,
        credentials: str,
        manifest: Manifest,
        places: Places,
        evidence: Evidence | None,
        header_bytes: int,
        store: ContentStore,
        fetcher: Fetcher,
        sharing: Sharing,
        folders: Callable[[], Folders],
        mounted: Mounted,
        turn: asyncio.Lock,
        forget: Callable[[], None],
    ) -> None:
        self.uri, self.credentials, self.manifest, self.header_bytes = uri, credentials, manifest, header_bytes
        self.evidence = evidence
        self._places = places
        self._store, self._fetcher, self._sharing, self._folders = store, fetcher, sharing, folders
        self._mounted, self._turn, self._forget = mounted, turn, forget

    async def obtain(self, names: Iterable[str], *, travelled: Travelled | None = None) -> Brought:
        """Fetch what the store does not have."""
        async with self._turn:
            return await self._obtain(names, travelled)

    async def _obtain(self, names: Iterable[str], travelled: Travelled | None) -> Brought:
        entries = {self.manifest.by_name[name].sha256: self.manifest.by_name[name] for name in names}
        # Whatever of this version is here already must not make room for the rest of it.
        await asyncio.to_thread(self._store.hold, self.manifest.digest, self._hashes)
        await asyncio.to_thread(look, self._store, entries)
        missing = [entries[sha256] for sha256 in sorted(self._store.missing(entries))]
        if not missing:
            return Brought()

        def told(*, source: int = 0, peers: int = 0) -> None:
            if travelled is not None:
                travelled(Brought(source=source, peers=peers))

        peers = await take(self._sharing, missing, store=self._store, travelled=lambda count: told(peers=count))
        if not (missing := self._still(missing)):
            return Brought(peers=peers)
        others = {holder for holder in self._store.holders() if holder.startswith("sha256:")} - {self.manifest.digest}
        async with self._folders() as folders:
            packed = await packs.make(
                missing, folder=await folders(""), store=self._store, digests=others, mounted=self._mounted()
            )
            count = await self._fetched(
                self._still(missing), folders, lambda count: told(source=packed + count, peers=peers)
            )
        return Brought(source=packed + count, peers=peers)

    async def _fetched(self, entries: Sequence[TensorEntry], folders: Folders, travelled: Callable[[int], None]) -> int:
        """Fetch from the source; where it has other files by now, they are looked at when it is resolved again."""
        try:
            _, count = await self._fetcher.fetch(entries, open_folder=folders, places=self._places, travelled=travelled)
        except (ManifestMismatch, SourceChanged) as error:
            await asyncio.to_thread(self._forget)
            if isinstance(error, SourceChanged) or MANIFEST_FILE in self._places.get("", {}):
                raise
            # The source promised no hashes: they are those of the version, as it was once.
            raise moved_from(self.uri, self.manifest.digest, why=error.message) from error
        return count

    def _still(self, entries: Sequence[TensorEntry]) -> list[TensorEntry]:
        """Return those that the store does not have."""
        absent = self._store.missing(entry.sha256 for entry in entries)
        return [entry for entry in entries if entry.sha256 in absent]

    @cached_property
    def _hashes(self) -> frozenset[str]:
        return hashes_of(self.manifest)

    def range_of(self, name: str) -> TensorRange:
        """Say where the store has the bytes of a tensor."""
        entry = self.manifest.by_name[name]
        return TensorRange(
            name=entry.name,
            dtype=entry.dtype,
            shape=entry.shape,
            path=str(self._store.path(entry.sha256)),
            offset=0,
            nbytes=entry.nbytes,
            sha256=entry.sha256,
        )

    async def copy_side_files(self, destination: Path) -> None:
        """Make ``destination`` a read-only folder with exactly the manifest's side files."""
        await asyncio.to_thread(self._copy_side_files, destination)

    def _copy_side_files(self, destination: Path) -> None:
        side_files.materialise(destination, self.manifest, read_side_files(self._store, self.manifest))

    async def unchanged(self, *, suspected: bool = False) -> None:
        """What the store has was proved; where bytes were wrong all the same, those that are damaged go.

        Raises:
            SourceChanged: some are gone, and are fetched again.
        """
        if not suspected:
            return
        damaged = await asyncio.to_thread(self._store.damaged, self._hashes)
        if damaged:
            raise SourceChanged(
                f"{self.uri}: {len(damaged)} of its blobs were damaged in the content store and are fetched again",
                advice="look at the disk of the engine's state volume",
            )

    async def moved(self) -> SourceLook:
        """Ask the places again for the revisions of their files."""
        async with self._folders() as folders:
            return await looking.look(folders, self._places, digest=self.manifest.digest)


def moved_from(uri: str, digest: str, *, why: str) -> DigestMismatch:
    """Say that a source holds another content than the version that is known, or asked for, by its digest."""
    return DigestMismatch(
        f"{uri} does not hold {digest} any more: {why}",
        advice="put that content back at the source, or name the new one by a digest or a uri of its own",
        details={"expected": digest},
    )


def look(store: ContentStore, entries: Mapping[str, TensorEntry]) -> None:
    """See which tensors (hash → entry) the store has by now.

    Raises:
        ManifestMismatch: it has one in another size than the manifest states, so that the hash is not this tensor's.
    """
    wrong = sorted(store.look({sha256: entry.nbytes for sha256, entry in entries.items()}))
    if wrong:
        entry = entries[wrong[0]]
        raise ManifestMismatch(
            f"{MANIFEST_FILE}: tensor {entry.name!r}: {entry.nbytes} bytes with the hash {entry.sha256[:16]}… are "
            "stated, but what hashes to that has another size",
            advice="write the manifest again (modelswap manifest build)",
            details={"file": MANIFEST_FILE, "tensor": entry.name, "expected": entry.sha256},
        )


def hashes_of(manifest: Manifest) -> frozenset[str]:
    """Return the names of all blobs of a version."""
    return frozenset(entry.sha256 for entry in manifest.tensors) | frozenset(s.sha256 for s in manifest.side_files)


def read_side_files(store: ContentStore, manifest: Manifest) -> Mapping[str, bytes]:
    """Read the side files of a version from the store.

    Raises:
        SourceChanged: one is not there, or damaged; it is removed.
        SourceUnreadable: the disk.
    """
    found = {}
    store.look({side.sha256: side.size for side in manifest.side_files})
    for side in manifest.side_files:
        stream = store.open_blob(side.sha256)
        with stream or io.BytesIO() as reading:
            data = reading.read(side.size)
        if hashlib.sha256(data).hexdigest() != side.sha256:
            store.damaged([side.sha256])
            raise SourceChanged(
                f"{side.name}: not in the content store any more",
                advice="it is fetched again",
                details={"file": side.name},
            )
        found[side.name] = data
    return found
