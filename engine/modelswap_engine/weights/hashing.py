"""Hashes live tensors in checkpoint coordinates, beside running decoding.

The interpreter lock is free while bytes are hashed, so the speed is that of SHA-256 times the threads.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import torch

from modelswap_engine.weights.mapping import Group, Loader
from modelswap_engine.weights.pace import Crew, Pace, cores, lower_priority
from modelswap_engine.weights.place import HOST, Place

_EXACT: Final[dict[torch.dtype, frozenset[torch.dtype]]] = {
    torch.bfloat16: frozenset({torch.float32, torch.float64}),
    torch.float16: frozenset({torch.float32, torch.float64}),
    torch.float32: frozenset({torch.float64}),
    torch.float8_e4m3fn: frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float64}),
    torch.float8_e5m2: frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float64}),
}
"""Source dtype → live dtypes that hold every value of it, so that casting back gives the very bytes."""


def sha256_of(tensor: torch.Tensor, place: Place = HOST) -> str:
    """Return the sha256 (64 hex digits) of a tensor's raw bytes in row-major order."""
    digest = hashlib.sha256()
    for piece in place.pieces(tensor):
        digest.update(piece)
    return digest.hexdigest()


def hash_groups(
    groups: Iterable[Group],
    loader: Loader,
    live: Mapping[str, torch.Tensor],
    shapes: Mapping[str, torch.Tensor],
    *,
    pace: Pace,
    threads: int = 0,
    place: Place = HOST,
) -> tuple[dict[str, str], int]:
    """Return name → sha256 for the checkpoint tensors that can be had back, and how many bytes were hashed.

    Args:
        groups: which tensors.
        loader: the engine's rules.
        live: every runtime name's tensor.
        shapes: the checkpoint's tensors, on the meta device.
        pace: asked before each tensor.
        threads: 0 means one per usable core.
        place: where the tensors lie.

    Raises:
        Cancelled: ``pace`` was cancelled.
    """
    hashes: dict[str, str] = {}
    total = 0
    crew = Crew(pace)

    def one(group: Group) -> tuple[dict[str, str], int]:
        found: dict[str, str] = {}
        size = 0
        for name, tensor in _originals(group, loader, live, shapes, place):
            crew.spend(tensor.nbytes)
            found[name] = sha256_of(tensor, place)
            size += tensor.nbytes
        return found, size

    def weight(group: Group) -> int:
        return sum(shapes[name].nbytes for name in group.sources)

    # The largest first, so that no thread is left alone with one at the end.
    with _pool(pace, threads) as pool:
        try:
            for found, size in pool.map(one, sorted(groups, key=weight, reverse=True)):
                hashes |= found
                total += size
        except BaseException:
            crew.cancel()
            raise
    return hashes, total


def _originals(
    group: Group, loader: Loader, live: Mapping[str, torch.Tensor], shapes: Mapping[str, torch.Tensor], place: Place
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the checkpoint tensors of a group that can be had back to the bit, one at a time."""
    for part in group.parts:
        with place.beside():
            exported = loader.export(part, {name: live[name] for name in part.targets})
        for name, tensor in exported.items():
            with place.beside():
                original = restore_dtype(tensor, shapes[name].dtype)
            if original is not None:
                yield name, original


def hash_tensors(
    tensors: Mapping[str, torch.Tensor], *, pace: Pace | None = None, threads: int = 0, place: Place = HOST
) -> dict[str, str]:
    """Return name → sha256 of tensors as they are.

    Raises:
        Cancelled: ``pace`` was cancelled.
    """
    whole = pace or Pace()
    crew = Crew(whole)

    def one(tensor: torch.Tensor) -> str:
        crew.spend(tensor.nbytes)
        return sha256_of(tensor, place)

    with _pool(whole, threads) as pool:
        try:
            return dict(zip(tensors, pool.map(one, tensors.values()), strict=True))
        except BaseException:
            crew.cancel()
            raise


def _pool(pace: Pace, threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads or cores(), "hash", initializer=lower_priority, initargs=(pace.niceness,))


def restore_dtype(tensor: torch.Tensor, wanted: torch.dtype) -> torch.Tensor | None:
    """Return the tensor in its checkpoint dtype, or None where the live dtype could not hold every value."""
    if tensor.dtype == wanted:
        return tensor
    return tensor.to(wanted) if tensor.dtype in _EXACT.get(wanted, frozenset()) else None
