"""Where the files of an uncompressed tar archive lie in it, by ranges: headers are read, contents are passed over.

Hostile input: sizes, names and counts are looked at before they are believed. Knows no registry.
"""

import itertools
import tarfile
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

from modelswap_engine.checkpoint.rules import invisible, refuse, shown

BLOCK: Final = tarfile.BLOCKSIZE
WINDOW_BYTES: Final = 16 << 10
"""What is read at once: small files lie close together."""
MAX_HEADERS: Final = 4096
MAX_EXTENSION_BYTES: Final = 64 << 10
_FILES: Final = frozenset({tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE})
_LONG_NAME: Final = tarfile.GNUTYPE_LONGNAME
_EXTENSIONS: Final = frozenset({tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE, _LONG_NAME})
_WITHOUT_DATA: Final = frozenset(
    {tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE}
)

ReadRange = Callable[[int, int], Awaitable[bytes]]
"""Returns bytes ``start`` to ``stop`` (excluded) of an archive."""


class Member(NamedTuple):
    """A regular file of an archive: so many bytes at an offset."""

    path: str
    offset: int
    size: int


class _Extended(NamedTuple):
    """What is said of the next header; "" and -1: nothing."""

    path: str = ""
    size: int = -1


async def members(read: ReadRange, size: int, *, name: str) -> tuple[Member, ...]:
    """Return the regular files of an archive, in order; links, devices and paths that lead out of it are left out.

    Args:
        read: reads the archive.
        size: of the archive, in bytes.
        name: of the archive, for messages.

    Raises:
        InvalidCheckpoint: it is no such archive, or breaks a rule.
    """
    archive, found = _Archive(read, size, name), list[Member]()
    offset, extended = 0, _Extended()
    for count in itertools.count(1):
        block = await archive.part(offset, BLOCK)
        if not block.strip(b"\0"):
            break
        if count > MAX_HEADERS:
            refuse(f"more than {MAX_HEADERS} headers", file=name, advice="push the files as they are")
        info = archive.header(block)
        begins = offset + BLOCK
        if info.type in _EXTENSIONS:
            extended = archive.extended(info, await archive.part(begins, info.size), extended)
            offset = begins + _padded(info.size)
            continue
        nbytes = info.size if extended.size < 0 else extended.size
        offset = begins + (0 if info.type in _WITHOUT_DATA else _padded(nbytes))
        if begins + nbytes > size and info.type not in _WITHOUT_DATA:
            refuse(f"{nbytes} bytes at {begins} are said to be in it, it has {size}", file=name)
        path = _inside(extended.path or info.name)
        if info.type in _FILES and path:
            found.append(Member(path, begins, nbytes))
        if info.type != tarfile.XGLTYPE:
            extended = _Extended()
    return tuple(found)


class _Archive:
    """One archive, and what of it was read last."""

    def __init__(self, read: ReadRange, size: int, name: str) -> None:
        self._read, self._size, self._name = read, size, name
        self._window, self._at = b"", 0

    async def part(self, offset: int, count: int) -> bytes:
        if not self._at <= offset <= offset + count <= self._at + len(self._window):
            stop = min(self._size, offset + max(count, WINDOW_BYTES))
            self._window, self._at = await self._read(offset, stop) if offset < stop else b"", offset
        return self._window[offset - self._at :][:count]

    def header(self, block: bytes) -> tarfile.TarInfo:
        try:
            info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.TarError:
            refuse("not an uncompressed tar archive, or one that was cut short", file=self._name)
        if info.type in _EXTENSIONS and info.size > MAX_EXTENSION_BYTES:
            refuse(f"an extended header of {info.size} bytes; at most {MAX_EXTENSION_BYTES} are read", file=self._name)
        if info.size < 0 or info.type == tarfile.GNUTYPE_SPARSE:
            refuse(f"{shown(info.name, 100)}: a sparse file, or one of no size", file=self._name)
        return info

    def extended(self, info: tarfile.TarInfo, data: bytes, before: _Extended) -> _Extended:
        if info.type == _LONG_NAME:
            return before._replace(path=data.rstrip(b"\0").decode(errors="surrogateescape"))
        said = self._records(data)
        if any(key.startswith(b"GNU.sparse") for key in said):
            refuse("it holds a sparse file", file=self._name)
        path, size = said.get(b"path", b"").decode(errors="surrogateescape"), said.get(b"size", b"")
        if size and not (size.isdigit() and len(size) < 20):
            refuse("an extended header with a bad size", file=self._name)
        return _Extended(path or before.path, int(size) if size else before.size)

    def _records(self, data: bytes) -> dict[bytes, bytes]:
        """Read ``length key=value`` lines (pax)."""
        said = {}
        while data.strip(b"\0"):
            length = data[:6].partition(b" ")[0]
            end = int(length) if length.isdigit() else 0
            if not len(length) + 1 < end <= len(data):
                refuse("an extended header that cannot be read", file=self._name)
            key, _, value = data[len(length) + 1 : end].removesuffix(b"\n").partition(b"=")
            said[key], data = value, data[end:]
        return said


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _inside(path: str) -> str:
    """Return a path without what does not count; "" for one that is no file's, or leads out of the archive."""
    parts = [part for part in path.split("/") if part != "."]
    if path.endswith("/") or any(part in {"", ".."} for part in parts) or invisible(path):
        return ""
    return "/".join(parts)
