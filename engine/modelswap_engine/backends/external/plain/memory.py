"""Checksums that an engine showed right after it had loaded a version from proven files, kept for the next time.

What a checksum is depends on the engine's version, the device, the dtype and how the model is split, so they are kept
apart by all of these, besides by the version's digest. A file that cannot be read is as good as none.
"""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from modelswap_engine.backends.external.plain.sums import Sums

_MAX_BYTES: Final = 64 << 20


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """All that a checksum depends on besides the bytes."""

    version: str
    device: str
    dtype: str
    quantization: str
    tp_size: int
    pp_size: int
    dp_size: int


class _Remembered(msgspec.Struct, frozen=True, kw_only=True):
    digest: str
    layout: Layout
    ranks: dict[int, dict[str, str]]


class SumMemory:
    """Remembered checksums in a folder; the calls block."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def recall(self, digest: str, layout: Layout) -> dict[int, dict[str, str]]:
        """Return rank → checksums of a version; empty when none are remembered."""
        path = self._path(digest, layout)
        try:
            if path.stat().st_size > _MAX_BYTES:
                return {}
            kept = msgspec.json.decode(path.read_bytes(), type=_Remembered)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return {}
        return kept.ranks if (kept.digest, kept.layout) == (digest, layout) else {}

    def remember(self, digest: str, layout: Layout, ranks: Mapping[int, Sums]) -> None:
        """Keep the checksums of a version.

        Raises:
            OSError: the disk does not take it.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._path(digest, layout)
        draft = path.with_suffix(f".{os.getpid()}")
        kept = _Remembered(digest=digest, layout=layout, ranks={rank: dict(sums) for rank, sums in ranks.items()})
        draft.write_bytes(msgspec.json.encode(kept))
        draft.replace(path)

    def _path(self, digest: str, layout: Layout) -> Path:
        key = hashlib.sha256(msgspec.json.encode((digest, layout))).hexdigest()[:32]
        return self._folder / f"{key}.json"
