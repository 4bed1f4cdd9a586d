"""What a folder holds: which files make the checkpoint, where each tensor lies. Reads headers, no tensor bytes.

L1 one ``model.safetensors``, or an index with the shards that it names; not both: readers disagree on which wins
L2 anything else that holds weights (pickle, GGUF, safetensors under other names) is refused with advice, never parsed
L3 every file is a regular one inside the roots (``files.py``)
L4 side files are those of ``canonical.SIDE_FILES``; other files are ignored
L5 without a checkpoint of its own, a folder may have a manifest whose tensors lie in other folders; who asks says which
"""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Final

import msgspec

from modelswap_engine.checkpoint import files
from modelswap_engine.checkpoint.canonical import MAX_SIDE_FILE_BYTES, SIDE_FILES
from modelswap_engine.checkpoint.files import Opened, Stamp
from modelswap_engine.checkpoint.header import PREFIX_BYTES, header_length, parse_header
from modelswap_engine.checkpoint.index import INDEX_FILE, MAX_INDEX_BYTES, join_shards, parse_index
from modelswap_engine.checkpoint.manifest import MANIFEST_FILE, MAX_MANIFEST_BYTES, TensorEntry, decode
from modelswap_engine.checkpoint.rules import refuse
from modelswap_engine.protocol.errors import SourceNotFound, SourceUnreadable, UnsupportedFormat

SINGLE_FILE: Final = "model.safetensors"
SIGNATURE_FILE: Final = f"{MANIFEST_FILE}.sig"
"""Where the signature of a shipped manifest lies; what it is worth is for ``signing`` to say."""
MAX_SIGNATURE_BYTES: Final = 256 << 10
_PICKLES: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class Evidence(msgspec.Struct, frozen=True):
    """The very bytes of a shipped manifest, and the signature beside it; what they are worth is not known here."""

    manifest: bytes
    signature: bytes


class Read(msgspec.Struct, frozen=True, kw_only=True):
    """What the headers and side files of a checkpoint say, wherever it lies.

    ``tensors`` by name, hashes unknown. ``side_files`` name → bytes. ``shipped`` is the unread manifest beside them,
    when it was asked for, ``signature`` what lies beside that. ``header_bytes`` counts what was read.
    """

    tensors: dict[str, TensorEntry]
    side_files: dict[str, bytes]
    shipped: bytes | None = None
    signature: bytes | None = None
    header_bytes: int

    @property
    def evidence(self) -> Evidence | None:
        """Who vouches for it, to be proved; None where there is no manifest, or nothing beside it."""
        if self.shipped is None or self.signature is None:
            return None
        return Evidence(self.shipped, self.signature)


class Contents(Read, frozen=True, kw_only=True):
    """A folder as it was read. ``paths`` and ``stamps`` cover every file, by :func:`key_of`."""

    directory: Path
    paths: dict[str, Path]
    stamps: dict[str, Stamp]


Find = Callable[[TensorEntry], Path]
"""Returns the resolved folder of the place of a tensor, or raises why it may not be read."""


def key_of(entry: TensorEntry) -> str:
    """Return what the file of a tensor is called among those of a checkpoint."""
    return f"{entry.place}/{entry.file}" if entry.place else entry.file


class Reader:
    """Opens the files of one folder and remembers what they were.

    Args:
        directory: the folder.
        roots: resolved folders that links may lead to.
        place: what it is called in a manifest; "" for the version's own folder.
    """

    def __init__(self, directory: Path, *, roots: Sequence[Path], place: str = "") -> None:
        self._directory, self._roots, self._place = directory, tuple(roots), place
        self.paths: dict[str, Path] = {}
        self.stamps: dict[str, Stamp] = {}
        self.bytes_read = 0

    def whole(self, name: str, *, limit: int) -> bytes | None:
        """Read a whole small file; None when there is none."""
        try:
            with files.open_inside(self._directory, name, roots=self._roots) as opened:
                data = files.read_whole(opened, limit=limit)
                self._remember(opened, len(data))
        except FileNotFoundError:
            return None
        return data

    def header(self, name: str) -> tuple[TensorEntry, ...] | None:
        """Read the header of a safetensors file; None when there is none."""
        try:
            with files.open_inside(self._directory, name, roots=self._roots) as opened:
                size = opened.stamp.size
                prefix = files.read_exactly(opened, 0, min(PREFIX_BYTES, size))
                length = header_length(prefix, file_size=size, file=name)
                header = files.read_exactly(opened, PREFIX_BYTES, length)
                entries = parse_header(header, file_size=size, file=name)
                self._remember(opened, PREFIX_BYTES + length)
        except FileNotFoundError:
            return None
        return entries

    def add(self, other: "Reader") -> None:
        """Remember what another one remembers."""
        self.paths |= other.paths
        self.stamps |= other.stamps
        self.bytes_read += other.bytes_read

    def _remember(self, opened: Opened, count: int) -> None:
        files.check_stamp(opened)
        key = f"{self._place}/{opened.name}" if self._place else opened.name
        self.paths[key], self.stamps[key] = opened.path, opened.stamp
        self.bytes_read += count


