"""Tensors of torch under the check for values that are not finite (:mod:`modelswap_engine.checkpoint.finite`)."""

from typing import Final

import torch

from modelswap_engine.checkpoint import finite
from modelswap_engine.checkpoint.finite import not_finite

__all__ = ["FiniteCheck", "check_finite", "not_finite"]

_PIECE: Final = 1 << 20
_NAMES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
}


class FiniteCheck(finite.FiniteCheck):
    """The check for a dtype of torch."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(_NAMES.get(dtype, ""))


def check_finite(name: str, tensor: torch.Tensor) -> None:
    """Refuse a floating tensor with a NaN or an infinity.

    Raises:
        ChecksFailed: names the tensor.
    """
    if not tensor.is_floating_point():
        return
    if tensor.device.type != "cpu":
        if not bool(torch.isfinite(tensor).all()):
            raise not_finite(name)
        return
    raw = memoryview(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    check = FiniteCheck(tensor.dtype)
    for begin in range(0, len(raw), _PIECE):
        check.see(raw[begin : begin + _PIECE])
    if not check.finite:
        raise not_finite(name)
