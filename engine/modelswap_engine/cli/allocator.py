"""Keeps a process that lives for months from growing: by default glibc gives each thread a heap of its own.

Each swap reads headers, tokenizers and templates in whichever thread is free. What one leaves behind is not used by the
others, so that a process which holds no more objects than before grows with every swap, by some 12 kB (measured over a
thousand swaps; a few heaps of 64 MB are the limit). One heap is enough for what a sidecar does beside its event loop:
small pieces come from each thread's own cache, which needs no lock.
"""

import ctypes
import os
from typing import Final

_M_ARENA_MAX: Final = -8  # malloc.h
_VARIABLE: Final = "MALLOC_ARENA_MAX"


def one_heap() -> bool:
    """Have one heap for all threads, unless the environment says how many; call it before any thread is started.

    Says whether that was done: other C libraries have one heap, or other ways.
    """
    if _VARIABLE in os.environ:
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    mallopt.argtypes, mallopt.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
    return bool(mallopt(_M_ARENA_MAX, 1))