def read_contents(
    directory: Path, *, roots: Sequence[Path], shipped: bool = False, find: Find | None = None
) -> Contents:
    """Read the headers and side files of a checkpoint folder.

    Args:
        directory: the folder, resolved.
        roots: resolved folders that links in it may lead to.
        shipped: read the manifest that the folder may come with, too.
        find: where tensors may lie that its manifest says are elsewhere; nowhere when None.

    Raises:
        SourceNotFound, UnsupportedFormat, InvalidCheckpoint: refused; the message names the file and the tensor.
        SourceUnreadable, SourceChanged: not now.
    """
    names = _list(directory)
    reader = Reader(directory, roots=roots)
    manifest = reader.whole(MANIFEST_FILE, limit=MAX_MANIFEST_BYTES) if shipped and MANIFEST_FILE in names else None
    if manifest is None or find is None or {SINGLE_FILE, INDEX_FILE} & names:
        tensors = _tensors(names, reader)
    else:
        tensors = _listed(manifest, reader, roots=roots, find=find)
    if not tensors:
        refuse("the checkpoint has no tensors", file=SINGLE_FILE)
    side_files = {}
    for name in sorted(SIDE_FILES & names):
        data = reader.whole(name, limit=MAX_SIDE_FILE_BYTES)
        if data is not None:
            side_files[name] = data
    return Contents(
        directory=directory,
        tensors=tensors,
        side_files=side_files,
        shipped=manifest,
        signature=reader.whole(SIGNATURE_FILE, limit=MAX_SIGNATURE_BYTES) if manifest is not None else None,
        paths=reader.paths,
        stamps=reader.stamps,
        header_bytes=reader.bytes_read,
    )


def _list(directory: Path) -> frozenset[str]:
    try:
        return frozenset(entry.name for entry in directory.iterdir())
    except FileNotFoundError:
        raise SourceNotFound(f"{directory}: no such folder", advice="check the path") from None
    except NotADirectoryError:
        raise UnsupportedFormat(
            f"{directory}: a file, not a checkpoint folder",
            advice="name the folder that holds config.json and model.safetensors",
        ) from None
    except OSError as error:
        raise SourceUnreadable(f"{directory}: {error.strerror}", advice="check the folder's permissions") from None


def _tensors(names: frozenset[str], reader: Reader) -> dict[str, TensorEntry]:
    one_layout(names)
    index = reader.whole(INDEX_FILE, limit=MAX_INDEX_BYTES) if INDEX_FILE in names else None
    if index is not None:
        return _sharded(index, reader)
    entries = reader.header(SINGLE_FILE) if SINGLE_FILE in names else None
    if entries is None:
        raise no_weights(names)
    return {entry.name: entry for entry in entries}


def _listed(manifest: bytes, own: Reader, *, roots: Sequence[Path], find: Find) -> dict[str, TensorEntry]:
    """Return what the files that a manifest names have; of those in other folders only what it lists of them."""
    files_of: dict[tuple[str, str], set[str]] = {}
    readers = {"": own}
    for entry in decode(manifest).tensors:
        files_of.setdefault((entry.place, entry.file), set()).add(entry.name)
        if entry.place not in readers:
            readers[entry.place] = Reader(find(entry), roots=roots, place=entry.place)
    found: dict[str, TensorEntry] = {}
    for (place, file), names in sorted(files_of.items()):
        for entry in readers[place].header(file) or ():
            if not place or entry.name in names:
                if entry.name in found:
                    refuse(f"it is in {found[entry.name].file} as well", file=file, tensor=entry.name)
                found[entry.name] = msgspec.structs.replace(entry, place=place)
    for reader in [reader for place, reader in readers.items() if place]:
        own.add(reader)
    return found


def _sharded(index: bytes, reader: Reader) -> dict[str, TensorEntry]:
    weight_map = parse_index(index)
    shards = []
    for shard in sorted(set(weight_map.values())):
        entries = reader.header(shard)
        if entries is None:
            refuse(f"it names {shard}, which is not there", file=INDEX_FILE, advice="fetch the missing shard")
        shards.append((shard, entries))
    return join_shards(shards, weight_map)


def one_layout(names: Collection[str]) -> None:
    """Refuse a folder that has both a single file and an index (rule L1).

    Raises:
        InvalidCheckpoint: it has.
    """
    if SINGLE_FILE in names and INDEX_FILE in names:
        refuse(
            f"it lies beside {SINGLE_FILE}: either of them could be the checkpoint",
            file=INDEX_FILE,
            advice="remove the one that is not meant",
        )


def no_weights(names: Collection[str]) -> UnsupportedFormat:
    """Say what a folder without weights of ours holds instead (rule L2)."""
    safetensors = sorted(name for name in names if name.endswith(".safetensors"))
    if safetensors:
        return UnsupportedFormat(
            f"{safetensors[0]}: neither {SINGLE_FILE} nor named by a {INDEX_FILE}",
            advice=f"name a single file {SINGLE_FILE}, or add the index of the shards",
            details={"file": safetensors[0]},
        )
    for name in sorted(names):
        if name.endswith(".gguf"):
            return UnsupportedFormat(
                f"{name}: GGUF is not supported",
                advice="convert it to safetensors (transformers: from_pretrained(gguf_file=...), save_pretrained)",
                details={"file": name},
            )
        if name.endswith(_PICKLES):
            return UnsupportedFormat(
                f"{name}: pickle files can run code and are never opened",
                advice="convert it to safetensors in a place you trust (save_pretrained)",
                details={"file": name},
            )
    return UnsupportedFormat("the folder holds no safetensors weights", advice=f"it needs {SINGLE_FILE} or an index")
