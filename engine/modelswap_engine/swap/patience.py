"""How long a call to the backend is waited for: always longer than the backend itself takes to give it up.

Whoever gives up first only knows that no answer came, and calls the engine lost; the backend knows what it asked and
what became of it. So what is set here is a least, and the backend's own bounds decide where they are longer.
"""

from dataclasses import dataclass
from typing import Final

from modelswap_engine.backends.port import Bounds
from modelswap_engine.swap.settings import SwapSettings

LONGER: Final = 1.1
"""Than the backend's bound: its answer has to arrive, too."""


@dataclass(frozen=True, kw_only=True)
class Patience:
    """Seconds, as in :class:`~modelswap_engine.backends.port.Bounds`."""

    call: float
    stage: float
    load: float
    hash: float

    @classmethod
    def over(cls, bounds: Bounds, settings: SwapSettings) -> "Patience":
        """Return what outlasts a backend's bounds, and is no shorter than the settings say."""
        return cls(
            call=max(settings.call_seconds, LONGER * bounds.call),
            stage=max(settings.stage_seconds, LONGER * bounds.stage),
            load=max(settings.load_seconds, LONGER * bounds.load),
            hash=max(settings.hash_seconds, LONGER * bounds.hash),
        )
