"""Computed manifests, kept on disk so that an unchanged checkpoint is hashed once.

An entry counts only while every file of the checkpoint has the stamp it had when it was hashed, and what is read back
is validated like any manifest. A file written a moment before it was hashed could be rewritten within the same tick of
the file system's clock, so entries of such files are not kept. Losing the cache costs time, never correctness.
"""

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from modelswap_engine.checkpoint import manifest as manifests
from modelswap_engine.checkpoint.files import Stamp
from modelswap_engine.checkpoint.manifest import Manifest
from modelswap_engine.protocol.errors import ModelswapError

TICK_NS: Final = 2_000_000_000
MAX_ENTRIES: Final = 64


class _Entry(msgspec.Struct, frozen=True, kw_only=True):
    stamps: dict[str, Stamp]
    manifest: msgspec.Raw


class ManifestCache:
    """Manifests by folder.

    Args:
        directory: where entries lie; made when needed.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def get(self, checkpoint: Path, stamps: Mapping[str, Stamp]) -> Manifest | None:
        """Return the manifest of a folder, or None when it was not kept or a file has changed."""
        try:
            entry = msgspec.json.decode(self._file(checkpoint).read_bytes(), type=_Entry)
            if entry.stamps != stamps:
                return None
            return manifests.decode(bytes(entry.manifest))
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, ModelswapError):
            return None

    def put(self, checkpoint: Path, stamps: Mapping[str, Stamp], manifest: Manifest, *, read_at_ns: int) -> None:
        """Keep a manifest, unless a file is too young for its stamp to be trusted.

        Args:
            checkpoint: the folder.
            stamps: of all its files, when they were read.
            manifest: what was computed.
            read_at_ns: wall clock when reading began.
        """
        newest = max(max(stamp.mtime_ns, stamp.ctime_ns) for stamp in stamps.values())
        if newest > read_at_ns - TICK_NS:
            return
        entry = _Entry(stamps=dict(stamps), manifest=msgspec.Raw(manifests.encode(manifest)))
        with contextlib.suppress(OSError):  # a full or read-only disk costs time only
            self._directory.mkdir(parents=True, exist_ok=True)
            self._write(self._file(checkpoint), msgspec.json.encode(entry))
            self._prune()

    def _file(self, checkpoint: Path) -> Path:
        return self._directory / f"{hashlib.sha256(os.fsencode(checkpoint)).hexdigest()}.json"

    def _write(self, file: Path, data: bytes) -> None:
        descriptor, temporary = tempfile.mkstemp(dir=self._directory, suffix=".tmp")
        try:
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(data)
            Path(temporary).replace(file)
        except OSError:
            Path(temporary).unlink(missing_ok=True)
            raise

    def _prune(self) -> None:
        entries = sorted(self._directory.glob("*.json"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
        for entry in entries[MAX_ENTRIES:]:
            entry.unlink(missing_ok=True)
