"""A version that was sent instead of found: tensors that the engine received, laid over a version that it has.

It looks like any resolved checkpoint, so that planning, staging, commit and rollback treat it like one. What it lacks
is a place: after the engine has lost it, only the version at the root can be loaded again.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from modelswap_engine.backends.port import TensorRange
from modelswap_engine.checkpoint.manifest import Manifest, make_manifest
from modelswap_engine.protocol.errors import SourceUnreadable
from modelswap_engine.protocol.looking import SourceLook
from modelswap_engine.protocol.messages import VersionRef
from modelswap_engine.sources.port import Brought, Resolved, Travelled
from modelswap_engine.swap.clock import Offload
from modelswap_engine.swap.folders import copy_folder


class Received:
    """See the module.

    Args:
        uri: ``received:`` and the id of the update.
        root: what a loss falls back to.
        manifest: of the result.
        files: the version with files that it was laid over.
        directory: the side files.
        held: names that only the engine has, live or received.
        ranges: names that lie in the files of yet another checkpoint.
        parts: those checkpoints, which must not change before the commit.
        offload: runs calls that block on the disk.
    """

    header_bytes = 0
    credentials = ""
    evidence = None

    def __init__(
        self,
        *,
        uri: str,
        root: VersionRef,
        manifest: Manifest,
        files: Resolved,
        directory: Path,
        held: frozenset[str],
        ranges: Mapping[str, TensorRange],
        parts: Sequence[Resolved],
        offload: Offload,
    ) -> None:
        self.uri = uri
        self.root = root
        self.manifest = manifest
        self.files = files
        self.held = held
        self.ranges = dict(ranges)
        self._directory = directory
        self._parts = tuple(parts)
        self._offload = offload

    async def obtain(self, names: Iterable[str], *, travelled: Travelled | None = None) -> Brought | None:
        """Fetch what lies at the source of the version below; the rest is here."""
        return await self.files.obtain(
            [name for name in names if name not in self.ranges and name not in self.held], travelled=travelled
        )

    def range_of(self, name: str) -> TensorRange:
        """Say where the bytes of a tensor are; no path means: in the engine."""
        if name in self.ranges:
            return self.ranges[name]
        if name not in self.held:
            return self.files.range_of(name)
        entry = self.manifest.by_name[name]
        return TensorRange(
            name=name, dtype=entry.dtype, shape=entry.shape, path="", offset=0, nbytes=entry.nbytes, sha256=entry.sha256
        )

    async def copy_side_files(self, destination: Path) -> None:
        """Copy the side files of the version below; they were verified when that was materialised."""
        try:
            await self._offload(copy_folder, self._directory, destination)
        except OSError as error:
            raise SourceUnreadable(
                f"{destination}: cannot copy the side files: {error.strerror or error}",
                advice="check that the state directory is writable and has space",
            ) from None

    async def unchanged(self, *, suspected: bool = False) -> None:
        """Check the checkpoints whose files are read."""
        for part in self._parts:
            await part.unchanged(suspected=suspected)

    async def moved(self) -> SourceLook:
        """What was sent lies at no place."""
        return SourceLook()


def overlaid(below: Manifest, hashes: Mapping[str, str]) -> Manifest:
    """Return a manifest with other hashes for some of its tensors: the content digest follows from it."""
    tensors = {
        entry.name: msgspec.structs.replace(entry, sha256=hashes.get(entry.name, entry.sha256))
        for entry in below.tensors
    }
    side_files = {side.name: side for side in below.side_files}
    return make_manifest(tensors, side_files, architecture=below.architecture)
