"""The file format of a pack, and its header read as hostile input. Pure: callers bring the bytes.

    8 bytes   MSWDELTA
    u32       version of the format: 2; 1 is read, and had no XOR
    u64       length of the header
    32 bytes  sha256 of the header
    header    JSON, see :class:`Header`; then the data: what is packed for each tensor, then side files, without holes

What is packed for a tensor is its blocks in order (``coding.BLOCK_BYTES`` of the tensor each, the last one shorter),
each a frame: the coding (u8), the length of its body (u32), the body. So a pack is read like a safetensors file: the
header by one range, then single tensors by theirs, and a tensor from front to back without knowing the rest.

Only these headers are accepted; each rule has an attack in ``tests/attacks/test_delta_pack.py``:

 D1 it starts with the magic, in a known version, and is as long as it says
 D2 the header is at most 128 MiB, has the stated sha256 and the form of :class:`Header`
 D3 names of tensors are valid, sorted and unique; none is removed and there; removed ones are sorted and unique
 D4 dtype and shape are valid and mean ``nbytes``; at most 500 000 tensors
 D5 hashes are 64 hex digits, digests ``sha256:`` and such a hash; ``base`` is a hash or empty
 D6 ranges lie one after the other, begin with the data and end with the file
 D7 a tensor has at least a frame's head for each block, and at most that and its bytes
 D8 side files are of known names, sorted and unique, at most 128 MiB, and packed in no more bytes than they have
"""

import hashlib
import itertools
import re
import struct
from collections.abc import Sequence
from typing import Final, NoReturn

import msgspec

from modelswap_engine.checkpoint.canonical import MAX_SIDE_FILE_BYTES, SIDE_FILES
from modelswap_engine.checkpoint.header import MAX_TENSORS
from modelswap_engine.checkpoint.rules import check_tensor_name, expected_nbytes, is_hash, shown
from modelswap_engine.delta.coding import BLOCK_BYTES, Coding
from modelswap_engine.protocol.errors import InvalidCheckpoint, InvalidDelta, UnsupportedFormat

FORMAT: Final = 2
_READ: Final = (1, FORMAT)
MAX_HEADER_BYTES: Final = 128 << 20
FRAME: Final = struct.Struct("<BI")
_MAGIC: Final = b"MSWDELTA"
_PREAMBLE: Final = struct.Struct("<8sIQ32s")
PREAMBLE_BYTES: Final = _PREAMBLE.size
_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")
NAME_PREFIX: Final = "modelswap-from-"
NAME_SUFFIX: Final = ".delta"
_ADVICE: Final = "fetch the pack again, or build it again with: modelswap delta build A B -o PACK"


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """One end of a pack: a content digest, and the bytes of all tensors of this version."""

    digest: str
    bytes: int


