"""Reading what a checkpoint elsewhere says of itself: its manifest, its headers, its side files; no tensor's bytes.

The rules are those of a local folder (``checkpoint/layout.py``). Where a manifest is there it says which files to look
at, and every tensor that it lists is held against the header of the file that has it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Final, TypeVar

import msgspec

from modelswap_engine.checkpoint import manifest as manifests
from modelswap_engine.checkpoint.canonical import MAX_SIDE_FILE_BYTES, SIDE_FILES
from modelswap_engine.checkpoint.header import PREFIX_BYTES, header_length, parse_header
from modelswap_engine.checkpoint.index import INDEX_FILE, MAX_INDEX_BYTES, join_shards, parse_index
from modelswap_engine.checkpoint.layout import (
    MAX_SIGNATURE_BYTES,
    SIGNATURE_FILE,
    SINGLE_FILE,
    Read,
    no_weights,
    one_layout,
)
from modelswap_engine.checkpoint.manifest import MANIFEST_FILE, MAX_MANIFEST_BYTES, Manifest, TensorEntry
from modelswap_engine.checkpoint.rules import refuse
from modelswap_engine.protocol.errors import SourceNotFound, SourceUnreadable
from modelswap_engine.sources.remote.port import FileStat, Folder

AT_ONCE: Final = 16
"""Files that are asked for at the same time."""
Places = Mapping[str, Mapping[str, FileStat]]
"""Place → file → what it was; the place "" is the folder itself."""
OpenFolder = Callable[[str], Awaitable[Folder]]
"""Returns the folder of a place; it is not the caller's to close."""
T = TypeVar("T")


class RemoteContents(Read, frozen=True, kw_only=True):
    """A checkpoint elsewhere as it was read; ``manifest`` is the shipped one, not yet compared."""

    manifest: Manifest | None
    places: dict[str, dict[str, FileStat]]


async def read_remote(open_folder: OpenFolder) -> RemoteContents:
    """Read the headers and side files of a checkpoint.

    Raises:
        SourceNotFound, UnsupportedFormat, InvalidCheckpoint, SourceNotAllowed: refused.
        SourceUnreadable, SourceDenied, SourceChanged: not now.
    """
    reader = _Reader(open_folder)
    there = await reader.look("", [MANIFEST_FILE, SIGNATURE_FILE, INDEX_FILE, SINGLE_FILE, *sorted(SIDE_FILES)])
    if not there:
        folder = await open_folder("")
        raise SourceNotFound(
            f"{folder.uri}: no checkpoint is there", advice="check the address, and that it was uploaded"
        )
    shipped = await reader.whole("", MANIFEST_FILE, limit=MAX_MANIFEST_BYTES)
    manifest = await asyncio.to_thread(manifests.decode, shipped) if shipped is not None else None
    tensors = await (reader.listed(manifest) if manifest is not None else reader.laid_out())
    if not tensors:
        refuse("the checkpoint has no tensors", file=SINGLE_FILE)
    signature = await reader.whole("", SIGNATURE_FILE, limit=MAX_SIGNATURE_BYTES) if shipped is not None else None
    names = sorted(SIDE_FILES & there.keys())
    found = await all_of(reader.whole("", name, limit=MAX_SIDE_FILE_BYTES) for name in names)
    return RemoteContents(
        tensors=tensors,
        side_files={name: data for name, data in zip(names, found, strict=True) if data is not None},
        shipped=shipped,
        signature=signature,
        header_bytes=reader.bytes_read,
        manifest=manifest,
        places=reader.used,
    )


async def read_whole(folder: Folder, name: str, stat: FileStat, *, limit: int) -> bytes:
    """Read a small file.

    Raises:
        InvalidCheckpoint: it is larger than the limit (bytes).
        SourceChanged, SourceUnreadable, SourceDenied: see :meth:`Folder.stream`.
    """
    if stat.size > limit:
        refuse(f"{stat.size} bytes; at most {limit} are read", file=name)
    return await read_range(folder, name, 0, stat.size, stat=stat)


