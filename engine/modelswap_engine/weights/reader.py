"""Reads checkpoint tensors into anonymous memory, and refuses bytes that are not what was promised.

Nothing is ever mapped from a file: a file that is overwritten later must not change weights, one that is truncated
later must not kill the process. The bytes are copied first and hashed in the copy, so what is checked is what is used,
or what is sent on to the device where it is used.
"""

import contextlib
import dataclasses
import errno
import functools
import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, Protocol

import torch

from modelswap_engine.backends.port import TensorRange
from modelswap_engine.backends.transfer import memory_path
from modelswap_engine.protocol.errors import (
    InvalidCheckpoint,
    ManifestMismatch,
    SourceUnreadable,
    UnsupportedFormat,
)
from modelswap_engine.weights.finite import FiniteCheck, not_finite
from modelswap_engine.weights.pace import Crew, Pace, cores
from modelswap_engine.weights.place import HOST, Landing, Place

_DAMAGED: Final = "the file was damaged or changed after its manifest was made; copy it again or rebuild the manifest"
_CHANGED: Final = "the memory of the engine was changed; send or load the version again"
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


def read_tensor(wanted: TensorRange, *, pace: Pace, place: Place = HOST) -> torch.Tensor:
    """Copy one tensor out of its file, prove its hash and that its values are finite, all in one pass.

    It may only be used beside the model, until its place is settled.

    Raises:
        InsufficientMemory: the place has no room for it.
        ManifestMismatch: the bytes hash to something else than ``wanted.sha256``.
        ChecksFailed: the bytes are the promised ones, and hold a NaN or an infinity.
        InvalidCheckpoint: the file ends early, or shape and size disagree.
        SourceUnreadable: the file cannot be opened or read.
        Cancelled: ``pace`` was cancelled.
    """
    copied = copy_tensor(wanted, pace=pace, place=place)
    check_hash(wanted, copied.sha256)
    if not copied.finite:
        raise not_finite(wanted.name)
    return copied.tensor


@dataclasses.dataclass(frozen=True, eq=False)
class Copied:
    """A tensor in memory of our own, with what was seen of its bytes on the way."""

    tensor: torch.Tensor
    sha256: str
    finite: bool


def copy_tensor(wanted: TensorRange, *, pace: Pace, place: Place = HOST) -> Copied:
    """Copy one tensor out of its file; ``wanted.sha256`` is not looked at.

    Raises:
        InsufficientMemory, InvalidCheckpoint, SourceUnreadable, Cancelled: see :func:`read_tensor`.
    """
    check_shape(wanted)
    dtype = dtype_of(wanted)
    digest, finite = hashlib.sha256(), FiniteCheck(dtype)
    try:
        with _descriptor(wanted.path) as file, place.landing(wanted.nbytes) as landing:
            for piece in _pieces(file, landing, wanted):
                digest.update(piece)
                finite.see(piece)
                landing.land()
                pace.spend(len(piece))
            raw = landing.tensor()
    except OSError as error:
        raise SourceUnreadable(
            f"tensor {wanted.name}: {wanted.path}: {error.strerror or error}",
            advice="check that the volume is mounted and readable by the engine",
            details={"tensor": wanted.name, "path": wanted.path},
        ) from error
    return Copied(raw.view(dtype).reshape(wanted.shape), digest.hexdigest(), finite.finite)


def check_hash(wanted: TensorRange, actual: str) -> None:
    """Refuse bytes that are not the promised ones.

    Raises:
        ManifestMismatch: they hash to something else than ``wanted.sha256``.
    """
    if actual != wanted.sha256:
        raise ManifestMismatch(
            f"tensor {wanted.name}: bytes hash to {actual[:16]}…, the manifest says {wanted.sha256[:16] or 'nothing'}…",
            advice=_DAMAGED if wanted.path else _CHANGED,
            details={"tensor": wanted.name, "expected": wanted.sha256, "actual": actual, "path": wanted.path},
        )


@contextlib.contextmanager
def _descriptor(path: str) -> Iterator[int]:
    # The raw calls release the interpreter lock and keep no buffer of their own. The path was resolved when it was
    # validated: a link or a pipe in its place now is somebody's trick, and must neither lead elsewhere nor block.
    memory = memory_path(path)  # which the system shows as a link
    descriptor = os.open(path, _FLAGS) if memory is None else os.open(memory, _FLAGS & ~os.O_NOFOLLOW)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file any more")
        yield descriptor
    finally:
        os.close(descriptor)


def _pieces(descriptor: int, landing: Landing, wanted: TensorRange) -> Iterator[memoryview]:
    """Fill the landing; yield each piece when it is there, while the processor still has it at hand."""
    for begin in range(0, wanted.nbytes, landing.piece):
        piece = landing.window(begin, min(begin + landing.piece, wanted.nbytes))
        done = 0
        while done < len(piece):
            count = os.preadv(descriptor, [piece[done:]], wanted.offset + begin + done)
            if count == 0:
                raise InvalidCheckpoint(
                    f"tensor {wanted.name}: {wanted.path} ends {wanted.nbytes - begin - done} bytes early",
                    advice="the file is truncated; copy it again",
                    details={"tensor": wanted.name, "path": wanted.path},
                )
            done += count
        yield piece


def read_all(
    wanted: Iterable[TensorRange], *, pace: Pace, threads: int = 0, place: Place = HOST
) -> dict[str, torch.Tensor]:
    """Read and prove tensors, several at a time, the largest first.

    Args:
        wanted: the tensors.
        pace: of all threads together.
        threads: 0 means one per usable core.
        place: where they are to lie.

    Raises:
        ModelswapError: of :func:`read_tensor`; the other reads end at their next piece.
    """
    order = sorted(wanted, key=lambda item: item.nbytes, reverse=True)
    with reading(pace=pace, threads=threads, fetch=functools.partial(read_tensor, place=place)) as read:
        futures = [read(item) for item in order]
        found = {item.name: future.result() for item, future in zip(order, futures, strict=True)}
    place.settle()
    return found


class Fetch(Protocol):
    """Brings one tensor into memory, proven."""

    def __call__(self, wanted: TensorRange, *, pace: Pace) -> torch.Tensor:
        """See :func:`read_tensor`."""


@contextlib.contextmanager
def reading(
    *, pace: Pace, threads: int = 0, fetch: Fetch = read_tensor
) -> Iterator[Callable[[TensorRange], Future[torch.Tensor]]]:
    """Offer a call that reads a tensor in a thread beside others; an error inside the context ends them all.

    The threads have the priority of the one that enters. Hashing, reading and looking at values release the
    interpreter lock, so the speed is that of one thread times their number.
    """
    crew = Crew(pace)
    with ThreadPoolExecutor(threads or cores(), thread_name_prefix="read") as pool:
        try:
            yield lambda item: pool.submit(fetch, item, pace=crew)
        except BaseException:
            crew.cancel()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
