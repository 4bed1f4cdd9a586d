"""Writes tensors into safetensors files, each hashed on its way: a file holds what was promised, or is not there.

The format is simple enough to be written by hand, and so nothing has to be in memory twice.
"""

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from modelswap_engine.backends.port import TensorRange
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
                digest = hashlib.sha256()
                for whole in pieces(item):
                    for begin in range(0, len(whole), _CHUNK):
                        piece = whole[begin : begin + _CHUNK]
                        digest.update(piece)
                        file.write(piece)
                        pace.spend(len(piece))
                check_hash(item, digest.hexdigest())
            file.flush()
            os.fsync(file.fileno())
            undo.pop_all()
    except OSError as error:
        raise Unavailable(
            f"{path}: {error.strerror or error}", advice="check that the folder is writable and has space"
        ) from error
