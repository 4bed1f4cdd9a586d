"""A LoRA adapter elsewhere: its config and its header were read; its tensors are fetched to be hashed."""

import asyncio
from collections.abc import Callable, Mapping, Sequence

from modelswap_engine.backends.port import TensorRange
from modelswap_engine.checkpoint.layout import MAX_SIGNATURE_BYTES, SIGNATURE_FILE, Evidence
from modelswap_engine.checkpoint.manifest import MANIFEST_FILE, MAX_MANIFEST_BYTES, TensorEntry
from modelswap_engine.protocol.errors import UnsupportedFormat
from modelswap_engine.sources.adapter import CONFIG_FILE, MAX_CONFIG_BYTES, WEIGHTS_FILE
from modelswap_engine.sources.remote.contents import Places, read_header, read_whole
from modelswap_engine.sources.remote.fetch import Fetcher
from modelswap_engine.sources.remote.folders import Folders
from modelswap_engine.sources.remote.port import FileStat, Folder
from modelswap_engine.store.content import ContentStore


class RemoteAdapter:
    """What :func:`open_adapter` finds; see :class:`sources.port.OpenedAdapter`.

    Args:
        config: the bytes of the config.
        tensors: of the header, hashes unknown.
        evidence: its manifest and the signature beside it; None where it has not both.
        places: its files as they were found.
        store: where bytes come to.
        fetcher: brings them.
        folders: opens the place again.
        keep: keeps blobs from making room for others, as long as they are among the last.
    """

    def __init__(
        self,
        *,
        config: bytes,
        tensors: Sequence[TensorEntry],
        evidence: Evidence | None,
        places: Places,
        store: ContentStore,
        fetcher: Fetcher,
        folders: Callable[[], Folders],
        keep: Callable[[frozenset[str]], None],
    ) -> None:
        self.config = config
        self.tensors: Mapping[str, TensorEntry] = {entry.name: entry for entry in tensors}
        self.evidence = evidence
        self._places = places
        self._store, self._fetcher, self._folders, self._keep = store, fetcher, folders, keep

    async def hash(self) -> dict[str, str]:
        """Fetch all tensors and return name → sha256."""
        async with self._folders() as folders:
            hashes, _ = await self._fetcher.fetch(list(self.tensors.values()), open_folder=folders, places=self._places)
        await asyncio.to_thread(self._keep, frozenset(hashes.values()))
        return hashes

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
        evidence = await _evidence(folder, there)
    return RemoteAdapter(
        config=config,
        tensors=tensors,
        evidence=evidence,
        places={"": {name: there[name] for name in (CONFIG_FILE, WEIGHTS_FILE)}},
        store=store,
        fetcher=fetcher,
        folders=make_folders,
        keep=keep,
    )


async def _evidence(folder: Folder, there: Mapping[str, FileStat]) -> Evidence | None:
    if MANIFEST_FILE not in there or SIGNATURE_FILE not in there:
        return None
    manifest = await read_whole(folder, MANIFEST_FILE, there[MANIFEST_FILE], limit=MAX_MANIFEST_BYTES)
    return Evidence(
        manifest, await read_whole(folder, SIGNATURE_FILE, there[SIGNATURE_FILE], limit=MAX_SIGNATURE_BYTES)
    )
