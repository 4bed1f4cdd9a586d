"""What the process holds of the system's memory, and what its allocator makes of it. Reads figures, decides nothing."""

import ctypes
from typing import Final

import torch

_PAGE: Final = 4096


_COUNTS: Final = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class _Figures(ctypes.Structure):
    """``struct mallinfo2`` of glibc: bytes, and numbers of blocks."""

    _fields_ = [(name, ctypes.c_size_t) for name in _COUNTS.split()]


def resident_bytes() -> int:
    """Return the resident size of this process."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * _PAGE


def allocator_bytes(device: torch.device) -> tuple[int, int]:
    """Return (handed out, taken from the system) of the allocator that weights come from; zeros where it is unknown."""
    if device.type == "cuda":
        used = torch.cuda.memory_allocated(device)
        # Whole segments that are free wait for the next staging, or are given back; only what lies between is lost.
        return used, used + torch.cuda.memory_stats(device).get("inactive_split_bytes.all.current", 0)
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except AttributeError:  # another C library, or one older than 2.33
        return 0, 0
    mallinfo2.restype = _Figures
    found = mallinfo2()
    return found.uordblks + found.hblkhd, found.arena + found.hblkhd
