"""A checkpoint as a value: its tensors, its side files and the digest that is its identity.

The content digest must not depend on how tensors are spread over files, on safetensors metadata or on side-file keys
that every save changes; it must depend on everything else. It is

    sha256 of canonical JSON ["modelswap.digest/1", [[name, dtype, shape, nbytes, sha256], ...], [[name, sha256], ...]]

with tensors and side files sorted by name, and of each side file the hash of its canonical form (``canonical.py``).
A manifest knows no folder: ``file`` and ``offset`` say where a tensor lies relative to the manifest, unless ``place``
names another folder.
"""

import hashlib
import itertools
import json
from collections.abc import Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Final

import msgspec

from modelswap_engine.checkpoint.rules import (
    check_file_name,
    check_tensor_name,
    expected_nbytes,
    invisible,
    is_hash,
    refuse,
)
from modelswap_engine.protocol.errors import InvalidCheckpoint, ManifestMismatch

MANIFEST_FILE: Final = "modelswap.manifest.json"
FORMAT: Final = 1
MAX_MANIFEST_BYTES: Final = 256 << 20
MAX_PLACE_CHARACTERS: Final = 2048
MAX_PROVENANCE: Final = 256
"""Characters of one value."""
_DOMAIN: Final = "modelswap.digest/1"


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One tensor: ``nbytes`` bytes at the absolute ``offset`` of ``file``, hashing to ``sha256`` ("" = unknown).

    ``dtype`` is the safetensors name, e.g. ``BF16``. ``place`` is the URI of the folder that has the file, where it is
    another one than the manifest's: a version may be published as what is new in it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: str
    offset: int
    sha256: str = ""
    place: str = ""


