"""Folders in memory behind the port of places, that count what is asked of them and fail as a test says."""

import hashlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from pathlib import Path

from modelswap_engine.protocol.errors import ModelswapError, SourceChanged, SourceNotFound
from modelswap_engine.sources.remote.port import FileStat

Fault = Callable[[str, int, int], ModelswapError | None]
"""Called with (file, start, stop) of a range before a piece of it is given; what it returns is raised."""


class MemoryPlaces:
    """An opener of ``mem://`` URIs.

    Attributes:
        folders: URI → name → bytes.
        asked: each range that was asked for, as (URI, file, start, stop).
        given: bytes that were given of each file.
        opened: how many folders are open.
        credentials: what the last folder was opened with.
    """

    def __init__(self, *, piece: int = 7, revisions: bool = True) -> None:
        self.folders: dict[str, dict[str, bytes]] = {}
        self.asked: list[tuple[str, str, int, int]] = []
        self.given: dict[str, int] = {}
        self.opened = 0
        self.credentials = ""
        self.faults: list[Fault] = []
        self.piece = piece
        self.revisions = revisions

    def upload(self, uri: str, directory: Path) -> str:
        self.folders[uri] = {entry.name: entry.read_bytes() for entry in directory.iterdir()}
        return uri

    async def open(self, uri: str, *, credentials: str) -> "MemoryFolder":
        if uri not in self.folders:
            raise SourceNotFound(f"{uri}: nothing is there")
        self.opened += 1
        self.credentials = credentials
        return MemoryFolder(self, uri)

    def forget(self) -> None:
        """Count from here."""
        self.asked.clear()
        self.given.clear()


class MemoryFolder:
    def __init__(self, places: MemoryPlaces, uri: str) -> None:
        self.uri = uri
        self._places = places

    async def files(self, names: Iterable[str]) -> Mapping[str, FileStat]:
        there = self._places.folders[self.uri]
        return {name: self._stat(there[name]) for name in names if name in there}

    def _stat(self, data: bytes) -> FileStat:
        revision = hashlib.sha256(data).hexdigest()[:12] if self._places.revisions else ""
        return FileStat(size=len(data), revision=revision)

    async def stream(self, name: str, start: int, stop: int, *, stat: FileStat) -> AsyncIterator[bytes]:
        places = self._places
        places.asked.append((self.uri, name, start, stop))
        for at in range(start, stop, places.piece):
            for fault in places.faults:
                if (error := fault(name, at, stop)) is not None:
                    raise error
            data = places.folders[self.uri][name]
            if self._stat(data).revision != stat.revision:
                raise SourceChanged(f"{name} was overwritten")
            piece = data[at : min(at + places.piece, stop)]
            places.given[name] = places.given.get(name, 0) + len(piece)
            yield piece

    async def close(self) -> None:
        self._places.opened -= 1
