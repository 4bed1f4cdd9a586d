"""What a tensor of a checkpoint may look like: names, dtypes, shapes, sizes, file names.

One place, because a safetensors header, an index and a shipped manifest all claim these things and none of them is
trusted. Pure: it knows no file. Every refusal is an :class:`InvalidCheckpoint` that names file and tensor.
"""

import re
import unicodedata
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NoReturn

from modelswap_engine.protocol.errors import InvalidCheckpoint

DTYPE_BITS: Final[Mapping[str, int]] = MappingProxyType(
    {
        "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
        "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
        "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
    }
)  # fmt: skip
"""Bits of one element by safetensors dtype name."""

MAX_NAME_BYTES: Final = 1024
MAX_FILE_NAME_BYTES: Final = 255
MAX_DIMENSIONS: Final = 32
MAX_TENSOR_BYTES: Final = 1 << 50

# Categories that a terminal, a log or a status field would act on instead of showing: control, format (bidirectional
# overrides, zero-width), surrogates, line and paragraph separators.
_INVISIBLE: Final = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
_HEX64: Final = re.compile(r"[0-9a-f]{64}")


def refuse(message: str, *, file: str, tensor: str = "", advice: str = "") -> NoReturn:
    """Raise the typed error for a rule that was broken.

    Raises:
        InvalidCheckpoint: always.
    """
    details = {"file": file} | ({"tensor": tensor} if tensor else {})
    where = f"{file}: tensor {tensor!r}" if tensor else file
    raise InvalidCheckpoint(
        f"{where}: {message}", advice=advice or "download or export the checkpoint again", details=details
    )


def invisible(text: str) -> bool:
    """Say whether a text holds characters that act instead of being shown."""
    return any(unicodedata.category(character) in _INVISIBLE for character in text)


def shown(text: str, limit: int = 80) -> str:
    """Return a hostile text as it may appear in a message: printable and short."""
    safe = "".join(c if unicodedata.category(c) not in _INVISIBLE else "\N{REPLACEMENT CHARACTER}" for c in text)
    return safe if len(safe) <= limit else f"{safe[:limit]}…"


def check_tensor_name(name: str, *, file: str) -> None:
    """Refuse an empty, overlong or invisible-character name.

    Raises:
        InvalidCheckpoint: the name breaks a rule.
    """
    if not name:
        refuse("a tensor has an empty name", file=file)
    if len(name.encode("utf-8", "surrogatepass")) > MAX_NAME_BYTES:
        refuse(f"the name is longer than {MAX_NAME_BYTES} bytes", file=file, tensor=shown(name))
    if invisible(name):
        refuse("the name holds control or invisible characters", file=file, tensor=shown(name))


def check_file_name(name: str, *, file: str) -> None:
    """Refuse a name that is anything but a plain file name of the same folder.

    Raises:
        InvalidCheckpoint: it has a separator, is a dot name, is too long or holds invisible characters.
    """
    if not name or name in {".", ".."} or "/" in name or "\\" in name:
        refuse(
            f"{shown(name)!r} is not a plain file name of this folder",
            file=file,
            advice="a checkpoint's files lie next to its index",
        )
    if len(name.encode("utf-8", "surrogatepass")) > MAX_FILE_NAME_BYTES:
        refuse(f"the file name {shown(name)!r} is longer than {MAX_FILE_NAME_BYTES} bytes", file=file)
    if invisible(name):
        refuse(f"the file name {shown(name)!r} holds control or invisible characters", file=file)


def check_shape(shape: tuple[int, ...], *, file: str, tensor: str) -> None:
    """Refuse shapes that no real tensor has.

    Raises:
        InvalidCheckpoint: too many dimensions, or a dimension that is negative or absurd.
    """
    if len(shape) > MAX_DIMENSIONS:
        refuse(f"{len(shape)} dimensions; at most {MAX_DIMENSIONS} are allowed", file=file, tensor=tensor)
    for size in shape:
        if not 0 <= size <= MAX_TENSOR_BYTES:
            refuse(f"shape {list(shape)!s:.80} has a dimension outside 0..2^50", file=file, tensor=tensor)


def expected_nbytes(dtype: str, shape: tuple[int, ...], *, file: str, tensor: str) -> int:
    """Return how many bytes a tensor of this dtype and shape has.

    Raises:
        InvalidCheckpoint: unknown dtype, absurd shape, or elements that do not fill whole bytes.
    """
    bits = DTYPE_BITS.get(dtype)
    if bits is None:
        refuse(f"unknown dtype {shown(dtype)!r}", file=file, tensor=tensor, advice="use a dtype of safetensors")
    check_shape(shape, file=file, tensor=tensor)
    total = bits
    for size in shape:
        total *= size  # at most 32 factors of 51 bits: Python's integers cannot overflow
    if total % 8:
        refuse(f"{dtype} elements of shape {list(shape)} do not fill whole bytes", file=file, tensor=tensor)
    if total // 8 > MAX_TENSOR_BYTES:
        refuse(f"shape {list(shape)} means more than 2^50 bytes", file=file, tensor=tensor)
    return total // 8


def is_hash(text: str) -> bool:
    """Say whether a text is 64 lower-case hex digits."""
    return _HEX64.fullmatch(text) is not None
