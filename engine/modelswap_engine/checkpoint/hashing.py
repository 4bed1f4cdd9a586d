"""Hashing tensors where they lie: all cores, bounded memory, nothing mapped."""

import contextlib
import hashlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from modelswap_engine.checkpoint import files
from modelswap_engine.checkpoint.crew import Crew, Progress
from modelswap_engine.checkpoint.files import Opened, Stamp
from modelswap_engine.checkpoint.manifest import TensorEntry
from modelswap_engine.protocol.errors import SourceChanged


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
    with reopened({entry.file for entry in order}, directory=directory, roots=roots, stamps=stamps) as opened:
        crew = Crew("hashing", total=sum(entry.nbytes for entry in order), progress=progress, stop=stop)

        def hashed(entry: TensorEntry) -> str:
            digest = hashlib.sha256()
            for chunk in crew.chunks(opened[entry.file], entry.offset, entry.nbytes):
                digest.update(chunk)
            return digest.hexdigest()

        hashes = crew.run(hashed, order)
    return {entry.name: value for entry, value in zip(order, hashes, strict=True)}


@contextlib.contextmanager
def reopened(
    names: Iterable[str], *, directory: Path, roots: Sequence[Path], stamps: Mapping[str, Stamp]
) -> Iterator[dict[str, Opened]]:
    """Open files whose headers were read; at the end of the block they must still be what they were.

    Raises:
        SourceChanged: a file is not, or not any more, the one whose header was read.
        SourceUnreadable: the file system refuses.
    """
    with contextlib.ExitStack() as stack:
        opened = {
            name: stack.enter_context(reopen(directory, name, roots=roots, stamp=stamps[name]))
            for name in sorted(names)
        }
        yield opened
        for file in opened.values():
            files.check_stamp(file)


@contextlib.contextmanager
def reopen(directory: Path, name: str, *, roots: Sequence[Path], stamp: Stamp) -> Iterator[Opened]:
    """Open a file again whose header was read.

    Raises:
        SourceChanged: it is not that file any more.
        InvalidCheckpoint, SourceUnreadable: see :func:`files.open_inside`.
    """
    try:
        with files.open_inside(directory, name, roots=roots) as opened:
            if opened.stamp != stamp:
                raise SourceChanged(f"{name}: replaced after its header was read", details={"file": name})
            yield opened
    except FileNotFoundError:
        raise SourceChanged(f"{name}: removed after its header was read", details={"file": name}) from None
