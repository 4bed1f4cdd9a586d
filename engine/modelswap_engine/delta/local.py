"""Packs and checkpoints that are files of this machine."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from modelswap_engine.checkpoint import files
from modelswap_engine.checkpoint.files import Opened
from modelswap_engine.checkpoint.hashing import reopened
from modelswap_engine.checkpoint.layout import Contents
from modelswap_engine.checkpoint.manifest import Manifest, TensorEntry
from modelswap_engine.delta.pack import Pack, ReadBase, open_pack
from modelswap_engine.protocol.errors import Busy, ManifestMismatch, SourceNotFound


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A checkpoint folder that was read: what is in it, its manifest, and where links in it may lead (resolved)."""

    contents: Contents
    manifest: Manifest
    roots: tuple[Path, ...]

    @property
    def name(self) -> str:
        """Its path."""
        return str(self.contents.directory)

    @property
    def side_files(self) -> Mapping[str, bytes]:
        """By name."""
        return self.contents.side_files

    @contextlib.contextmanager
    def reading(self, entry: TensorEntry) -> Iterator[ReadBase]:
        """Give what reads a tensor; see :class:`delta.build.Side`.

        Raises:
            SourceChanged, SourceUnreadable: not now.
        """
        at = self.contents.tensors[entry.name]
        with self.opened([entry.name]) as found:
            yield lambda begin, view: files.read_into(found[at.file], at.offset + begin, view)

    @contextlib.contextmanager
    def opened(self, names: Iterable[str]) -> Iterator[dict[str, Opened]]:
        """Open the files that some tensors lie in, by file name; at the end they must not have been written to.

        Raises:
            SourceChanged, SourceUnreadable: not now.
        """
        wanted = {self.contents.tensors[name].file for name in names}
        contents = self.contents
        with reopened(wanted, directory=contents.directory, roots=self.roots, stamps=contents.stamps) as found:
            yield found


@dataclass(frozen=True)
class FileRanges:
    """The bytes of an open file."""

    opened: Opened

    @property
    def name(self) -> str:
        """Its name."""
        return self.opened.name

    @property
    def size(self) -> int:
        """Its bytes when it was opened."""
        return self.opened.stamp.size

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill a view with the bytes that begin there.

        Raises:
            SourceChanged, SourceUnreadable: not now.
        """
        files.read_into(self.opened, offset, view)


@contextlib.contextmanager
def opened_pack(path: Path) -> Iterator[Pack]:
    """Open a pack that is a file.

    Raises:
        SourceNotFound, SourceUnreadable: it cannot be opened.
        InvalidDelta, UnsupportedFormat: it is no pack that can be used.
    """
    target = path.resolve()
    try:
        with files.open_inside(target.parent, target.name, roots=[target.parent]) as opened:
            yield open_pack(FileRanges(opened))
    except FileNotFoundError:
        raise SourceNotFound(f"{path}: no such file", advice="check the path of the pack") from None


def require_free(output: Path) -> None:
    """Check that nothing is where something will be written.

    Raises:
        Busy: something is.
    """
    if output.exists() or output.is_symlink():
        raise Busy(f"{output} exists already", advice="name a new place with --output, or remove what is there")


def prove(entry: TensorEntry, actual: str, where: str) -> None:
    """Check that the bytes of a tensor have the hash that its manifest says; ``where`` is what has the manifest.

    Raises:
        ManifestMismatch: they have not.
    """
    if actual != entry.sha256:
        raise ManifestMismatch(
            f"tensor {entry.name}: its bytes in {where} hash to {actual[:16]}…, the manifest says {entry.sha256[:16]}…",
            advice=f"if they are right, write the manifest again: modelswap manifest build {where}",
            details={"tensor": entry.name, "expected": entry.sha256, "actual": actual},
        )
