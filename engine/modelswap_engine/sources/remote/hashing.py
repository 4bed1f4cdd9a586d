"""Hashing a checkpoint elsewhere as its bytes pass by: each travels once, none is kept.

What breaks off goes on where it stopped. Memory does not grow with the checkpoint: each request holds one piece.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Final

from modelswap_engine.checkpoint.build import with_hashes
from modelswap_engine.checkpoint.crew import Progress
from modelswap_engine.checkpoint.manifest import Manifest, TensorEntry
from modelswap_engine.protocol.errors import SourceUnreadable
from modelswap_engine.sources.remote.contents import OpenFolder, RemoteContents
from modelswap_engine.sources.remote.fetch import DEFAULT, FetchSettings

RUN_BYTES: Final = 64 << 20
"""Tensors that lie one after the other share a request of about so many bytes; a larger one has its own."""


async def hash_remote(
    contents: RemoteContents,
    open_folder: OpenFolder,
    *,
    progress: Progress | None = None,
    settings: FetchSettings = DEFAULT,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> Manifest:
    """Read every tensor and return the manifest.

    Raises:
        SourceChanged, SourceUnreadable, SourceDenied: not now; the message names the file and where it stopped.
    """
    runs = iter(list(_runs(contents.tensors.values())))
    hashing = _Hashing(contents, open_folder, progress=progress, settings=settings, sleep=sleep)

    async def work() -> None:
        for run in runs:
            await hashing.run(run)

    tasks = [asyncio.create_task(work()) for _ in range(settings.parallel)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return with_hashes(contents, hashing.hashes)


def _runs(entries: Iterable[TensorEntry]) -> Iterator[Sequence[TensorEntry]]:
    run: list[TensorEntry] = []
    for entry in sorted(entries, key=lambda entry: (entry.place, entry.file, entry.offset, entry.nbytes)):
        fits = (
            run
            and (run[0].place, run[0].file) == (entry.place, entry.file)
            and run[-1].offset + run[-1].nbytes == entry.offset
        )
        if run and not (fits and entry.offset + entry.nbytes - run[0].offset <= RUN_BYTES):
            yield run
            run = []
        run.append(entry)
    if run:
        yield run


class _Hashing:
    def __init__(
        self,
        contents: RemoteContents,
        open_folder: OpenFolder,
        *,
        progress: Progress | None,
        settings: FetchSettings,
        sleep: Callable[[float], Awaitable[None]],
    ) -> None:
        self._contents, self._open, self._progress = contents, open_folder, progress
        self._settings, self._sleep = settings, sleep
        self._total = sum(entry.nbytes for entry in contents.tensors.values())
        self._done = 0
        self.hashes: dict[str, str] = {}

    async def run(self, entries: Sequence[TensorEntry]) -> None:
        """Hash tensors that lie one after the other in a file."""
        first, last = entries[0], entries[-1]
        folder, stat = await self._open(first.place), self._contents.places[first.place][first.file]
        at, stop, failures = first.offset, last.offset + last.nbytes, 0
        hashes = _Hashes(entries)
        while at < stop:
            try:
                async for data in folder.stream(first.file, at, stop, stat=stat):
                    await asyncio.to_thread(hashes.update, memoryview(data))
                    at, failures = at + len(data), 0
                    self._passed(len(data))
                if at < stop:
                    raise SourceUnreadable(f"{folder.uri}: {first.file} broke off at byte {at} of {stop}")
            except SourceUnreadable:
                failures += 1
                if failures >= self._settings.attempts:
                    raise
                await self._sleep(min(self._settings.longest_pause, self._settings.first_pause * 2**failures))
        self.hashes |= hashes.done()

    def _passed(self, count: int) -> None:
        self._done += count
        if self._progress is not None:
            self._progress(self._done, self._total)


class _Hashes:
    """Cuts bytes that come one after the other into tensors."""

    def __init__(self, entries: Sequence[TensorEntry]) -> None:
        self._hashes = [(entry, hashlib.sha256()) for entry in entries]
        self._current, self._left = 0, entries[0].nbytes

    def update(self, data: memoryview) -> None:
        while len(data):
            while not self._left:
                self._current += 1
                self._left = self._hashes[self._current][0].nbytes
            part = data[: self._left]
            self._hashes[self._current][1].update(part)
            self._left -= len(part)
            data = data[len(part) :]

    def done(self) -> dict[str, str]:
        return {entry.name: digest.hexdigest() for entry, digest in self._hashes}
