"""Bringing tensors from elsewhere into the content store: by ranges, several at once, hashed before they count.

What breaks off goes on where it stopped; what hashes to something else is asked for once more and then refused. Memory
does not grow with what is fetched: each request holds one piece. It knows neither protocols nor what tensors are for.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Final

import msgspec

from modelswap_engine.checkpoint.crew import cores
from modelswap_engine.checkpoint.manifest import TensorEntry
from modelswap_engine.protocol.errors import ManifestMismatch, ModelswapError, SourceUnreadable
from modelswap_engine.sources.remote.contents import OpenFolder, Places, all_of
from modelswap_engine.sources.remote.port import RETRY_AFTER
from modelswap_engine.sources.remote.reserving import expected
from modelswap_engine.sources.remote.spans import Span, Wanted, plan_spans
from modelswap_engine.store.content import ContentStore
from modelswap_engine.store.incoming import Incoming

ROUNDS: Final = 2
"""How often a tensor whose bytes are wrong is asked for."""


class FetchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How hard a source is asked. ``attempts`` count from the last byte that came; seconds double up to the longest."""

    parallel: int = 8
    attempts: int = 6
    first_pause: float = 0.5
    longest_pause: float = 20.0


DEFAULT: Final = FetchSettings()


class Fetcher:
    """See the module.

    Args:
        store: where the bytes go.
        settings: how hard to ask.
        sleep: waits that many seconds.
        chance: gives numbers in [0, 1), so that pods do not ask again at the same moment.
    """

    def __init__(
        self,
        store: ContentStore,
        *,
        settings: FetchSettings = DEFAULT,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._store = store
        self._settings = settings
        self._sleep = sleep
        self._chance = chance

    async def _pause(self, failures: int) -> None:
        settings = self._settings
        longest = min(settings.longest_pause, settings.first_pause * 2 ** (failures - 1))
        await self._sleep(longest * (0.5 + self._chance() / 2))

    async def fetch(
        self,
        entries: Sequence[TensorEntry],
        *,
        open_folder: OpenFolder,
        places: Places,
        travelled: Callable[[int], None] | None = None,
    ) -> tuple[dict[str, str], int]:
        """Fetch tensors; return name → sha256, and how many bytes of tensors came for it.

        Tensors whose hash is not known yet are fetched too, and get it.

        Raises:
            ManifestMismatch: a tensor has other bytes than its hash says, twice.
            InsufficientDisk: the store cannot hold them.
            SourceChanged, SourceUnreadable, SourceDenied: of the source.
        """
        # A tensor that occurs twice travels once; one without a hash is only like itself.
        distinct = list({entry.sha256 or f"?{entry.name}": entry for entry in entries}.values())
        async with expected(self._store, [(entry.sha256, entry.nbytes) for entry in distinct]) as coming:
            run = _Run(self, distinct, coming, open_folder=open_folder, places=places, travelled=travelled)
            # What the disk does not take is no fault of the source: it ends the fetch, and is not written again.
            with self._store.writing():
                await run.all()
        hashes = {entry.sha256 or f"?{entry.name}": run.hashes[index] for index, entry in enumerate(distinct)}
        return {entry.name: hashes[entry.sha256 or f"?{entry.name}"] for entry in entries}, run.bytes


class _Run:
    """One fetch. Tensors are numbers here: their place in ``entries``."""

    def __init__(
        self,
        fetcher: Fetcher,
        entries: Sequence[TensorEntry],
        coming: Sequence[Incoming],
        *,
        open_folder: OpenFolder,
        places: Places,
        travelled: Callable[[int], None] | None,
    ) -> None:
        self._fetcher, self._entries, self._coming = fetcher, entries, coming
        self._open, self._places, self._travelled = open_folder, places, travelled
        self._hashing = asyncio.Semaphore(cores())
        self._accepting: set[int] = set()
        self.hashes: dict[int, str] = {}
        self.bytes = 0

    async def all(self) -> None:
        left = list(range(len(self._entries)))
        await self._accept([number for number in left if not self._entries[number].nbytes])
        for _ in range(ROUNDS):
            left = [number for number in left if number not in self.hashes]
            if not left:
                return
            await self._bring(iter(plan_spans(self._wanted(number) for number in left)))
        wrong = [self._entries[number] for number in left if number not in self.hashes]
        if wrong:
            raise await self._refused(wrong)

    def _wanted(self, number: int) -> Wanted:
        entry = self._entries[number]
        return Wanted(key=str(number), place=entry.place, file=entry.file, offset=entry.offset, nbytes=entry.nbytes)

    async def _bring(self, spans: Iterator[Span]) -> None:
        async def work() -> None:
            for span in spans:
                await self._span(span)

        await all_of(work() for _ in range(self._fetcher._settings.parallel))

    async def _span(self, span: Span) -> None:
        folder, stat = await self._open(span.place), self._places[span.place][span.file]
        done, failures = 0, 0
        while span.start + done < span.stop:
            try:
                async for data in folder.stream(span.file, span.start + done, span.stop, stat=stat):
                    await self._place(span, done, data)
                    done, failures = done + len(data), 0
                if span.start + done < span.stop:
                    raise SourceUnreadable("it broke off")
            except SourceUnreadable as error:
                failures += 1
                if failures >= self._fetcher._settings.attempts or error.details.get(RETRY_AFTER):
                    raise self._told(error, span, done) from None
                await self._fetcher._pause(failures)
            except ModelswapError as error:
                raise self._told(error, span, done) from None
        await self._accept([int(piece.key) for piece in span.pieces if self._coming[int(piece.key)].complete])

    async def _place(self, span: Span, done: int, data: bytes) -> None:
        if span.start + done + len(data) > span.stop:
            raise SourceUnreadable("it sent more than was asked for")
        await asyncio.to_thread(self._write, span, done, memoryview(data))
        self.bytes += len(data)
        if self._travelled is not None:
            self._travelled(self.bytes)

    def _write(self, span: Span, done: int, data: memoryview) -> None:
        for piece in span.pieces:
            first, last = max(piece.skip, done), min(piece.skip + piece.nbytes, done + len(data))
            if first < last:
                incoming = self._coming[int(piece.key)]
                incoming.write(piece.at + first - piece.skip, data[first - done : last - done])

    async def _accept(self, numbers: Sequence[int]) -> None:
        async def hashed(number: int) -> None:
            incoming = self._coming[number]
            async with self._hashing:
                actual = await asyncio.to_thread(self._fetcher._store.accept, incoming)
            if incoming.sha256 in {"", actual}:
                self.hashes[number] = actual
            else:
                self._accepting.discard(number)

        # Two requests that end one tensor together both find it complete.
        fresh = [number for number in numbers if number not in self._accepting]
        self._accepting.update(fresh)
        await asyncio.gather(*(hashed(number) for number in fresh))

    def _told(self, error: ModelswapError, span: Span, done: int) -> ModelswapError:
        at = span.start + done
        piece = next((piece for piece in span.pieces if at < span.start + piece.skip + piece.nbytes), span.pieces[-1])
        tensor = self._entries[int(piece.key)].name
        return type(error)(
            f"{span.file}, bytes {at} to {span.stop} (tensor {tensor}): {error.message}",
            advice=error.advice,
            details={**error.details, "file": span.file, "tensor": tensor, "range": f"{at}-{span.stop}"},
        )

    async def _refused(self, wrong: Sequence[TensorEntry]) -> ManifestMismatch:
        entry = wrong[0]
        folder = await self._open(entry.place)
        revision = self._places[entry.place][entry.file].revision
        return ManifestMismatch(
            f"{folder.uri}: tensor {entry.name} ({entry.file}, bytes {entry.offset} to {entry.offset + entry.nbytes}"
            f"{f', revision {revision}' if revision else ''}) does not hash to {entry.sha256[:16]}…"
            + (f", nor do {len(wrong) - 1} others" if len(wrong) > 1 else ""),
            advice="write the manifest again (modelswap manifest build), or upload the file that it was made of",
            details={"file": entry.file, "tensor": entry.name, "expected": entry.sha256, "revision": revision},
        )
