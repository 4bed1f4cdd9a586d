"""Finds values that are not finite, at the speed of memory.

A floating value is not finite exactly when all bits of its exponent are set, so the bits are looked at as integers:
``isfinite`` of a framework is an order of magnitude slower than hashing, and would decide how long staging takes.
"""

import dataclasses
from typing import Final

import numpy as np
import numpy.typing as npt

from modelswap_engine.protocol.errors import ChecksFailed


@dataclasses.dataclass(frozen=True)
class _Exponent:
    """How the elements of a dtype are seen: as integers of this kind, and the bits that must not all be set."""

    kind: type[np.signedinteger | np.unsignedinteger]
    mask: int


_EXPONENTS: Final = {
    "F64": _Exponent(np.uint64, 0x7FF0 << 48),
    "F32": _Exponent(np.uint32, 0x7F80 << 16),
    "BF16": _Exponent(np.uint16, 0x7F80),
    "F16": _Exponent(np.uint16, 0x7C00),
    "F8_E5M2": _Exponent(np.uint8, 0x7C),
    "F8_E4M3": _Exponent(np.uint8, 0x7F),  # has no infinity; NaN has all bits set
}


class FiniteCheck:
    """Looks at the bytes of one tensor piece by piece, as they arrive.

    Args:
        dtype: its safetensors name; one without an exponent is finite.
    """

    def __init__(self, dtype: str) -> None:
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


def not_finite(name: str) -> ChecksFailed:
    """Return the refusal of a tensor."""
    return ChecksFailed(
        f"tensor {name} holds values that are not finite",
        advice="the training run that wrote this version diverged; choose an earlier one",
        details={"tensor": name},
    )
