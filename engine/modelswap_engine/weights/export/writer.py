"""Writes tensors into safetensors files, each hashed on its way: a file holds what was promised, or is not there.

The format is simple enough to be written by hand, and so nothing has to be in memory twice.
"""

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Final

from modelswap_engine.backends.port import TensorRange
from modelswap_engine.backends.transfer import memory_path
from modelswap_engine.checkpoint.saving import compose_header
from modelswap_engine.protocol.errors import Unavailable
from modelswap_engine.weights.pace import Pace
from modelswap_engine.weights.reader import check_hash

_CHUNK: Final = 4 << 20


def write_file(
    path: Path, wanted: Sequence[TensorRange], pieces: Callable[[TensorRange], Iterator[memoryview]], *, pace: Pace
) -> None:
    """Write one file of the bytes that ``pieces`` gives for each tensor; it is on the disk when this returns.

    Raises:
        ManifestMismatch: a tensor does not hash to what ``wanted`` says.
        Unavailable: the disk does not take it.
        Cancelled: ``pace`` was cancelled.
    """
    try:
        with contextlib.ExitStack() as undo, path.open("xb") as file:
            undo.callback(path.unlink, missing_ok=True)
            file.write(compose_header(wanted))
            for item in wanted:
                _write(file, item, pieces(item), pace=pace)
            file.flush()
            os.fsync(file.fileno())
            undo.pop_all()
    except OSError as error:
        raise Unavailable(
            f"{path}: {error.strerror or error}", advice="check that the folder is writable and has space"
        ) from error


def fill_memory(
    wanted: Sequence[TensorRange], pieces: Callable[[TensorRange], Iterator[memoryview]], *, pace: Pace
) -> None:
    """Write tensors into shared memory that is there, each where its range says.

    Raises:
        ManifestMismatch: a tensor does not hash to what ``wanted`` says.
        Unavailable: the memory is not there any more.
        Cancelled: ``pace`` was cancelled.
    """
    for item in wanted:
        try:
            with Path(memory_path(item.path) or item.path).open("r+b") as file:
                file.seek(item.offset)
                _write(file, item, pieces(item), pace=pace)
        except OSError as error:
            raise Unavailable(
                f"tensor {item.name}: {item.path}: {error.strerror or error}", advice="it is tried again by itself"
            ) from error


def _write(file: BinaryIO, item: TensorRange, pieces: Iterator[memoryview], *, pace: Pace) -> None:
    digest = hashlib.sha256()
    for whole in pieces:
        for begin in range(0, len(whole), _CHUNK):
            piece = whole[begin : begin + _CHUNK]
            digest.update(piece)
            file.write(piece)
            pace.spend(len(piece))
    check_hash(item, digest.hexdigest())
