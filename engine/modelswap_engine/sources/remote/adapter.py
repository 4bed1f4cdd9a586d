"""A LoRA adapter elsewhere: its config and its header were read; its tensors are fetched to be hashed.

Where their hashes are known before, what the store has, or another pod of the slot, is not fetched from the source. A
manifest beside it says them, or, where the content is pinned, whoever has it: this pod's records, or another pod. These
are believed when they give the pinned digest with the config and the header that lie at the source.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import msgspec

from modelswap_engine.backends.port import TensorRange
from modelswap_engine.checkpoint import manifest as manifests
from modelswap_engine.checkpoint.build import check_shipped, with_hashes
from modelswap_engine.checkpoint.layout import MAX_SIGNATURE_BYTES, SIGNATURE_FILE, Evidence, Read
from modelswap_engine.checkpoint.manifest import MANIFEST_FILE, MAX_MANIFEST_BYTES, TensorEntry
from modelswap_engine.checkpoint.rules import is_hash
from modelswap_engine.protocol.errors import ManifestMismatch, ModelswapError, UnsupportedFormat
from modelswap_engine.sources.adapter import CONFIG_FILE, MAX_CONFIG_BYTES, WEIGHTS_FILE, read_manifest
from modelswap_engine.sources.port import Identity
from modelswap_engine.sources.remote.checkpoint import look
from modelswap_engine.sources.remote.contents import Places, read_header, read_whole
from modelswap_engine.sources.remote.fetch import Fetcher
from modelswap_engine.sources.remote.folders import Folders
from modelswap_engine.sources.remote.port import FileStat, Folder
from modelswap_engine.sources.remote.records import Records, revision_of
from modelswap_engine.sources.remote.sharing import Sharing, take
from modelswap_engine.store.content import ContentStore


class RemoteAdapter:
    """What :func:`open_adapter` finds; see :class:`sources.port.OpenedAdapter`.

    Args:
        config: the bytes of the config.
        tensors: of the header, hashes unknown.
        manifest: the one beside it, None where there is none; ``signature`` what lies beside that.
        places: its files as they were found.
        store: where bytes come to.
        fetcher: brings them.
        sharing: other pods, which are asked before.
        records: what adapters without a manifest were, by their digest.
        folders: opens the place again.
        keep: keeps blobs from making room for others, as long as they are among the last.
    """

    def __init__(
        self,
        *,
        config: bytes,
        tensors: Sequence[TensorEntry],
        manifest: bytes | None,
        signature: bytes | None,
        places: Places,
        store: ContentStore,
        fetcher: Fetcher,
        sharing: Sharing,
        records: Records,
        folders: Callable[[], Folders],
        keep: Callable[[frozenset[str]], None],
    ) -> None:
        self.config = config
        self.tensors: Mapping[str, TensorEntry] = {entry.name: entry for entry in tensors}
        self._manifest, self._signature = manifest, signature
        self._places = places
        self._store, self._fetcher, self._sharing, self._records = store, fetcher, sharing, records
        self._folders, self._keep = folders, keep

    @property
    def evidence(self) -> Evidence | None:
        """Its manifest and what lies beside that."""
        if self._manifest is None or self._signature is None:
            return None
        return Evidence(self._manifest, self._signature)

    @property
    def revision(self) -> str:
        """One name for its files as they were found."""
        return revision_of(self._places)

    async def hash(self, identity: Identity | None = None) -> dict[str, str]:
        """Bring all tensors and return name → sha256."""
        if self._manifest is not None:
            return await self._brought(await asyncio.to_thread(self._listed, self._manifest))
        hashes = await self._brought(await self._known(identity) if identity is not None else self.tensors.values())
        if identity is not None:
            await asyncio.to_thread(self._remember, identity.of(hashes), hashes)
        return hashes

    async def _brought(self, entries: Collection[TensorEntry]) -> dict[str, str]:
        known = {entry.sha256: entry for entry in entries if entry.sha256}
        if known:
            await asyncio.to_thread(self._keep, frozenset(known))
            # What was kept is believed once more only if it is right.
            await asyncio.to_thread(self._store.damaged, known)
            await asyncio.to_thread(look, self._store, known)
            missing = [known[sha256] for sha256 in sorted(self._store.missing(known))]
            await take(self._sharing, missing, store=self._store, travelled=lambda _: None)
        absent = self._store.missing(known)
        # Without a manifest the source did not promise these hashes: what it has is told by the digest of the whole.
        rest = [
            entry if self._manifest is not None else msgspec.structs.replace(entry, sha256="")
            for entry in entries
            if not entry.sha256 or entry.sha256 in absent
        ]
        hashes = {entry.name: entry.sha256 for entry in entries}
        if rest:
            async with self._folders() as folders:
                fetched, _ = await self._fetcher.fetch(rest, open_folder=folders, places=self._places)
            hashes |= fetched
        await asyncio.to_thread(self._keep, frozenset(hashes.values()))
        return hashes

    def _listed(self, manifest: bytes) -> list[TensorEntry]:
        listed = read_manifest(manifest, config=self.config, tensors=self.tensors).by_name
        return self._entries({name: listed[name].sha256 for name in self.tensors})

    def _entries(self, hashes: Mapping[str, str]) -> list[TensorEntry]:
        return [msgspec.structs.replace(entry, sha256=hashes.get(name, "")) for name, entry in self.tensors.items()]

    async def _known(self, identity: Identity) -> list[TensorEntry]:
        """Return the tensors with the hashes that the pinned content has, where somebody knows them."""
        pinned = identity.pinned
        if not is_hash(pinned.removeprefix("sha256:")):
            return self._entries({})
        prove = partial(self._proved, identity)
        own = await asyncio.to_thread(self._records.adapter, pinned)
        hashes = await asyncio.to_thread(prove, own) if own is not None else None
        return self._entries(hashes or await self._sharing.manifest(pinned, prove=prove) or {})

    def _proved(self, identity: Identity, data: bytes) -> dict[str, str] | None:
        """Return the hashes of a manifest that give the pinned digest, none of one that is not of what lies here now.

        None means that somebody lies, which cannot be said where the source holds something else by now.
        """
        try:
            listed = manifests.decode(data)
        except ModelswapError:
            return None
        try:
            check_shipped(listed, self._read(), file=MANIFEST_FILE)
        except ManifestMismatch:
            return {}
        hashes = {entry.name: entry.sha256 for entry in listed.tensors}
        return hashes if identity.of(hashes) == identity.pinned else None

    def _remember(self, digest: str, hashes: Mapping[str, str]) -> None:
        self._records.keep_adapter(digest, with_hashes(self._read(), hashes))

    def _read(self) -> Read:
        return Read(tensors=dict(self.tensors), side_files={CONFIG_FILE: self.config}, header_bytes=0)

    def range_of(self, entry: TensorEntry, *, sha256: str) -> TensorRange:
        """Say where the store has the bytes of a tensor."""
        return TensorRange(
            name=entry.name,
            dtype=entry.dtype,
            shape=entry.shape,
            path=str(self._store.path(sha256)),
            offset=0,
            nbytes=entry.nbytes,
            sha256=sha256,
        )


async def open_adapter(
    make_folders: Callable[[], Folders],
    *,
    store: ContentStore,
    fetcher: Fetcher,
    sharing: Sharing,
    records: Records,
    keep: Callable[[frozenset[str]], None],
) -> RemoteAdapter:
    """Read the config and the header of an adapter.

    Raises:
        UnsupportedFormat: the folder holds no adapter in safetensors.
        InvalidCheckpoint: its header breaks a rule.
        SourceNotFound, SourceDenied, SourceUnreadable, SourceChanged: of the source.
    """
    async with make_folders() as folders:
        folder = await folders("")
        there = await folder.files([CONFIG_FILE, WEIGHTS_FILE, MANIFEST_FILE, SIGNATURE_FILE])
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            if name not in there:
                raise UnsupportedFormat(
                    f"{folder.uri}: no LoRA adapter: {name} is not there",
                    advice=f"name the folder that holds {CONFIG_FILE} and {WEIGHTS_FILE}",
                )
        config = await read_whole(folder, CONFIG_FILE, there[CONFIG_FILE], limit=MAX_CONFIG_BYTES)
        tensors, _ = await read_header(folder, WEIGHTS_FILE, there[WEIGHTS_FILE])
        manifest = await _beside(folder, there, MANIFEST_FILE, limit=MAX_MANIFEST_BYTES)
        signature = await _beside(folder, there, SIGNATURE_FILE, limit=MAX_SIGNATURE_BYTES)
    return RemoteAdapter(
        config=config,
        tensors=tensors,
        manifest=manifest,
        signature=signature,
        places={"": {name: there[name] for name in (CONFIG_FILE, WEIGHTS_FILE)}},
        store=store,
        fetcher=fetcher,
        sharing=sharing,
        records=records,
        folders=make_folders,
        keep=keep,
    )


async def _beside(folder: Folder, there: Mapping[str, FileStat], name: str, *, limit: int) -> bytes | None:
    return await read_whole(folder, name, there[name], limit=limit) if name in there else None
