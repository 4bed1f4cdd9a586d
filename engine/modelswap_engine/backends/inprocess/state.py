"""What an engine keeps beside its tensors that must change with them: weights in a form for its kernels.

A linear layer whose weight is gone still shows it: it gives the weight back when it is applied to the unit vectors.
That is exact (each product is with one or zero) but for values that arithmetic may take for zero, and those are
remembered from when the value was made. It knows attributes of modules, and no engine.
"""

import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Final

import torch

from modelswap_engine.backends.inprocess.host import Host
from modelswap_engine.protocol.errors import Internal
from modelswap_engine.weights.hashing import sha256_of
from modelswap_engine.weights.packed import Cell, Packed

_ROWS: Final = 64
_one_at_a_time: Final = threading.Lock()
"""Kernels share scratch memory that is not theirs alone."""


@dataclasses.dataclass(frozen=True, eq=False)
class Oddities:
    """Values that arithmetic takes for zero: where they are in the flat tensor, and what."""

    places: torch.Tensor
    values: torch.Tensor

    def into(self, tensor: torch.Tensor) -> torch.Tensor:
        """Put them back where the tensor has something that may stand for them."""
        flat = tensor.view(-1)
        found = flat[self.places]
        flat[self.places] = torch.where(found.abs() < torch.finfo(tensor.dtype).tiny, self.values, found)
        return tensor


def oddities_of(weight: torch.Tensor) -> Oddities:
    """Find negative zeros and values too small to be normal."""
    flat = weight.reshape(-1)
    small = (flat.abs() < torch.finfo(weight.dtype).tiny) & ((flat != 0) | torch.signbit(flat))
    places = small.nonzero().view(-1)
    return Oddities(places=places, values=flat[places].clone())


def pack(host: Host, module: torch.nn.Module, weight: torch.Tensor) -> Packed:
    """Have the engine put a module's weight into its own form, and remember what it was made of."""
    return _packed(host, weight, host.pack(module))


def learn(host: Host, cell: Cell, weight: torch.Tensor) -> None:
    """Remember of a value that the engine has packed by itself what it was made of, without believing it."""
    cell.live = _packed(host, weight, cell.live.value)


def _packed(host: Host, weight: torch.Tensor, value: object) -> Packed:
    read = functools.partial(_read, host, value, weight.shape, weight.dtype, oddities_of(weight))
    return Packed(value=value, nbytes=weight.nbytes, sha256=sha256_of(weight), read=read)


def cell_of(host: Host, module: torch.nn.Module, attribute: str, weight: torch.Tensor) -> Cell:
    """Return the place of a live module's packed weight, with what the engine has put there by itself.

    ``weight`` has the shape and dtype of what it was made of; its hash is not known.
    """
    get = functools.partial(getattr, module, attribute)
    value = get()
    read = functools.partial(_read, host, value, weight.shape, weight.dtype, None)
    return Cell(
        get=get,
        put=functools.partial(setattr, module, attribute),
        live=Packed(value=value, nbytes=weight.nbytes, sha256="", read=read),
    )


def _read(host: Host, value: object, shape: torch.Size, dtype: torch.dtype, odd: Oddities | None) -> torch.Tensor:
    with _one_at_a_time:
        found = host.unpack(value, shape, dtype)
    return found if odd is None else odd.into(found)


def agreed(copies: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the first of several tensors that should be the same, with NaN wherever another one differs from it."""
    first, *others = copies
    tiny = torch.finfo(first.dtype).tiny
    for other in others:
        same = (first == other) | ((first.abs() < tiny) & (other.abs() < tiny))
        if not bool(same.all()):
            first = torch.where(same, first, torch.full_like(first, float("nan")))
    return first


def read_linear(apply: Callable[[torch.Tensor], torch.Tensor], shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Work out the weight of a linear map by applying it to the unit vectors, some at a time.

    Args:
        apply: the map, without a bias, for rows of input.
        shape: (outputs, inputs).
        dtype: of the weight, and of what the map takes and gives.

    Raises:
        Internal: the map is of another shape.
    """
    outputs, inputs = shape
    weight = torch.empty(shape, dtype=dtype)
    for begin in range(0, inputs, _ROWS):
        count = min(_ROWS, inputs - begin)
        rows = torch.zeros(_ROWS, inputs, dtype=dtype)
        rows[torch.arange(count), begin + torch.arange(count)] = 1
        answer = apply(rows)
        if answer.shape != (_ROWS, outputs):
            raise Internal(f"a packed layer answers {list(answer.shape)} where {[_ROWS, outputs]} was to be expected")
        weight[:, begin : begin + count] = answer[:count].T
    return weight
