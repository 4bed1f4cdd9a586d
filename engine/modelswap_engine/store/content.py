"""The content store: a folder of blobs named by their sha256, bounded, that never loses what somebody holds.

A blob appears by a rename, complete and proved, or not at all, so that a crash leaves nothing but files that have no
name yet, which whoever comes next removes. Who holds what is said by name (the digest of a version); blobs that nobody
holds go first when room is wanted. It knows bytes and hashes, and neither tensors nor where they are from. Everything
here blocks; whoever calls it from an event loop does so in a thread.

Several processes may use one folder: what others hold stays, the limit is of all together, and what another one wrote
counts once this process has hashed it, and only as long as the file is the one that it hashed.
"""

import contextlib
import errno
import itertools
import logging
import os
import shutil
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO, Final

from modelswap_engine.checkpoint.files import Stamp, stamp_of
from modelswap_engine.protocol.errors import SourceUnreadable
from modelswap_engine.store.disk import blobs_below, make_folder, no_room, not_right, remove, use_now, writing
from modelswap_engine.store.eviction import Blob, evict
from modelswap_engine.store.incoming import Incoming
from modelswap_engine.store.members import Members
from modelswap_engine.store.proof import hash_all, open_regular, stamp_at

log = logging.getLogger("modelswap.store")

SPARE_BYTES: Final = 64 << 20
"""Left on the disk for others: the journal, side files, logs."""


