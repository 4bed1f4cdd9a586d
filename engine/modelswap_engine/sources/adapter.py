"""A LoRA adapter in a local folder: its config, its header, and where the bytes of its tensors lie.

The same rules as for checkpoints: regular files inside the roots, safetensors only, headers read as hostile input,
bytes known by their hash.
"""

import asyncio
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from modelswap_engine.backends.port import TensorRange
from modelswap_engine.checkpoint import manifest as manifests
from modelswap_engine.checkpoint.build import check_shipped
from modelswap_engine.checkpoint.hashing import hash_tensors
from modelswap_engine.checkpoint.index import INDEX_FILE
from modelswap_engine.checkpoint.layout import (
    MAX_SIGNATURE_BYTES,
    SIGNATURE_FILE,
    SINGLE_FILE,
    Contents,
    Evidence,
    Read,
    Reader,
)
from modelswap_engine.checkpoint.manifest import MANIFEST_FILE, MAX_MANIFEST_BYTES, Manifest, TensorEntry
from modelswap_engine.protocol.errors import SourceUnreadable, UnsupportedFormat
from modelswap_engine.sources.local import revision_of
from modelswap_engine.sources.port import Identity
from modelswap_engine.sources.threads import MountThreads

CONFIG_FILE: Final = "adapter_config.json"
WEIGHTS_FILE: Final = "adapter_model.safetensors"
MAX_CONFIG_BYTES: Final = 1 << 20
_PICKLE: Final = "adapter_model.bin"


class LocalAdapter:
    """What :func:`open_adapter` finds; see :class:`sources.port.OpenedAdapter`.

    Args:
        contents: the folder as it was read.
        roots: resolved folders that links in it may lead to.
        threads: what reads in.
    """

    def __init__(self, contents: Contents, *, roots: Sequence[Path], threads: MountThreads) -> None:
        self._contents, self._roots, self._threads = contents, tuple(roots), threads

    @property
    def config(self) -> bytes:
        """``adapter_config.json`` as it is."""
        return self._contents.side_files[CONFIG_FILE]

    @property
    def tensors(self) -> Mapping[str, TensorEntry]:
        """Its tensors by name, hashes unknown."""
        return self._contents.tensors

    @property
    def evidence(self) -> Evidence | None:
        """Its manifest and what lies beside that."""
        return self._contents.evidence

    @property
    def revision(self) -> str:
        """One name for its config and weights as they were found."""
        return revision_of({name: self._contents.stamps[name] for name in (CONFIG_FILE, WEIGHTS_FILE)})

    async def hash(self, identity: Identity | None = None) -> dict[str, str]:
        """Return name → sha256 of the bytes of every tensor."""
        stop = threading.Event()
        try:
            return await self._threads.run(self._hash, stop)
        except asyncio.CancelledError:
            stop.set()  # the thread ends at its next chunk
            raise

    def _hash(self, stop: threading.Event) -> dict[str, str]:
        return hash_tensors(
            self._contents.tensors.values(),
            directory=self._contents.directory,
            roots=self._roots,
            stamps=self._contents.stamps,
            stop=stop,
        )

    def range_of(self, entry: TensorEntry, *, sha256: str) -> TensorRange:
        """Say where the bytes of a tensor are."""
        return TensorRange(
            name=entry.name,
            dtype=entry.dtype,
            shape=entry.shape,
            path=str(self._contents.paths[entry.file]),
            offset=entry.offset,
            nbytes=entry.nbytes,
            sha256=sha256,
        )


def read_manifest(manifest: bytes, *, config: bytes, tensors: Mapping[str, TensorEntry]) -> Manifest:
    """Return what a shipped manifest of an adapter says, held against its config and its header.

    Raises:
        InvalidCheckpoint, ManifestMismatch: it is none, or one of another adapter.
    """
    found = manifests.decode(manifest)
    read = Read(tensors=dict(tensors), side_files={CONFIG_FILE: config}, header_bytes=0)
    check_shipped(found, read, file=MANIFEST_FILE)
    return found


def is_adapter(directory: Path) -> bool:
    """Say whether a folder holds an adapter, and no checkpoint beside it."""
    there = [(directory / name).exists() for name in (CONFIG_FILE, SINGLE_FILE, INDEX_FILE)]
    return there == [True, False, False]


def open_adapter(directory: Path, *, roots: Sequence[Path], threads: MountThreads) -> LocalAdapter:
    """Read the config and the header of an adapter's folder; see :func:`read_adapter` for what it raises.

    ``threads`` are those of its mount.
    """
    return LocalAdapter(read_adapter(directory, roots=roots), roots=roots, threads=threads)


def read_adapter(directory: Path, *, roots: Sequence[Path]) -> Contents:
    """Read what an adapter's folder says of itself, its manifest and the signature beside that too.

    Raises:
        UnsupportedFormat: the folder holds no adapter in safetensors.
        InvalidCheckpoint: its header or its files break a rule.
        SourceUnreadable, SourceChanged: not now.
    """
    reader = Reader(directory, roots=roots)
    config = reader.whole(CONFIG_FILE, limit=MAX_CONFIG_BYTES) if directory.is_dir() else None
    if config is None:
        raise UnsupportedFormat(
            f"{directory}: no LoRA adapter: {CONFIG_FILE} is not there",
            advice=f"name the folder that holds {CONFIG_FILE} and {WEIGHTS_FILE}",
        )
    tensors = reader.header(WEIGHTS_FILE)
    if tensors is None:
        raise _no_weights(directory)
    manifest = reader.whole(MANIFEST_FILE, limit=MAX_MANIFEST_BYTES)
    return Contents(
        directory=directory,
        tensors={entry.name: entry for entry in tensors},
        side_files={CONFIG_FILE: config},
        shipped=manifest,
        signature=reader.whole(SIGNATURE_FILE, limit=MAX_SIGNATURE_BYTES) if manifest is not None else None,
        paths=reader.paths,
        stamps=reader.stamps,
        header_bytes=reader.bytes_read,
    )


def _no_weights(directory: Path) -> UnsupportedFormat | SourceUnreadable:
    try:
        pickled = (directory / _PICKLE).exists()
    except OSError as error:
        return SourceUnreadable(f"{directory}: {error.strerror}", advice="check the folder's permissions")
    if pickled:
        return UnsupportedFormat(
            f"{_PICKLE}: pickle files can run code and are never opened",
            advice="save the adapter in a place you trust with safe_serialization=True",
            details={"file": _PICKLE},
        )
    return UnsupportedFormat(f"{directory}: {WEIGHTS_FILE} is not there", advice="copy the adapter again")
