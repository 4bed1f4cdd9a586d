"""Live tensors that are not what the live version says: which, and that nobody is let in while there are any.

It knows neither how they are found nor how they are repaired.
"""

from collections.abc import Iterable
from typing import Final

from modelswap_engine.swap.gate import Gate

_HOLD: Final = "drift"
_PATIENCE: Final = 60.0


class Drift:
    """The damage that is known.

    Args:
        gate: is closed for as long as there is any.

    Attributes:
        names: the tensors, by checkpoint name; none while all is well.
        message: what is wrong, in words.
        attempts: to repair them, so far.
        begun: all attempts, at these and at earlier ones.
        repaired: how often they were right again.
    """

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self.names: tuple[str, ...] = ()
        self.message = ""
        self.attempts = 0
        self.begun = 0
        self.repaired = 0

    def found(self, names: Iterable[str], message: str) -> None:
        """These are damaged."""
        self.names, self.message = tuple(names), message
        self._gate.close(_HOLD, allowance=_PATIENCE)

    def mended(self) -> None:
        """All are right, and have been proved to be."""
        self.repaired += bool(self.names)
        self.forget()

    def forget(self) -> None:
        """What was damaged does not serve any more, or is right."""
        self.names, self.message, self.attempts = (), "", 0
        self._gate.open(_HOLD)
