"""Values that an engine computes with in place of tensors: made of one, in a form that only the engine's kernels read.

An engine may rearrange a weight for its kernels and let go of the tensor. Such a value is no parameter and has no bytes
to be hashed, but it decides what the model says: it is staged, committed and taken back with the tensors, it is known
by the hash of what it was made of, and what it was made of can be worked out again. How, is the engine's affair.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch


@dataclasses.dataclass(frozen=True, eq=False)
class Packed:
    """One such value.

    ``value`` is what the engine looks for, ``nbytes`` the memory that it holds, ``sha256`` (64 hex digits) the hash of
    the tensor that it was made of. ``read`` works that tensor out of ``value``; it may only be called while the engine
    computes nothing.
    """

    value: object
    nbytes: int
    sha256: str
    read: Callable[[], torch.Tensor]


class Cell:
    """The place where the engine looks for a packed value.

    Args:
        get: returns what is there.
        put: puts something else there.
        live: what is there now.
    """

    def __init__(self, *, get: Callable[[], object], put: Callable[[object], None], live: Packed) -> None:
        self._get = get
        self._put = put
        self.live = live

    def assign(self, packed: Packed) -> None:
        """Make another value live."""
        self._put(packed.value)
        self.live = packed

    @property
    def intact(self) -> bool:
        """Whether what is there is what was put there last."""
        return self._get() is self.live.value


class Unpacking(Mapping[str, torch.Tensor]):
    """Tensors by name; those that are packed are worked out each time that they are asked for."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], packed: Mapping[str, Packed]) -> None:
        self._tensors = tensors
        self._packed = packed

    def __getitem__(self, name: str) -> torch.Tensor:
        packed = self._packed.get(name)
        return self._tensors[name] if packed is None else packed.read()

    def __iter__(self) -> Iterator[str]:
        yield from self._tensors
        yield from self._packed

    def __len__(self) -> int:
        return len(self._tensors) + len(self._packed)


def held(packed: Iterable[Packed]) -> dict[int, int]:
    """Return identity → bytes of what packed values hold; the same value twice is one."""
    return {id(item): item.nbytes for item in packed}
