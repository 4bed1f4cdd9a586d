"""The port of other pods that may have what is wanted: asked by hash before the source is, and proved by it.

Whoever brings bytes writes them to a sink and is told whether they were the right ones; it knows neither the store nor
what the bytes are of.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Protocol, TypeVar

from modelswap_engine.checkpoint.manifest import TensorEntry
from modelswap_engine.sources.remote.reserving import expected
from modelswap_engine.store.content import ContentStore
from modelswap_engine.store.disk import writing
from modelswap_engine.store.incoming import Incoming

T = TypeVar("T")


class Sink(Protocol):
    """Where bytes of blobs go; each blob is written by one task at a time."""

    async def write(self, sha256: str, at: int, data: bytes) -> None:
        """Write a piece of a blob at one of its bytes.

        Raises:
            InsufficientDisk, SourceUnreadable: the disk does not take it.
        """

    async def finish(self, sha256: str) -> bool:
        """Say whether a blob that was written to its end is the right one; it is to be written again when not."""

    def again(self, sha256: str) -> None:
        """Forget what was written of a blob."""


class Sharing(Protocol):
    """Other pods."""

    async def bring(self, wanted: Sequence[tuple[str, int]], sink: Sink) -> None:
        """Bring those of the wanted blobs (sha256, bytes) that other pods have and give.

        Raises:
            InsufficientDisk, SourceUnreadable: of the sink. Nothing that a pod does is an error.
        """

    async def manifest(self, digest: str, *, prove: Callable[[bytes], T | None]) -> T | None:
        """Return the first manifest of a version, as other pods have it, that ``prove`` makes something of.

        ``prove`` may take its time: it is called in a thread.
        """


class _Nobody:
    async def bring(self, wanted: Sequence[tuple[str, int]], sink: Sink) -> None:
        """Bring nothing."""

    async def manifest(self, digest: str, *, prove: Callable[[bytes], T | None]) -> T | None:
        """Know none."""
        return None


NOBODY: Final[Sharing] = _Nobody()
"""No other pods."""


async def take(
    sharing: Sharing, missing: Iterable[TensorEntry], *, store: ContentStore, travelled: Callable[[int], None]
) -> int:
    """Have other pods' tensors in the store; return how many bytes came for it, right or wrong.

    Args:
        sharing: brings them.
        missing: tensors that the store does not have.
        store: where they go.
        travelled: called with the bytes that have come so far.

    Raises:
        InsufficientDisk, SourceUnreadable: the store cannot hold them.
    """
    if sharing is NOBODY:
        return 0
    wanted = [(entry.sha256, entry.nbytes) for entry in missing if entry.nbytes]
    async with expected(store, wanted) as coming:
        sink = _Arriving(store, {incoming.sha256: incoming for incoming in coming}, travelled=travelled)
        await sharing.bring(wanted, sink)
    return sink.bytes


class _Arriving:
    """The sink in front of the content store."""

    def __init__(
        self, store: ContentStore, coming: Mapping[str, Incoming], *, travelled: Callable[[int], None]
    ) -> None:
        self._store = store
        self._coming = coming
        self._travelled = travelled
        self.bytes = 0

    async def write(self, sha256: str, at: int, data: bytes) -> None:
        """Write a piece."""
        await asyncio.to_thread(self._write, self._coming[sha256], at, data)
        self.bytes += len(data)
        self._travelled(self.bytes)

    @staticmethod
    def _write(incoming: Incoming, at: int, data: bytes) -> None:
        with writing(incoming.path.parent):
            incoming.write(at, data)

    async def finish(self, sha256: str) -> bool:
        """Hash it; the store forgets what is wrong."""
        return await asyncio.to_thread(self._store.accept, self._coming[sha256]) == sha256

    def again(self, sha256: str) -> None:
        """Forget what was written."""
        self._coming[sha256].again()
