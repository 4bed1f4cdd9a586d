"""The content store: a folder of blobs named by their sha256, bounded, that never loses what somebody holds.

A blob appears by a rename, complete and proved, or not at all, so that a crash leaves nothing but files in
``incoming/``, which the next start removes. Who holds what is said by name (the digest of a version); blobs that nobody
holds go first when room is wanted. It knows bytes and hashes, and neither tensors nor where they are from. Everything
here blocks; whoever calls it from an event loop does so in a thread.
"""

import contextlib
import errno
import itertools
import os
import shutil
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO, Final

from modelswap_engine.checkpoint.rules import is_hash
from modelswap_engine.protocol.errors import InsufficientDisk, SourceUnreadable
from modelswap_engine.store.eviction import Blob, evict
from modelswap_engine.store.incoming import Incoming

SPARE_BYTES: Final = 64 << 20
"""Left on the disk for others: the journal, side files, logs."""
MIB: Final = 1 << 20


class ContentStore:
    """See the module.

    Args:
        folder: made when needed; this process is the only one that removes from it.
        limit_bytes: what all blobs together may take; 0: what the disk gives.
    """

    def __init__(self, folder: Path, *, limit_bytes: int = 0) -> None:
        self._blobs_folder = folder / "blobs"
        self._incoming = folder / "incoming"
        self._limit = limit_bytes
        self._lock = threading.Lock()
        self._blobs: dict[str, Blob] = {}
        self._holds: dict[str, frozenset[str]] = {}
        self._coming: dict[str, Incoming] = {}
        self._uses = itertools.count(1)
        self._names = itertools.count(1)

    def open(self) -> None:
        """Look at what is there, and remove what a crash left.

        Raises:
            SourceUnreadable: the folder cannot be made or read.
        """
        try:
            shutil.rmtree(self._incoming, ignore_errors=True)
            self._incoming.mkdir(parents=True, exist_ok=True)
            self._blobs_folder.mkdir(exist_ok=True)
            found = [entry for part in self._blobs_folder.iterdir() for entry in os.scandir(part)]
            found.sort(key=lambda entry: entry.stat().st_mtime_ns)
            self._blobs = {
                entry.name: Blob(nbytes=entry.stat().st_size, used=next(self._uses))
                for entry in found
                if is_hash(entry.name)
            }
        except OSError as error:
            raise SourceUnreadable(
                f"the content store {self._blobs_folder.parent}: {error.strerror or error}",
                advice="check that the state directory is a writable volume",
            ) from None

    # What is there.

    def missing(self, hashes: Iterable[str]) -> set[str]:
        """Return those that are not here."""
        with self._lock:
            return set(hashes) - self._blobs.keys()

    def look(self, hashes: Iterable[str]) -> None:
        """Forget blobs whose files are gone or have another size: somebody else was at the folder."""
        for sha256 in sorted(set(hashes) - self.missing(hashes)):
            try:
                size = self.path(sha256).stat().st_size
            except OSError:
                size = -1
            with self._lock:
                blob = self._blobs.get(sha256)
                if blob is not None and blob.nbytes != size:
                    self._drop([sha256])

    def path(self, sha256: str) -> Path:
        """Return where a blob is, or would be."""
        return self._blobs_folder / sha256[:2] / sha256

    def open_blob(self, sha256: str) -> BinaryIO | None:
        """Open a blob for reading, None when it is not here; it can be read to its end even if it is removed meanwhile.

        Raises:
            SourceUnreadable: the disk.
        """
        with self._lock:
            if sha256 not in self._blobs:
                return None
            with writing(self._blobs_folder):
                return self.path(sha256).open("rb", buffering=0)

    # Who needs it.

    def hold(self, holder: str, hashes: Collection[str]) -> None:
        """Keep blobs, here already or not, until the holder lets go; a second hold takes the place of the first."""
        with self._lock:
            self._holds[holder] = frozenset(hashes)
            here = self._holds[holder] & self._blobs.keys()
            for sha256 in here:
                self._blobs[sha256].used = next(self._uses)
        for sha256 in here:  # not under the lock: others wait for it on an event loop
            with contextlib.suppress(OSError):  # only the order after a restart depends on it
                os.utime(self.path(sha256))

    def let_go(self, holder: str) -> None:
        """End a hold; an unknown holder has none."""
        with self._lock:
            self._holds.pop(holder, None)

    def holders(self) -> set[str]:
        """Return who holds something."""
        with self._lock:
            return set(self._holds)

    # Coming and going.

    def expect(self, blobs: Sequence[tuple[str, int]]) -> list[Incoming]:
        """Make room for blobs (sha256, bytes) and return what their bytes are written to; "" is a hash not known yet.

        Raises:
            InsufficientDisk: the limit or the disk does not allow it, whatever else is removed.
        """
        with self._lock:
            self._make_room(sum(nbytes for _, nbytes in blobs))
            coming = [
                Incoming(self._incoming / str(next(self._names)), sha256=sha256, nbytes=nbytes)
                for sha256, nbytes in blobs
            ]
            self._coming |= {item.path.name: item for item in coming}
        return coming

    def accept(self, incoming: Incoming) -> str:
        """Hash a complete blob and return the hash; it appears, or is to be written again if another was expected.

        Raises:
            InsufficientDisk, SourceUnreadable: the disk.
        """
        with writing(self._blobs_folder):
            if incoming.nbytes == 0:
                incoming.path.touch()
            actual = incoming.hashed()
            if incoming.sha256 not in {"", actual}:
                incoming.again()
                return actual
            target = self.path(actual)
            target.parent.mkdir(exist_ok=True)
            incoming.path.chmod(0o444)
            with self._lock:
                incoming.path.rename(target)
                self._coming.pop(incoming.path.name, None)
                self._blobs[actual] = Blob(nbytes=incoming.nbytes, used=next(self._uses))
        return actual

    def give_up(self, coming: Iterable[Incoming]) -> None:
        """Remove what was not accepted."""
        for incoming in coming:
            incoming.close()
            incoming.path.unlink(missing_ok=True)
            with self._lock:
                self._coming.pop(incoming.path.name, None)

    def put(self, sha256: str, data: bytes) -> None:
        """Store a small blob at once; ``data`` must hash to its name.

        Raises:
            InsufficientDisk, SourceUnreadable: the disk.
        """
        if not self.missing([sha256]):
            return
        (incoming,) = self.expect([(sha256, len(data))])
        try:
            with writing(self._blobs_folder):
                incoming.write(0, data)
            if self.accept(incoming) != sha256:
                raise ValueError(f"a blob of {len(data)} bytes does not hash to its name")
        finally:
            self.give_up([incoming])

    def damaged(self, hashes: Iterable[str]) -> list[str]:
        """Hash blobs again and remove those that are not what their name says; return these."""
        wrong = []
        for sha256 in sorted(set(hashes) - self.missing(hashes)):
            try:
                size = self.path(sha256).stat().st_size
                fine = Incoming(self.path(sha256), sha256=sha256, nbytes=size).hashed() == sha256
            except OSError:
                fine = False
            if not fine:
                wrong.append(sha256)
                with self._lock:
                    self._drop([sha256])
        return wrong

    def writing(self) -> AbstractContextManager[None]:
        """Say in our words that the disk does not take something."""
        return writing(self._blobs_folder)

    def _make_room(self, needed: int) -> None:
        coming = sum(incoming.nbytes for incoming in self._coming.values())
        taken = sum(blob.nbytes for blob in self._blobs.values())
        # What was written of them is not free any more.
        unwritten = sum(incoming.missing for incoming in self._coming.values())
        free = shutil.disk_usage(self._incoming).free - SPARE_BYTES - unwritten
        excess = needed - free
        if self._limit:
            excess = max(excess, taken + coming + needed - self._limit)
        held = frozenset().union(*self._holds.values())
        gone = evict(self._blobs, held=held, excess=excess)
        excess -= sum(self._blobs[sha256].nbytes for sha256 in gone)
        if excess > 0:
            kept = sum(blob.nbytes for sha256, blob in self._blobs.items() if sha256 in held)
            raise InsufficientDisk(
                f"the content store needs {needed / MIB:.1f} MiB more, {excess / MIB:.1f} MiB are missing: "
                f"{kept / MIB:.1f} MiB of it are held by versions in use",
                advice="give the engine's state volume more room (emptyDir sizeLimit, --store-size)",
                details={"neededMiB": f"{needed / MIB:.1f}", "missingMiB": f"{excess / MIB:.1f}"},
            )
        self._drop(gone)

    def _drop(self, hashes: Iterable[str]) -> None:
        for sha256 in hashes:
            self._blobs.pop(sha256, None)
            self.path(sha256).unlink(missing_ok=True)


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Say in our words that a disk does not take something."""
    try:
        yield
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise InsufficientDisk(
                f"the volume of {folder} is full", advice="give the engine's state volume more room"
            ) from None
        raise SourceUnreadable(
            f"{folder}: {error.strerror or error}", advice="check that the state directory is a writable volume"
        ) from None
