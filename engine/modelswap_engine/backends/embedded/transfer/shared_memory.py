"""Anonymous memory through which one replica gives its tensors to another; named by no file, gone with its user."""

import contextlib
import os
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from modelswap_engine.backends.port import TensorRange
from modelswap_engine.backends.transfer import memory_of


@contextlib.contextmanager
def shared_memory(tensors: Sequence[TensorRange]) -> Iterator[tuple[TensorRange, ...]]:
    """Offer memory for tensors: their ranges with the places at which somebody is to write them.

    It counts as memory of whoever writes it, and is given back when the context ends.
    """
    descriptor = os.memfd_create("modelswap-tensors")
    try:
        path, offset, placed = memory_of(os.getpid(), descriptor), 0, []
        for item in tensors:
            placed.append(replace(item, path=path, offset=offset))
            offset += item.nbytes
        os.ftruncate(descriptor, offset)
        yield tuple(placed)
    finally:
        os.close(descriptor)
