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
from modelswap_engine.checkpoint.hashing import hash_tensors
from modelswap_engine.checkpoint.layout import Reader
from modelswap_engine.checkpoint.manifest import TensorEntry
from modelswap_engine.protocol.errors import SourceUnreadable, UnsupportedFormat

CONFIG_FILE: Final = "adapter_config.json"
WEIGHTS_FILE: Final = "adapter_model.safetensors"
MAX_CONFIG_BYTES: Final = 1 << 20
_PICKLE: Final = "adapter_model.bin"


class LocalAdapter:
    """What :func:`open_adapter` finds; see :class:`sources.port.OpenedAdapter`.

    Args:
        directory: the folder, resolved.
        roots: resolved folders that links in it may lead to.
        reader: knows the files that were read.
        config: the bytes of the config.
        tensors: the tensors of the header.
    """

    def __init__(
        self, directory: Path, *, roots: Sequence[Path], reader: Reader, config: bytes, tensors: Sequence[TensorEntry]
    ) -> None:
        self._directory, self._roots, self._reader = directory, tuple(roots), reader
        self._config = config
        self._tensors = {entry.name: entry for entry in tensors}

    @property
    def config(self) -> bytes:
        """``adapter_config.json`` as it is."""
        return self._config

    @property
    def tensors(self) -> Mapping[str, TensorEntry]:
        """Its tensors by name, hashes unknown."""
        return self._tensors

    async def hash(self) -> dict[str, str]:
        """Return name → sha256 of the bytes of every tensor."""
        stop = threading.Event()
        try:
            return await asyncio.to_thread(self._hash, stop)
        except asyncio.CancelledError:
            stop.set()  # the thread ends at its next chunk
            raise

    def _hash(self, stop: threading.Event) -> dict[str, str]:
        return hash_tensors(
            self._tensors.values(),
            directory=self._directory,
            roots=self._roots,
            stamps=self._reader.stamps,
            stop=stop,
        )

    def range_of(self, entry: TensorEntry, *, sha256: str) -> TensorRange:
        """Say where the bytes of a tensor are."""
        return TensorRange(
            name=entry.name,
            dtype=entry.dtype,
            shape=entry.shape,
            path=str(self._reader.paths[entry.file]),
            offset=entry.offset,
            nbytes=entry.nbytes,
            sha256=sha256,
        )


def open_adapter(directory: Path, *, roots: Sequence[Path]) -> LocalAdapter:
    """Read the config and the header of an adapter's folder.

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
    return LocalAdapter(directory, roots=roots, reader=reader, config=config, tensors=tensors)


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
