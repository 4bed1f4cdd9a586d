"""Hashing tensors where they lie: all cores, bounded memory, nothing mapped.

One thread per core, each with one reused buffer; hashlib and the reads release the interpreter lock, so the speed is
that of SHA-256 times the cores. The largest tensors go first, so that no core is left alone with one at the end.
"""

import contextlib
import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Final

from modelswap_engine.checkpoint import files
from modelswap_engine.checkpoint.files import Opened, Stamp
from modelswap_engine.checkpoint.manifest import TensorEntry
from modelswap_engine.protocol.errors import Cancelled, SourceChanged

CHUNK_BYTES: Final = 8 << 20
Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all), from any thread but never from two at once."""


def cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class _Hasher:
    def __init__(self, opened: Mapping[str, Opened], total: int, progress: Progress | None, stop: threading.Event):
        self._opened, self._total, self._progress, self._stop = opened, total, progress, stop
        self._local = threading.local()
        self._lock = threading.Lock()
        self._done = 0
        self.abandoned = False

    def __call__(self, entry: TensorEntry) -> str:
        buffer = self._buffer()
        digest = hashlib.sha256()
        opened = self._opened[entry.file]
        for position in range(0, entry.nbytes, CHUNK_BYTES):
            if self.abandoned or self._stop.is_set():
                raise Cancelled("hashing was cancelled")
            view = buffer[: min(CHUNK_BYTES, entry.nbytes - position)]
            files.read_into(opened, entry.offset + position, view)
            digest.update(view)
            self._advance(len(view))
        return digest.hexdigest()

    def _buffer(self) -> memoryview:
        if not hasattr(self._local, "buffer"):
            self._local.buffer = memoryview(bytearray(CHUNK_BYTES))
        buffer: memoryview = self._local.buffer
        return buffer

    def _advance(self, count: int) -> None:
        with self._lock:
            self._done += count
            if self._progress is not None:
                self._progress(self._done, self._total)


def hash_tensors(
    entries: Iterable[TensorEntry],
    *,
    directory: Path,
    roots: Sequence[Path],
    stamps: Mapping[str, Stamp],
    progress: Progress | None = None,
    stop: threading.Event | None = None,
) -> dict[str, str]:
    """Return name → sha256 (64 hex) of the bytes of each tensor.

    Args:
        entries: which tensors, with their place.
        directory: the checkpoint's folder.
        roots: resolved folders that links may lead to.
        stamps: what the files were when their headers were read; anything else is refused.
        progress: told about every chunk.
        stop: set from elsewhere, it ends the work with ``Cancelled``.

    Raises:
        SourceChanged: a file is not, or not any more, the one whose header was read.
        SourceUnreadable: reading failed.
        Cancelled: ``stop`` was set.
    """
    order = sorted(entries, key=lambda entry: entry.nbytes, reverse=True)
    with contextlib.ExitStack() as stack:
        opened = {
            name: stack.enter_context(_reopen(directory, name, roots=roots, stamp=stamps[name]))
            for name in sorted({entry.file for entry in order})
        }
        hasher = _Hasher(opened, sum(entry.nbytes for entry in order), progress, stop or threading.Event())
        with ThreadPoolExecutor(max_workers=cores(), thread_name_prefix="hash") as pool:
            futures = [pool.submit(hasher, entry) for entry in order]
            try:
                for future in as_completed(futures):
                    future.result()
            except BaseException:  # also Ctrl-C: the other threads end at their next chunk
                hasher.abandoned = True
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        for file in opened.values():
            files.check_stamp(file)
    return {entry.name: future.result() for entry, future in zip(order, futures, strict=True)}


@contextlib.contextmanager
def _reopen(directory: Path, name: str, *, roots: Sequence[Path], stamp: Stamp) -> Iterator[Opened]:
    try:
        with files.open_inside(directory, name, roots=roots) as opened:
            if opened.stamp != stamp:
                raise SourceChanged(f"{name}: replaced after its header was read", details={"file": name})
            yield opened
    except FileNotFoundError:
        raise SourceChanged(f"{name}: removed after its header was read", details={"file": name}) from None