class PackedTensor(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A tensor of the new version that the old one does not have in this form under this name.

    ``nbytes`` bytes that hash to ``sha256``, made from bytes of the old version that hash to ``base``, whatever it
    calls them (empty: from nothing). What is packed are ``size`` bytes at ``offset`` of the data. ``coding`` is that of
    most of them, and ``changed`` the number of elements that differ; both are for people.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    sha256: str
    base: str = ""
    offset: int
    size: int
    coding: str = ""
    changed: int = 0


class PackedFile(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """A side file of the new version; ``packed`` bytes at ``offset`` of the data, or none where the old one has it."""

    name: str
    size: int
    sha256: str
    canonical_sha256: str
    offset: int = 0
    packed: int = 0


class Header(
    msgspec.Struct, frozen=True, kw_only=True, rename={"base": "from", "target": "to", "side_files": "sideFiles"}
):
    """What a pack turns into what. Fields are only ever added, unknown ones are ignored.

    Tensors that are in both versions and the same are not named, ``removed`` are those that only the old one has, and
    ``side_files`` are all of the new one.
    """

    base: Version
    target: Version
    tensors: tuple[PackedTensor, ...] = ()
    removed: tuple[str, ...] = ()
    side_files: tuple[PackedFile, ...] = ()

    @property
    def dense_bytes(self) -> int:
        """Bytes that would travel without the pack: all of the named tensors, and of the packed side files."""
        files = sum(side.size for side in self.side_files if side.packed)
        return sum(entry.nbytes for entry in self.tensors) + files


def refuse(message: str, *, file: str, tensor: str = "", span: tuple[int, int] | None = None) -> NoReturn:
    """Raise the typed error for a pack that is not what it should be; ``span`` is where in the file, from and to.

    Raises:
        InvalidDelta: always.
    """
    where, details = file, {"file": file}
    if tensor:
        where, details = f"{where}: tensor {shown(tensor)!r}", {**details, "tensor": shown(tensor)}
    if span is not None:
        where, details = f"{where}: bytes {span[0]}-{span[1]}", {**details, "bytes": f"{span[0]}-{span[1]}"}
    raise InvalidDelta(f"{where}: {message}", advice=_ADVICE, details=details)


def pack_name(digest: str) -> str:
    """Return the name under which a pack is looked for beside what it makes, by the digest of what it makes it from."""
    return f"{NAME_PREFIX}{digest.removeprefix('sha256:')[:12]}{NAME_SUFFIX}"


def blocks(nbytes: int) -> int:
    """Return how many blocks a tensor has."""
    return -(-nbytes // BLOCK_BYTES)


def encode_header(header: Header) -> bytes:
    """Return the first bytes of a pack, up to the data."""
    text = msgspec.json.encode(header)
    return _PREAMBLE.pack(_MAGIC, FORMAT, len(text), hashlib.sha256(text).digest()) + text


def header_span(preamble: bytes, *, file_size: int, file: str) -> tuple[int, bytes]:
    """Return the length of the header and its sha256 from the first bytes of a pack (rules D1 and D2).

    Raises:
        InvalidDelta: a rule is broken.
        UnsupportedFormat: it is of a later version.
    """
    if len(preamble) < PREAMBLE_BYTES or not preamble.startswith(_MAGIC):
        refuse(f"not a delta pack ({file_size} bytes)", file=file)
    _, version, length, digest = _PREAMBLE.unpack(preamble[:PREAMBLE_BYTES])
    if version not in _READ:
        raise UnsupportedFormat(
            f"{file}: a delta pack of version {version}, and none after {FORMAT} is known",
            advice="update modelswap",
            details={"file": file},
        )
    if not 2 <= length <= MAX_HEADER_BYTES:
        refuse(f"header length {length} is not in 2..{MAX_HEADER_BYTES}", file=file)
    if PREAMBLE_BYTES + length > file_size:
        refuse(f"truncated: {PREAMBLE_BYTES + length} bytes of header, the file has {file_size}", file=file)
    return length, digest


def parse_header(text: bytes, *, sha256: bytes, file_size: int, file: str) -> Header:
    """Return the header of a pack (rules D2 to D8).

    Raises:
        InvalidDelta: a rule is broken; the message names file and tensor.
    """
    span = (PREAMBLE_BYTES, PREAMBLE_BYTES + len(text))
    if hashlib.sha256(text).digest() != sha256:
        refuse("the header is damaged: its sha256 is not the stated one", file=file, span=span)
    try:
        header = msgspec.json.decode(text, type=Header)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        refuse(f"not the header of a pack: {error}", file=file, span=span)
    try:
        _check(header, data_bytes=file_size - span[1], file=file)
    except InvalidCheckpoint as error:  # the rules of checkpoints hold here too
        raise InvalidDelta(error.message, advice=_ADVICE, details=error.details) from None
    return header


def _check(header: Header, *, data_bytes: int, file: str) -> None:
    if not _DIGEST.fullmatch(header.base.digest) or not _DIGEST.fullmatch(header.target.digest):
        refuse("a digest is not sha256: and 64 hex digits", file=file)
    if len(header.tensors) > MAX_TENSORS:
        refuse(f"{len(header.tensors)} tensors; at most {MAX_TENSORS} are allowed", file=file)
    names = [entry.name for entry in header.tensors]
    for what, listed in (("tensors", names), ("removed tensors", header.removed)):
        _check_order(listed, what=what, file=file)
    for name in {*names} & {*header.removed}:
        refuse("it is removed, and there", file=file, tensor=name)
    for entry in header.tensors:
        _check_tensor(entry, file=file)
    _check_order([side.name for side in header.side_files], what="side files", file=file)
    for side in header.side_files:
        _check_side_file(side, file=file)
    _check_cover(header, data_bytes=data_bytes, file=file)


def _check_order(names: Sequence[str], *, what: str, file: str) -> None:
    for name in names:
        check_tensor_name(name, file=file)
    for before, after in itertools.pairwise(names):
        if before >= after:
            refuse(f"{what} are not sorted and unique: {after!r} after {before!r}", file=file)


def _check_tensor(entry: PackedTensor, *, file: str) -> None:
    expected = expected_nbytes(entry.dtype, entry.shape, file=file, tensor=entry.name)
    if entry.nbytes != expected:
        refuse(f"{entry.nbytes} bytes stated, {expected} by dtype and shape", file=file, tensor=entry.name)
    if not is_hash(entry.sha256) or (entry.base and not is_hash(entry.base)):
        refuse("sha256 or base is not a hash", file=file, tensor=entry.name)
    heads = blocks(entry.nbytes) * FRAME.size
    if not heads <= entry.size <= heads + entry.nbytes:
        refuse(f"{entry.size} bytes cannot be the blocks of {entry.nbytes}", file=file, tensor=entry.name)
    if entry.coding.upper() not in {"", *Coding.__members__} or entry.changed < 0:
        refuse("its coding is not known, or a negative number of elements changed", file=file, tensor=entry.name)


def _check_side_file(side: PackedFile, *, file: str) -> None:
    if side.name not in SIDE_FILES or not is_hash(side.sha256) or not is_hash(side.canonical_sha256):
        refuse(f"side file {shown(side.name)!r} is none, or has a bad hash", file=file)
    if not 0 <= side.packed <= side.size <= MAX_SIDE_FILE_BYTES:
        refuse(f"side file {side.name!r}: {side.packed} bytes cannot be those of {side.size}", file=file)


def _check_cover(header: Header, *, data_bytes: int, file: str) -> None:
    position = 0
    ranges = [(entry.name, entry.offset, entry.size) for entry in header.tensors]
    ranges += [(side.name, side.offset, side.packed) for side in header.side_files if side.packed]
    for name, offset, size in ranges:
        if offset != position:
            refuse(f"it begins at byte {offset} of the data, the one before ends at {position}", file=file, tensor=name)
        position += size
    if position != data_bytes:
        refuse(f"{position} bytes of data are listed, the file has {data_bytes}", file=file)
