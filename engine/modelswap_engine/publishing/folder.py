"""A checkpoint folder as a version to publish: every tensor hashed now, files as they are.

A manifest that lies in the folder is not believed, it is held against the bytes: one that was left behind by an earlier
version would otherwise keep what changed from travelling.
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

import msgspec

from modelswap_engine.checkpoint import files
from modelswap_engine.checkpoint import manifest as manifests
from modelswap_engine.checkpoint.build import hash_contents, with_hashes
from modelswap_engine.checkpoint.crew import Progress
from modelswap_engine.checkpoint.files import Opened
from modelswap_engine.checkpoint.hashing import reopen
from modelswap_engine.checkpoint.index import INDEX_FILE
from modelswap_engine.checkpoint.layout import Contents, read_contents
from modelswap_engine.checkpoint.manifest import MANIFEST_FILE, Manifest, Provenance, TensorEntry
from modelswap_engine.protocol.errors import ManifestMismatch
from modelswap_engine.publishing.plan import Upload, check_side_files

PIECE_BYTES: Final = 4 << 20


class FolderVersion:
    """See the module, and :class:`publishing.port.Version`."""

    def __init__(self, contents: Contents, manifest: Manifest, *, roots: Sequence[Path]) -> None:
        self._contents = contents
        self._roots = roots
        self.manifest = manifest
        self.side_files: Mapping[str, bytes] = contents.side_files
        self.files = self._files()

    def _files(self) -> tuple[Upload, ...]:
        by_file: dict[str, list[TensorEntry]] = {}
        for entry in sorted(self.manifest.tensors, key=lambda entry: (entry.file, entry.offset, entry.nbytes)):
            by_file.setdefault(entry.file, []).append(entry)
        found = [
            # Tensors leave no hole and end where the file ends (header rules H11 and H12).
            Upload(
                name=name,
                head=self._read(name, self._contents.stamps[name].size - sum(e.nbytes for e in entries)),
                tensors=tuple(entries),
            )
            for name, entries in by_file.items()
        ]
        if INDEX_FILE in self._contents.stamps:
            found.append(Upload(name=INDEX_FILE, head=self._read(INDEX_FILE, self._contents.stamps[INDEX_FILE].size)))
        return tuple(found)

    def _read(self, name: str, count: int) -> bytes:
        with self._reopened(name) as opened:
            return files.read_exactly(opened, 0, count)

    def signature(self, manifest: bytes) -> bytes:
        """Return the signature in the folder, where it is of this manifest."""
        return (self._contents.signature or b"") if manifest == self._contents.shipped else b""

    def pieces(self, name: str) -> Generator[bytes, None, None]:
        """Read a tensor where it lies."""
        entry = self.manifest.by_name[name]
        with self._reopened(entry.file) as opened:
            for at in range(0, entry.nbytes, PIECE_BYTES):
                yield files.read_exactly(opened, entry.offset + at, min(PIECE_BYTES, entry.nbytes - at))
            files.check_stamp(opened)

    def _reopened(self, name: str) -> AbstractContextManager[Opened]:
        return reopen(self._contents.directory, name, roots=self._roots, stamp=self._contents.stamps[name])


def read_folder(
    directory: Path,
    *,
    roots: Sequence[Path] | None = None,
    side_files: Mapping[str, bytes] | None = None,
    provenance: Provenance | msgspec.UnsetType = msgspec.UNSET,
    progress: Progress | None = None,
) -> FolderVersion:
    """Read and hash a checkpoint folder.

    Args:
        directory: the folder.
        roots: folders that links in it may lead to; the folder itself when None.
        side_files: some that count instead of, or beside, those of the folder.
        provenance: where the version comes from; what the folder's own manifest says of it otherwise.
        progress: told (bytes done, bytes in all), from any thread but never from two at once.

    Raises:
        Refused: no valid checkpoint, or its own manifest is of another.
        BadRequest: a name among the side files belongs to no version.
        SourceUnreadable, SourceChanged: not now.
    """
    directory = directory.resolve()
    allowed = tuple(root.resolve() for root in roots) if roots else (directory,)
    contents = read_contents(directory, roots=allowed, shipped=True)
    manifest = hash_contents(contents, roots=allowed, progress=progress)
    if contents.shipped is not None:
        shipped = manifests.decode(contents.shipped)
        if shipped.digest != manifest.digest:
            raise ManifestMismatch(
                f"{directory}: its {MANIFEST_FILE} describes another version than its files are",
                advice="write it again with: modelswap manifest build DIR, or remove it",
                details={"file": MANIFEST_FILE, "actual": manifest.digest},
            )
        provenance = shipped.provenance if provenance is msgspec.UNSET else provenance
    if side_files:
        found = {**contents.side_files, **check_side_files(side_files)}
        contents = msgspec.structs.replace(contents, side_files=found)
        manifest = with_hashes(contents, {entry.name: entry.sha256 for entry in manifest.tensors})
    return FolderVersion(contents, msgspec.structs.replace(manifest, provenance=provenance), roots=allowed)
