"""Several tensors as the bytes of one: how a bucket travels. Lossless, and blind to what the bytes mean."""

from collections.abc import Sequence

import torch

from modelswap_engine.backends.port import TensorRange
from modelswap_engine.backends.transfer import TensorSpec
from modelswap_engine.weights.reader import dtype_of


def empty_tensors(specs: Sequence[TensorSpec], *, device: torch.device) -> list[torch.Tensor]:
    """Return memory for announced tensors.

    Raises:
        UnsupportedFormat: torch has no such dtype.
    """
    return [torch.empty(spec.shape, dtype=_dtype(spec), device=device) for spec in specs]


def _dtype(spec: TensorSpec) -> torch.dtype:
    named = TensorRange(name=spec.name, dtype=spec.dtype, shape=spec.shape, path="", offset=0, nbytes=0, sha256="")
    return dtype_of(named)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor; of a contiguous one no copy is made."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def unflatten(bucket: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Fill contiguous tensors from the bytes of a bucket."""
    offset = 0
    for tensor in tensors:
        raw(tensor).copy_(bucket[offset : offset + tensor.nbytes])
        offset += tensor.nbytes
