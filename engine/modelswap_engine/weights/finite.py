"""Finds values that are not finite, at the speed of memory.

A floating value is not finite exactly when all bits of its exponent are set, so the bits are looked at as integers:
``isfinite`` of a framework is an order of magnitude slower than hashing, and would decide how long staging takes.
"""

import dataclasses
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from modelswap_engine.protocol.errors import ChecksFailed

_PIECE: Final = 1 << 20


@dataclasses.dataclass(frozen=True)
class _Exponent:
    """How the elements of a dtype are seen: as integers of this kind, and the bits that must not all be set."""

    kind: type[np.signedinteger | np.unsignedinteger]
    mask: int


_EXPONENTS: Final = {
    torch.float64: _Exponent(np.uint64, 0x7FF0 << 48),
    torch.float32: _Exponent(np.uint32, 0x7F80 << 16),
    torch.bfloat16: _Exponent(np.uint16, 0x7F80),
    torch.float16: _Exponent(np.uint16, 0x7C00),
    torch.float8_e5m2: _Exponent(np.uint8, 0x7C),
    torch.float8_e4m3fn: _Exponent(np.uint8, 0x7F),  # has no infinity; NaN has all bits set
}


class FiniteCheck:
    """Looks at the bytes of one tensor piece by piece, as they arrive."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._exponent = _EXPONENTS.get(dtype)
        self._scratch: npt.NDArray[np.integer] | None = None
        self.finite = True

    def see(self, piece: memoryview) -> None:
        """Take whole elements; ``finite`` says what was found so far."""
        if self._exponent is None or not self.finite:
            return
        bits = np.frombuffer(piece, self._exponent.kind)
        if self._scratch is None or len(self._scratch) < len(bits):
            self._scratch = np.empty(len(bits), self._exponent.kind)
        masked = np.bitwise_and(bits, self._exponent.mask, out=self._scratch[: len(bits)])
        self.finite = not len(bits) or int(masked.max()) != self._exponent.mask


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


def not_finite(name: str) -> ChecksFailed:
    """Return the refusal of a tensor."""
    return ChecksFailed(
        f"tensor {name} holds values that are not finite",
        advice="the training run that wrote this version diverged; choose an earlier one",
        details={"tensor": name},
    )
