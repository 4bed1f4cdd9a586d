"""A validated checkpoint in a local folder: ranges into its files, copies of its side files, and whether it changed."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

from modelswap_engine.backends.port import TensorRange
from modelswap_engine.checkpoint import manifest as manifests
from modelswap_engine.checkpoint.files import Stamp, stamp_of
from modelswap_engine.checkpoint.layout import SIGNATURE_FILE, Contents, Evidence, Read, key_of
from modelswap_engine.checkpoint.manifest import MANIFEST_FILE, Manifest
from modelswap_engine.protocol.errors import SourceChanged, SourceUnreadable
from modelswap_engine.protocol.looking import SourceLook
from modelswap_engine.sources import side_files
from modelswap_engine.sources.port import Travelled, others
from modelswap_engine.sources.threads import MountThreads

_ADVICE: Final = "write new versions to a new folder instead of overwriting one"


class LocalCheckpoint:
    """What :class:`FileSource` resolves to; see :class:`sources.port.Resolved`.

    Args:
        uri: what was asked for.
        manifest: complete.
        contents: the folder as it was read; the side files are copied from these very bytes.
        again: reads the folder that the URI means now, no tensors.
        threads: what reads in.
    """

    def __init__(
        self, *, uri: str, manifest: Manifest, contents: Contents, again: Callable[[], Contents], threads: MountThreads
    ) -> None:
        self._uri, self._manifest, self._contents, self._again = uri, manifest, contents, again
        self._threads = threads

    @property
    def uri(self) -> str:
        """The URI that was asked for."""
        return self._uri

    @property
    def credentials(self) -> str:
        """A mounted folder needs none."""
        return ""

    @property
    def manifest(self) -> Manifest:
        """The whole manifest."""
        return self._manifest

    @property
    def evidence(self) -> Evidence | None:
        """The shipped manifest and its signature."""
        return self._contents.evidence

    @property
    def contents(self) -> Read:
        """What its headers and side files say."""
        return self._contents

    @property
    def header_bytes(self) -> int:
        """Bytes read for headers, index, shipped manifest and side files."""
        return self._contents.header_bytes

    async def obtain(self, names: Iterable[str], *, travelled: Travelled | None = None) -> None:
        """They lie here."""

    def range_of(self, name: str) -> TensorRange:
        """Say where the bytes of a tensor are."""
        entry = self._manifest.by_name[name]
        return TensorRange(
            name=entry.name,
            dtype=entry.dtype,
            shape=entry.shape,
            path=str(self._contents.paths[key_of(entry)]),
            offset=entry.offset,
            nbytes=entry.nbytes,
            sha256=entry.sha256,
        )

    async def read(self, where: TensorRange, begin: int, count: int) -> bytes:
        """Read some bytes of a tensor where they lie."""
        return await self._threads.run(_read, where.path, where.offset + begin, count)

    async def copy_side_files(self, destination: Path) -> None:
        """Make ``destination`` a read-only folder with exactly the manifest's side files."""
        await self._threads.run(self._copy_side_files, destination)

    async def unchanged(self, *, suspected: bool = False) -> None:
        """Check that no file was touched since it was resolved."""
        await self._threads.run(self._unchanged)

    async def moved(self) -> SourceLook:
        """Read the folder again, but no tensors."""
        return await self._threads.run(self._moved)

    def _moved(self) -> SourceLook:
        contents, before = self._again(), self._contents.stamps
        now = {name: stamp for name, stamp in contents.stamps.items() if name != SIGNATURE_FILE}
        revision = revision_of(now)
        if contents.shipped is not None and _written(contents.stamps[MANIFEST_FILE], before.get(MANIFEST_FILE)):
            found = manifests.decode(contents.shipped).digest
            return SourceLook(found=found if found != self._manifest.digest else "", revision=revision)
        changed = others(name for name, stamp in now.items() if _written(stamp, before.get(name)))
        return SourceLook(found=changed, revision=revision)

    def _copy_side_files(self, destination: Path) -> None:
        side_files.materialise(destination, self._manifest, self._verified())

    def _verified(self) -> dict[str, bytes]:
        found = self._contents.side_files
        for side in self._manifest.side_files:
            if hashlib.sha256(found.get(side.name, b"")).hexdigest() != side.sha256:
                raise SourceChanged(f"{side.name}: not the bytes of the manifest", advice=_ADVICE)
        return found

    def _unchanged(self) -> None:
        for name, stamp in self._contents.stamps.items():
            try:
                now = stamp_of(os.stat(self._contents.paths[name], follow_symlinks=False))
            except FileNotFoundError:
                now = None
            except OSError as error:
                raise SourceUnreadable(f"{name}: {error.strerror}", details={"file": name}) from None
            if now != stamp:
                what = "removed" if now is None else "overwritten or replaced"
                raise SourceChanged(
                    f"{self._uri}: {name} was {what} after it was resolved", advice=_ADVICE, details={"file": name}
                )


def _read(path: str, begin: int, count: int) -> bytes:
    # Nobody waits for what was put in the file's place and is none.
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return os.pread(file, count, begin)
    finally:
        os.close(file)


def revision_of(files: Mapping[str, Stamp]) -> str:
    """Return one name for files, without inodes: a network file system can have others on each node."""
    text = json.dumps(sorted((name, stamp.size, stamp.mtime_ns) for name, stamp in files.items()))
    return hashlib.sha256(text.encode()).hexdigest()


def _written(now: Stamp, before: Stamp | None) -> bool:
    """Say whether a file is another; other rights or another name of it change its ctime only."""
    return before is None or (now.size, now.mtime_ns, now.inode) != (before.size, before.mtime_ns, before.inode)
