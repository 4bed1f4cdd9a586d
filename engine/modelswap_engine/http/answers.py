"""Ended requests of the data port by the exact version they were let in to.

Versions are told apart by digest: labels are people's to choose. Refuses to know what the counts are judged by.
"""

from collections import Counter, OrderedDict
from typing import Final

from modelswap_engine.protocol.engine_state import AnswerCount

OK: Final = "ok"
FAILED: Final = "failed"
REJECTED: Final = "rejected"
DISCONNECTED: Final = "disconnected"

KEPT: Final = 16
"""How many versions are counted; the one that has ended no request for the longest time goes first."""


class AnswerTally:
    """Counts since the process began."""

    def __init__(self) -> None:
        self._counts: OrderedDict[str, Counter[str]] = OrderedDict()

    def count(self, digest: str, outcome: str) -> None:
        """Count one ended request."""
        self._counts.setdefault(digest, Counter())[outcome] += 1
        self._counts.move_to_end(digest)
        while len(self._counts) > KEPT:
            self._counts.popitem(last=False)

    def counts(self) -> list[AnswerCount]:
        """Return them, the version that ended a request last at the end."""
        return [
            AnswerCount(
                digest=digest,
                answered=found[OK],
                failed=found[FAILED],
                rejected=found[REJECTED],
                disconnected=found[DISCONNECTED],
            )
            for digest, found in self._counts.items()
        ]