class ContentStore:
    """See the module.

    Args:
        folder: made when needed.
        limit_bytes: what all blobs together may take; 0: what the disk gives.
        shared: other pods write to the folder as well, so nothing in it is believed because it is there. Otherwise
            what an earlier process of this pod left counts by its name.
    """

    def __init__(self, folder: Path, *, limit_bytes: int = 0, shared: bool = False) -> None:
        self._folder, self._blobs_folder = folder, folder / "blobs"
        self._limit, self._shared = limit_bytes, shared
        self._members = Members(folder)
        self._lock = threading.Lock()
        self._pinning = threading.Lock()
        self._proved: dict[str, Stamp] = {}
        self._holds: dict[str, frozenset[str]] = {}
        self._coming: dict[Path, Incoming] = {}
        self._names = itertools.count(1)

    def open(self) -> None:
        """Look at what is there, and remove what a crash left unless another process is in the way.

        Raises:
            SourceUnreadable: the folder cannot be made or read.
        """
        try:
            try:
                with self._members.alone():
                    make_folder(self._blobs_folder, like=self._folder)
                    self._members.others()
            except SourceUnreadable as error:  # what is here can be served; who needs room meets it again
                log.warning("%s; %s", error.message, error.advice)
            if not self._shared:
                self._proved = {path.name: self._seen(status) for path, status in blobs_below(self._blobs_folder)}
        except OSError as error:
            raise SourceUnreadable(
                f"the content store {self._folder}: {error.strerror or error}",
                advice="check that it is a folder on a volume that the engine may write to",
            ) from None

    # What is there.

    def missing(self, hashes: Iterable[str]) -> set[str]:
        """Return those that are not here."""
        with self._lock:
            return set(hashes) - self._proved.keys()

    def look(self, sizes: Mapping[str, int]) -> set[str]:
        """Take what other processes have brought, once it is proved; forget what is gone or was written again.

        Args:
            sizes: hash → bytes of the blobs. An unknown file of another size is not even read, and stays.

        Returns: those that are here in another size: who said so is wrong, not the blob.
        """
        unsure = {}
        for sha256, nbytes in sizes.items():
            stamp = self._stamp(sha256)
            with self._lock:
                known = self._proved.get(sha256)
                if stamp is None or stamp != known:
                    self._proved.pop(sha256, None)
            # Between a blob that was here before and a size that it does not have its hash decides.
            if stamp is not None and (stamp == known) != (stamp.size == nbytes):
                unsure[sha256] = stamp.size
        self._prove(unsure)
        return {sha256 for sha256, nbytes in self._here(sizes).items() if nbytes != sizes[sha256]}

    def damaged(self, hashes: Iterable[str]) -> list[str]:
        """Hash blobs again, remove those that are not what their name says; return those that do not count any more.

        What cannot be read does not count either, but stays for others.
        """
        here = self._here(hashes)
        self._prove(here)
        return sorted(self.missing(here))

    def _here(self, hashes: Iterable[str]) -> dict[str, int]:
        with self._lock:
            return {sha256: self._proved[sha256].size for sha256 in set(hashes) & self._proved.keys()}

    def _prove(self, sizes: Mapping[str, int]) -> None:
        paths = {sha256: self.path(sha256) for sha256 in sorted(sizes, key=lambda name: sizes[name], reverse=True)}
        there = {sha256: stamp_at(path) for sha256, path in paths.items()}
        read = hash_all({name: paths[name] for name, stamp in there.items() if stamp and stamp.size == sizes[name]})
        with self._lock:
            for sha256 in sizes:
                self._proved.pop(sha256, None)
            self._proved |= {name: self._known_by(file.stamp) for name, file in read.items() if file.sha256 == name}
        for name, file in read.items():
            if file.sha256 != name and file.stamp == stamp_at(paths[name]):  # not what came since
                done = "removed" if self._remove(name) else "it cannot be removed"
                log.warning("%s: damaged, or written by somebody else; %s", paths[name], done)

    def path(self, sha256: str) -> Path:
        """Return where a blob is, or would be."""
        return self._blobs_folder / sha256[:2] / sha256

    def open_blob(self, sha256: str) -> BinaryIO | None:
        """Open a blob for reading, None when it is not here; it can be read to its end even if it is removed meanwhile.

        Raises:
            SourceUnreadable: the disk.
        """
        with self._lock:
            known = self._proved.get(sha256)
        if known is None:
            return None
        with self.writing():
            try:
                stream = os.fdopen(open_regular(self.path(sha256)), "rb", buffering=0)
            except OSError as error:
                if error.errno in {errno.ENOENT, errno.ELOOP, errno.EINVAL, errno.ENXIO}:
                    return None
                raise
        if self._seen(os.fstat(stream.fileno())) != known:
            stream.close()
            return None
        return stream

    def _stamp(self, sha256: str) -> Stamp | None:
        stamp = stamp_at(self.path(sha256))
        return stamp and self._known_by(stamp)

    def _seen(self, status: os.stat_result) -> Stamp:
        return self._known_by(stamp_of(status))

    def _known_by(self, stamp: Stamp) -> Stamp:
        # In a folder of its own a pod keeps the order of use in the times.
        return stamp if self._shared else Stamp(size=stamp.size, inode=stamp.inode, mtime_ns=0, ctime_ns=0)

    # Who needs it.

    def hold(self, holder: str, hashes: Collection[str]) -> None:
        """Keep blobs, here already or not, until the holder lets go; a second hold takes the place of the first."""
        with self._lock:
            self._holds[holder] = frozenset(hashes)
            here = self._holds[holder] & self._proved.keys()
        self._pin()
        if self._shared:
            return
        for sha256 in here:
            with contextlib.suppress(OSError):  # only the order in which they go depends on it
                use_now(self.path(sha256))

    def let_go(self, holder: str) -> None:
        """End a hold; an unknown holder has none."""
        with self._lock:
            known = self._holds.pop(holder, None)
        if known is not None:
            self._pin()

    def _pin(self) -> None:
        with self._pinning:
            with self._lock:
                held = self._held()
            try:
                self._members.pin(held)
            except (OSError, SourceUnreadable) as error:  # what goes all the same is fetched again
                log.warning("%s: other processes cannot be told what is in use: %s", self._folder, error)

    def _held(self) -> frozenset[str]:
        return frozenset().union(*self._holds.values())

    def holders(self) -> set[str]:
        """Return who holds something."""
        with self._lock:
            return set(self._holds)

    # Coming and going.

    def expect(self, blobs: Sequence[tuple[str, int]]) -> list[Incoming]:
        """Make room for blobs (sha256, bytes) and return what their bytes are written to; "" is a hash not known yet.

        Raises:
            InsufficientDisk: the limit or the disk does not allow it, whatever else is removed.
            SourceUnreadable: the disk, or another process at the folder does not end.
        """
        coming: list[Incoming] = []
        try:
            with self.writing(), self._members.alone():
                self._make_room(sum(nbytes for _, nbytes in blobs), anew={sha256 for sha256, _ in blobs})
                for sha256, nbytes in blobs:
                    path = self._members.own / str(next(self._names))
                    coming.append(Incoming(path, sha256=sha256, nbytes=nbytes))
                    coming[-1].reserve()
                with self._lock:
                    self._coming |= {item.path: item for item in coming}
        except BaseException:
            self.give_up(coming)
            raise
        return coming

    def accept(self, incoming: Incoming) -> str:
        """Hash a complete blob and return the hash; it appears, or is to be written again if another was expected.

        Raises:
            InsufficientDisk, SourceUnreadable: the disk.
        """
        with self.writing():
            actual = incoming.hashed()
            if incoming.sha256 not in {"", actual}:
                incoming.again()
                return actual
            stamp = self._named(incoming, self.path(actual))
        with self._lock:
            self._coming.pop(incoming.path, None)
            if stamp is not None and not self._shared:
                self._proved[actual] = self._known_by(stamp)
                return actual
        self._prove({actual: incoming.nbytes})  # what was hashed until now was to be written; others may have written
        if self.missing([actual]):
            raise not_right(self.path(actual))
        return actual

    def _named(self, incoming: Incoming, path: Path) -> Stamp | None:
        make_folder(path.parent, like=self._blobs_folder)
        try:
            return incoming.named(path)
        except PermissionError:
            if self._shared and os.path.lexists(path):
                return None  # another user's, in a folder with the sticky bit: as good if it is right
            raise

    def give_up(self, coming: Iterable[Incoming]) -> None:
        """Remove what was not accepted."""
        for incoming in coming:
            incoming.close()
            with contextlib.suppress(OSError):  # whoever comes next removes it
                incoming.path.unlink()
            with self._lock:
                self._coming.pop(incoming.path, None)

    def put(self, sha256: str, data: bytes) -> None:
        """Store a small blob at once; ``data`` must hash to its name.

        Raises:
            InsufficientDisk, SourceUnreadable: the disk.
        """
        if not self.missing([sha256]):
            return
        (incoming,) = self.expect([(sha256, len(data))])
        try:
            with self.writing():
                incoming.write(0, data)
            if self.accept(incoming) != sha256:
                raise ValueError(f"a blob of {len(data)} bytes does not hash to its name")
        finally:
            self.give_up([incoming])

    def writing(self) -> AbstractContextManager[None]:
        """Say in our words that the disk does not take something."""
        return writing(self._folder)

    def _make_room(self, needed: int, *, anew: set[str]) -> None:
        make_folder(self._blobs_folder, like=self._folder)  # somebody may have emptied the folder
        others = self._members.others()
        files = blobs_below(self._blobs_folder)
        here = {path.name: Blob(nbytes=status.st_size, used=status.st_mtime_ns) for path, status in files}
        with self._lock:
            # What is written anew takes the place of what lies there, and that may be of any size.
            held = (self._held() - (anew - self._proved.keys())) | others.held
            coming = others.coming + sum(incoming.nbytes for incoming in self._coming.values())
            # What was written of them is not free any more.
            unwritten = others.unwritten + sum(incoming.missing for incoming in self._coming.values())
        excess = needed - (shutil.disk_usage(self._folder).free - SPARE_BYTES - unwritten)
        if self._limit:
            excess = max(excess, sum(blob.nbytes for blob in here.values()) + coming + needed - self._limit)
        loose = {sha256 for sha256 in here if sha256 not in held}
        while excess > 0 and sum(here[sha256].nbytes for sha256 in loose) >= excess:
            for sha256 in evict(here, held=here.keys() - loose, excess=excess):
                loose.discard(sha256)
                if self._remove(sha256):  # another user's, perhaps
                    excess -= here.pop(sha256).nbytes
        if excess > 0:
            excess -= sum(here[sha256].nbytes for sha256 in loose)
            kept = sum(blob.nbytes for sha256, blob in here.items() if sha256 in held)
            raise no_room(needed=needed, excess=excess, kept=kept)

    def _remove(self, sha256: str) -> bool:
        with self._lock:
            self._proved.pop(sha256, None)
        return remove(self.path(sha256))
