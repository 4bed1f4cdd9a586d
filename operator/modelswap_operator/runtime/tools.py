"""What every task of this process works with; made once, by ``runtime.app``."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from modelswap_operator.effects.events import EventWriter
from modelswap_operator.effects.kube import Kube
from modelswap_operator.effects.observe import Observer
from modelswap_operator.effects.perform import Performer
from modelswap_operator.planning.changes import ChangePolicy
from modelswap_operator.runtime.metrics import Metrics


class Fencing(Protocol):
    """The epoch under which this process decides."""

    @property
    def epoch(self) -> int:
        """Return it; it can rise."""

    async def outbid(self, seen: int) -> bool:
        """Claim an epoch above ``seen``; False when another process leads, or none can be had."""


@dataclass(frozen=True, kw_only=True)
class Tools:
    """All of it. ``clock`` gives seconds and never goes back; ``random`` is uniform in [0, 1)."""

    kube: Kube
    observer: Observer
    performer: Performer
    events: EventWriter
    metrics: Metrics
    fencing: Fencing
    resync: float
    changes: Callable[[], ChangePolicy] = ChangePolicy
    now: Callable[[], datetime]
    clock: Callable[[], float]
    random: Callable[[], float]