class SideFile(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A file beside the weights that changes what the model answers (config, tokenizer, chat template).

    ``sha256`` is of the bytes, ``canonical_sha256`` of the form that counts for the content digest.
    """

    name: str
    size: int
    sha256: str
    canonical_sha256: str


class Provenance(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What who built a manifest says of where the version comes from; it is no part of the digest."""

    who: str = ""
    when: str = ""
    base: str = ""
    job: str = ""


class Manifest(msgspec.Struct, frozen=True, kw_only=True, dict=True, eq=True):
    """What a checkpoint consists of; tensors and side files are sorted by name, names are unique."""

    tensors: tuple[TensorEntry, ...]
    side_files: tuple[SideFile, ...] = ()
    architecture: str = ""
    provenance: Provenance | msgspec.UnsetType = msgspec.UNSET

    @property
    def complete(self) -> bool:
        """True when the hash of every tensor is known."""
        return all(entry.sha256 for entry in self.tensors)

    @cached_property
    def digest(self) -> str:
        """The content digest, ``sha256:<64 hex>``.

        Raises:
            ValueError: a tensor's hash is not known yet; asking is a defect of the caller.
        """
        if not self.complete:
            raise ValueError("a manifest without all hashes has no digest")
        content = (
            _DOMAIN,
            [(t.name, t.dtype, t.shape, t.nbytes, t.sha256) for t in self.tensors],
            [(f.name, f.canonical_sha256) for f in self.side_files],
        )
        text = json.dumps(content, separators=(",", ":"), ensure_ascii=True)
        return "sha256:" + hashlib.sha256(text.encode("ascii")).hexdigest()

    @cached_property
    def by_name(self) -> Mapping[str, TensorEntry]:
        """Tensors by name."""
        return MappingProxyType({entry.name: entry for entry in self.tensors})

    @cached_property
    def total_bytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(entry.nbytes for entry in self.tensors)


class _Document(msgspec.Struct, kw_only=True, rename="camel"):
    """``modelswap.manifest.json``; fields are only ever added, unknown ones are ignored."""

    format: int
    digest: str
    architecture: str = ""
    provenance: Provenance | msgspec.UnsetType = msgspec.UNSET
    side_files: tuple[SideFile, ...] = ()
    tensors: tuple[TensorEntry, ...]


def make_manifest(
    tensors: Mapping[str, TensorEntry], side_files: Mapping[str, SideFile], *, architecture: str
) -> Manifest:
    """Return a manifest in its canonical order."""
    return Manifest(
        tensors=tuple(tensors[name] for name in sorted(tensors)),
        side_files=tuple(side_files[name] for name in sorted(side_files)),
        architecture=architecture,
    )


def encode(manifest: Manifest) -> bytes:
    """Return the canonical bytes of ``modelswap.manifest.json``; equal manifests give equal bytes."""
    document = _Document(
        format=FORMAT,
        digest=manifest.digest,
        architecture=manifest.architecture,
        provenance=manifest.provenance,
        side_files=manifest.side_files,
        tensors=manifest.tensors,
    )
    return msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n"


def decode(data: bytes, *, file: str = MANIFEST_FILE) -> Manifest:
    """Read a manifest as hostile input.

    Raises:
        InvalidCheckpoint: not JSON of the required form, a newer format, or a value that breaks a rule.
        ManifestMismatch: the digest that it states is not the digest of what it lists.
    """
    document = _parse(data, file=file)
    for entry in document.tensors:
        _check_tensor(entry, file=file)
    for side in document.side_files:
        _check_side_file(side, file=file)
    _check_order([entry.name for entry in document.tensors], what="tensors", file=file)
    _check_order([side.name for side in document.side_files], what="side files", file=file)
    check_provenance(document.provenance, file=file)
    manifest = Manifest(
        tensors=document.tensors,
        side_files=document.side_files,
        architecture=document.architecture,
        provenance=document.provenance,
    )
    if manifest.digest != document.digest:
        raise ManifestMismatch(
            f"{file}: it states the digest {document.digest[:80]!r}, but what it lists has {manifest.digest}",
            advice="write it again with: modelswap manifest build DIR",
            details={"file": file, "expected": document.digest[:80], "actual": manifest.digest},
        )
    return manifest


def _parse(data: bytes, *, file: str) -> _Document:
    if len(data) > MAX_MANIFEST_BYTES:
        refuse(f"larger than {MAX_MANIFEST_BYTES} bytes", file=file)
    try:
        document = msgspec.json.decode(data, type=_Document)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidCheckpoint(
            f"{file}: not a manifest: {error}",
            advice="write it again with: modelswap manifest build DIR",
            details={"file": file},
        ) from None
    if document.format != FORMAT:
        refuse(f"format {document.format} is not known, only {FORMAT}", file=file, advice="update modelswap")
    return document


def check_provenance(found: Provenance | msgspec.UnsetType, *, file: str) -> None:
    """Refuse what could not be shown to a person as it is.

    Raises:
        InvalidCheckpoint: a value that is too long, or holds control or invisible characters.
    """
    for key, value in msgspec.structs.asdict(found).items() if found else ():
        if len(value) > MAX_PROVENANCE or invisible(value):
            refuse(f"provenance {key}: longer than {MAX_PROVENANCE} characters, or not plain text", file=file)


def _check_tensor(entry: TensorEntry, *, file: str) -> None:
    check_tensor_name(entry.name, file=file)
    check_file_name(entry.file, file=file)
    if len(entry.place) > MAX_PLACE_CHARACTERS or invisible(entry.place):
        refuse("its place is not a URI", file=file, tensor=entry.name)
    expected = expected_nbytes(entry.dtype, entry.shape, file=file, tensor=entry.name)
    if entry.nbytes != expected:
        refuse(f"{entry.nbytes} bytes stated, {expected} by dtype and shape", file=file, tensor=entry.name)
    if not is_hash(entry.sha256):
        refuse("its sha256 is not 64 hex digits", file=file, tensor=entry.name)
    if entry.offset < 0:
        refuse("its offset is negative", file=file, tensor=entry.name)


def _check_side_file(side: SideFile, *, file: str) -> None:
    check_file_name(side.name, file=file)
    if side.size < 0 or not is_hash(side.sha256) or not is_hash(side.canonical_sha256):
        refuse(f"the entry of side file {side.name!r} has a bad size or hash", file=file)


def _check_order(names: list[str], *, what: str, file: str) -> None:
    for before, after in itertools.pairwise(names):
        if before >= after:
            refuse(f"{what} are not sorted and unique: {after!r} after {before!r}", file=file)