async def read_header(folder: Folder, name: str, stat: FileStat) -> tuple[tuple[TensorEntry, ...], int]:
    """Read the header of a safetensors file; return its tensors and how many bytes it took.

    Raises:
        InvalidCheckpoint, UnsupportedFormat: it breaks a rule.
        SourceChanged, SourceUnreadable, SourceDenied: see :meth:`Folder.stream`.
    """
    prefix = await read_range(folder, name, 0, min(PREFIX_BYTES, stat.size), stat=stat)
    length = header_length(prefix, file_size=stat.size, file=name)
    header = await read_range(folder, name, PREFIX_BYTES, PREFIX_BYTES + length, stat=stat)
    return parse_header(header, file_size=stat.size, file=name), PREFIX_BYTES + length


async def read_range(folder: Folder, name: str, start: int, stop: int, *, stat: FileStat) -> bytes:
    """Read a range into memory; see :meth:`Folder.stream` for what it raises."""
    if start == stop:
        return b""
    data = b"".join([bytes(piece) async for piece in folder.stream(name, start, stop, stat=stat)])
    if len(data) != stop - start:
        raise SourceUnreadable(
            f"{folder.uri}: {name} broke off at byte {start + len(data)} of {stop}", details={"file": name}
        )
    return data


class _Reader:
    """Remembers what was seen, and what of it was read."""

    def __init__(self, open_folder: OpenFolder) -> None:
        self._open = open_folder
        self._seen: dict[str, dict[str, FileStat]] = {}
        self._turns = asyncio.Semaphore(AT_ONCE)
        self.used: dict[str, dict[str, FileStat]] = {}
        self.bytes_read = 0

    async def look(self, place: str, names: Iterable[str]) -> Mapping[str, FileStat]:
        seen = self._seen.setdefault(place, {})
        if wanted := [name for name in names if name not in seen]:
            seen.update(await (await self._open(place)).files(wanted))
        return seen

    async def whole(self, place: str, name: str, *, limit: int) -> bytes | None:
        stat = self._seen[place].get(name)
        if stat is None:
            return None
        async with self._turns:
            data = await read_whole(await self._open(place), name, stat, limit=limit)
        self._used(place, name, stat, len(data))
        return data

    async def header(self, place: str, name: str) -> tuple[TensorEntry, ...] | None:
        stat = self._seen[place].get(name)
        if stat is None:
            return None
        async with self._turns:
            entries, count = await read_header(await self._open(place), name, stat)
        self._used(place, name, stat, count)
        return entries

    def _used(self, place: str, name: str, stat: FileStat, count: int) -> None:
        self.used.setdefault(place, {})[name] = stat
        self.bytes_read += count

    async def listed(self, manifest: Manifest) -> dict[str, TensorEntry]:
        """What the files that a manifest names have; of files elsewhere only what it lists of them."""
        files = sorted({(entry.place, entry.file) for entry in manifest.tensors})
        for place in sorted({place for place, _ in files}):
            await self.look(place, [name for where, name in files if where == place])
        headers = await all_of(self.header(place, name) for place, name in files)
        found: dict[str, TensorEntry] = {}
        for (place, name), entries in zip(files, headers, strict=True):
            for entry in entries or ():
                listed = manifest.by_name.get(entry.name)
                if not place or (listed is not None and (listed.place, listed.file) == (place, name)):
                    if entry.name in found:
                        refuse(f"it is in {found[entry.name].file} as well", file=name, tensor=entry.name)
                    found[entry.name] = msgspec.structs.replace(entry, place=place)
        return found

    async def laid_out(self) -> dict[str, TensorEntry]:
        """What the folder itself has."""
        there = self._seen[""]
        one_layout(there.keys())
        index = await self.whole("", INDEX_FILE, limit=MAX_INDEX_BYTES)
        if index is None:
            entries = await self.header("", SINGLE_FILE)
            if entries is None:
                raise no_weights(frozenset(there))
            return {entry.name: entry for entry in entries}
        weight_map = parse_index(index)
        shards = sorted(set(weight_map.values()))
        await self.look("", shards)
        headers = await all_of(self.header("", shard) for shard in shards)
        pairs = []
        for shard, found in zip(shards, headers, strict=True):
            if found is None:
                refuse(f"it names {shard}, which is not there", file=INDEX_FILE, advice="upload the missing shard")
            pairs.append((shard, found))
        return join_shards(pairs, weight_map)


async def all_of(work: Iterable[Awaitable[T]]) -> list[T]:
    """Do all, and let none go on when one has failed."""
    tasks = [asyncio.ensure_future(item) for item in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
