"""Reads checkpoint tensors into anonymous memory, and refuses bytes that are not what was promised.

Nothing is ever mapped from a file: a file that is overwritten later must not change weights, one that is truncated
later must not kill the process. The bytes are copied first and hashed in the copy, so what is checked is what is used.
"""

import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Iterable, Iterator
from typing import Final

import torch

from modelswap_engine.backends.port import TensorRange
from modelswap_engine.protocol.errors import (
    ChecksFailed,
    InvalidCheckpoint,
    ManifestMismatch,
    SourceUnreadable,
    UnsupportedFormat,
)
from modelswap_engine.weights.pace import Pace

CHUNK: Final = 1 << 20
_FINITE_CHUNK: Final = 1 << 22
_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK

DTYPES: Final[dict[str, torch.dtype]] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def dtype_of(wanted: TensorRange) -> torch.dtype:
    """Return the torch dtype of a checkpoint tensor.

    Raises:
        UnsupportedFormat: torch has no such dtype.
    """
    try:
        return DTYPES[wanted.dtype]
    except KeyError:
        raise UnsupportedFormat(
            f"tensor {wanted.name}: dtype {wanted.dtype} is not supported",
            advice="save the checkpoint in " + ", ".join(sorted(DTYPES)),
            details={"tensor": wanted.name, "dtype": wanted.dtype},
        ) from None


def check_shape(wanted: TensorRange) -> None:
    """Refuse a tensor whose shape and dtype do not fill its bytes exactly.

    Raises:
        InvalidCheckpoint: the sizes disagree.
    """
    elements = 1
    for extent in wanted.shape:
        elements *= extent
    expected = elements * dtype_of(wanted).itemsize
    if expected != wanted.nbytes:
        raise InvalidCheckpoint(
            f"tensor {wanted.name}: {wanted.dtype}{list(wanted.shape)} needs {expected} bytes, not {wanted.nbytes}",
            advice="the header of the file is wrong; save the checkpoint again",
            details={"tensor": wanted.name},
        )


def read_tensor(wanted: TensorRange, *, pace: Pace) -> torch.Tensor:
    """Copy one tensor out of its file and prove its hash.

    Raises:
        ManifestMismatch: the bytes hash to something else than ``wanted.sha256``.
        InvalidCheckpoint: the file ends early, or shape and size disagree.
        SourceUnreadable: the file cannot be opened or read.
        Cancelled: ``pace`` was cancelled.
    """
    check_shape(wanted)
    raw = torch.empty(wanted.nbytes, dtype=torch.uint8)
    digest = hashlib.sha256()
    try:
        with _descriptor(wanted.path) as file:
            for piece in _pieces(file, raw.numpy().data, wanted):
                digest.update(piece)
                pace.spend(len(piece))
    except OSError as error:
        raise SourceUnreadable(
            f"tensor {wanted.name}: {wanted.path}: {error.strerror or error}",
            advice="check that the volume is mounted and readable by the engine",
            details={"tensor": wanted.name, "path": wanted.path},
        ) from error
    actual = digest.hexdigest()
    if actual != wanted.sha256:
        raise ManifestMismatch(
            f"tensor {wanted.name}: bytes hash to {actual[:16]}…, the manifest says {wanted.sha256[:16] or 'nothing'}…",
            advice="the file was damaged or changed after its manifest was made; copy it again or rebuild the manifest",
            details={"tensor": wanted.name, "expected": wanted.sha256, "actual": actual, "path": wanted.path},
        )
    return raw.view(dtype_of(wanted)).reshape(wanted.shape)


@contextlib.contextmanager
def _descriptor(path: str) -> Iterator[int]:
    # The raw calls release the interpreter lock and keep no buffer of their own. The path was resolved when it was
    # validated: a link or a pipe in its place now is somebody's trick, and must neither lead elsewhere nor block.
    descriptor = os.open(path, _FLAGS)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file any more")
        yield descriptor
    finally:
        os.close(descriptor)


def _pieces(descriptor: int, target: memoryview, wanted: TensorRange) -> Iterator[memoryview]:
    done = 0
    while done < len(target):
        count = os.preadv(descriptor, [target[done : done + CHUNK]], wanted.offset + done)
        if count == 0:
            raise InvalidCheckpoint(
                f"tensor {wanted.name}: {wanted.path} ends {len(target) - done} bytes early",
                advice="the file is truncated; copy it again",
                details={"tensor": wanted.name, "path": wanted.path},
            )
        yield target[done : done + count]
        done += count


def check_finite(name: str, tensor: torch.Tensor) -> None:
    """Refuse a floating tensor with a NaN or an infinity; looked at in pieces, to bound the temporary memory.

    Raises:
        ChecksFailed: names the tensor.
    """
    if not tensor.is_floating_point():
        return
    flat = tensor.reshape(-1)
    for begin in range(0, flat.numel(), _FINITE_CHUNK):
        piece = flat[begin : begin + _FINITE_CHUNK]
        # The eight-bit types have no reduction of their own on the CPU.
        values = piece if piece.dtype.itemsize > 1 else piece.to(torch.float32)
        if not bool(torch.isfinite(values).all()):
            raise ChecksFailed(
                f"tensor {name} holds values that are not finite",
                advice="the training run that wrote this version diverged; choose an earlier one",
                details={"tensor": name},
            )


def read_group(wanted: Iterable[TensorRange], *, pace: Pace) -> dict[str, torch.Tensor]:
    """Read, prove and check the tensors of one fusion group."""
    tensors: dict[str, torch.Tensor] = {}
    for item in wanted:
        tensor = read_tensor(item, pace=pace)
        check_finite(item.name, tensor)
        tensors[item.name] = tensor
    return tensors
