"""A version as this engine holds it, and the local folders with its side files."""

import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from modelswap_engine.checkpoint.diff import diff
from modelswap_engine.checkpoint.manifest import Manifest
from modelswap_engine.checkpoint.sidefiles import SideChange, compare_side_files
from modelswap_engine.protocol.messages import VersionRef
from modelswap_engine.sources.port import Resolved
from modelswap_engine.swap.clock import Offload
from modelswap_engine.swap.trainer.received import Received


@dataclass(frozen=True, kw_only=True)
class Version:
    """A version with everything that loading it takes.

    ``ref`` is complete: the digest is the manifest's, never empty.
    """

    ref: VersionRef
    resolved: Resolved
    directory: Path

    @property
    def digest(self) -> str:
        """Its identity."""
        return self.ref.digest

    @property
    def manifest(self) -> Manifest:
        """Its tensors and side files."""
        return self.resolved.manifest

    @property
    def lasting(self) -> VersionRef:
        """What is loaded after a loss: this version, or the one at a source that received tensors were laid over."""
        return self.resolved.root if isinstance(self.resolved, Received) else self.ref

    @property
    def lasts(self) -> bool:
        """True when it can be loaded again."""
        return self.lasting == self.ref


class VersionStore:
    """Side files by digest under one folder; each sub-folder is written once and never changed."""

    def __init__(self, folder: Path, *, offload: Offload) -> None:
        self._folder = folder
        self._offload = offload
        self._pins: Counter[str] = Counter()

    @contextmanager
    def pin(self, digest: str) -> Iterator[None]:
        """Keep the folder of a digest from being pruned."""
        self._pins[digest] += 1
        try:
            yield
        finally:
            self._pins[digest] -= 1

    def pinned(self) -> set[str]:
        """Return the digests whose folders are in use at this moment."""
        return set(+self._pins)

    async def materialise(self, resolved: Resolved, *, asked: VersionRef) -> Version:
        """Copy the side files of a checkpoint that a reference led to; what is there already is not copied again.

        Raises:
            SourceChanged, SourceUnreadable: see :class:`Resolved`.
        """
        digest = resolved.manifest.digest
        directory = self._folder / _name(digest)
        await self._offload(partial(self._folder.mkdir, parents=True, exist_ok=True))
        await resolved.copy_side_files(directory)
        ref = msgspec.structs.replace(asked, uri=resolved.uri, digest=digest, credentials=resolved.credentials)
        return Version(ref=ref, resolved=resolved, directory=directory)

    async def compare(self, live: Version, target: Version, *, kind: str) -> tuple[SideChange, ...]:
        """Say what changed in the side files and what a backend of this kind makes of it."""
        names = diff(live.manifest, target.manifest).side_changed
        old, new = [await self._offload(_read, version.directory, names) for version in (live, target)]
        return compare_side_files(old, new, kind=kind)

    async def prune(self, keep: set[str]) -> None:
        """Remove the folders of all other digests that nobody pins; one that stays does no harm."""
        await self._offload(self._prune, {_name(digest) for digest in keep | self.pinned()})

    def _prune(self, names: set[str]) -> None:
        if self._folder.is_dir():
            for entry in self._folder.iterdir():
                if entry.name not in names:
                    shutil.rmtree(entry, ignore_errors=True)


def _name(digest: str) -> str:
    return digest.removeprefix("sha256:")


def _read(directory: Path, names: Iterable[str]) -> dict[str, bytes]:
    return {name: (directory / name).read_bytes() for name in names if (directory / name).is_file()}
