"""Fresh memory for tensors that are read: anonymous, and in large pages as far as whole ones fit.

Faulting memory in by small pages takes longer than reading into it, and can take as long as hashing. An allocator gives
no memory that is aligned to large pages, so that tensors of a few of them get none.
"""

import mmap
from typing import Final

import torch

HUGE: Final = 2 << 20
_WASTE: Final = 10
"""At most this part of a tensor's bytes is wasted on a large page that is not full."""
_PRIVATE: Final = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


def empty(nbytes: int) -> torch.Tensor:
    """Return ``nbytes`` bytes that belong to nobody else and are given back with the tensor."""
    if nbytes < HUGE:
        return torch.empty(nbytes, dtype=torch.uint8)
    large = large_pages(nbytes) * HUGE
    # The rest before the first boundary is never touched, and so never there.
    area = mmap.mmap(-1, max(large, nbytes) + HUGE, flags=_PRIVATE)
    start = -torch.frombuffer(area, dtype=torch.uint8, count=1).data_ptr() % HUGE
    area.madvise(mmap.MADV_HUGEPAGE, start, large)
    return torch.frombuffer(area, dtype=torch.uint8, count=nbytes, offset=start)


def large_pages(nbytes: int) -> int:
    """Return how many large pages to use; one more than fit, where little of it is wasted."""
    whole, rest = divmod(nbytes, HUGE)
    return whole + 1 if rest and HUGE - rest <= nbytes // _WASTE else whole
