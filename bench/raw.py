"""What this machine can do at best: SHA-256, reads and looks for NaN on all cores, without any of the product's code.

Staging and checking are held against these figures of the same run. Read is into memory that was not there before, as
staging must (the tensors stay), in large pages where they fit. A virtual machine may have to ask its host for memory
that was free for a while, which can take ten times as long as reading; so before each measurement as much is taken and
given back (:func:`had_back`), and all are held against each other in the same state.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import msgspec
import numpy as np

from modelswap_engine.backends.port import TensorRange

_CHUNK: Final = 1 << 20


class RawSpeed(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Bytes per second of all cores together.

    Attributes:
        cores: how many.
        sha256: hashing.
        read: into fresh memory.
        copy: reading into a buffer that is used again.
        volume: reading into fresh memory what is on the volume only; 0 where it was not asked for.
        look: finding the largest exponent of 16-bit values, which is how a NaN is seen.
    """

    cores: int
    sha256: float
    read: float
    copy: float
    look: float
    volume: float = 0.0

    @property
    def bound(self) -> float:
        """What reading and hashing can reach when both overlap perfectly."""
        return min(self.sha256, self.read)

    @property
    def in_turn(self) -> float:
        """What all that staging owes a byte can reach on the same cores, as where files are in the system's memory."""
        return 1.0 / (1.0 / self.sha256 + 1.0 / self.read + 1.0 / self.look)


def raw_speed(tensors: Sequence[TensorRange]) -> RawSpeed:
    """Measure with the very files that are staged; they are read once before, so that both runs find them cached."""
    shares = _shares(tensors)
    _all(shares, _copy)
    had_back(sum(item.nbytes for item in tensors))
    read = _all(shares, _read)
    return RawSpeed(
        cores=len(shares),
        sha256=_all(shares, _hash),
        read=read,
        copy=_all(shares, _copy),
        look=_all(shares, _look),
    )


def volume_speed(tensors: Sequence[TensorRange]) -> float:
    """Measure reading of files that the system does not have in memory, in bytes per second of all cores together."""
    had_back(sum(item.nbytes for item in tensors))
    put_out(tensors)
    return _all(_shares(tensors), _read)


def put_out(tensors: Sequence[TensorRange]) -> None:
    """Have the system forget the files, as if another machine had written them. (A host of this one may keep them.)"""
    for path in {item.path for item in tensors}:
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)  # what is not written yet stays
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def had_back(nbytes: int) -> None:
    """Take memory from the system, touch it, and give it back: now it is at hand for whoever asks next."""
    with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as area:
        area.madvise(mmap.MADV_HUGEPAGE)
        for begin in range(0, nbytes, mmap.PAGESIZE):
            area[begin] = 1


def _shares(tensors: Sequence[TensorRange]) -> list[list[TensorRange]]:
    shares: list[list[TensorRange]] = [[] for _ in os.sched_getaffinity(0)]
    for item in sorted(tensors, key=lambda item: item.nbytes, reverse=True):
        min(shares, key=lambda share: sum(other.nbytes for other in share)).append(item)
    return shares


def _all(shares: Sequence[Sequence[TensorRange]], work: Callable[[Sequence[TensorRange]], int]) -> float:
    with ThreadPoolExecutor(len(shares)) as pool:
        started = time.perf_counter()
        done = sum(pool.map(work, shares))
        return done / (time.perf_counter() - started)


def _hash(share: Sequence[TensorRange]) -> int:
    buffer = memoryview(bytearray(os.urandom(_CHUNK)))
    for item in share:
        digest = hashlib.sha256()
        for begin in range(0, item.nbytes, _CHUNK):
            digest.update(buffer[: min(_CHUNK, item.nbytes - begin)])
        digest.digest()
    return sum(item.nbytes for item in share)


def _look(share: Sequence[TensorRange]) -> int:
    values = np.frombuffer(os.urandom(_CHUNK), np.uint16)
    masked = np.empty_like(values)
    for item in share:
        for begin in range(0, item.nbytes, _CHUNK):
            count = min(_CHUNK, item.nbytes - begin) // values.itemsize
            np.bitwise_and(values[:count], 0x7F80, out=masked[:count]).max(initial=0)
    return sum(item.nbytes for item in share)


def _read(share: Sequence[TensorRange]) -> int:
    kept = []
    for item in share:
        area = mmap.mmap(-1, item.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        area.madvise(mmap.MADV_HUGEPAGE)
        kept.append(area)
        with memoryview(area) as target:
            file = os.open(item.path, os.O_RDONLY)
            try:
                for begin in range(0, item.nbytes, _CHUNK):
                    os.preadv(file, [target[begin : begin + _CHUNK]], item.offset + begin)
            finally:
                os.close(file)
    return sum(item.nbytes for item in share)


def _copy(share: Sequence[TensorRange]) -> int:
    buffer = memoryview(bytearray(_CHUNK))
    for item in share:
        file = os.open(item.path, os.O_RDONLY)
        try:
            for begin in range(0, item.nbytes, _CHUNK):
                os.preadv(file, [buffer[: min(_CHUNK, item.nbytes - begin)]], item.offset + begin)
        finally:
            os.close(file)
    return sum(item.nbytes for item in share)
