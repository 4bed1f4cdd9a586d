"""The states of one swap and the only legal ways between them (docs/architecture.md, The swap).

A table, not code: the machine, the journal's recovery, the documentation's diagram and the stateful tests
all read it from here.
"""

from enum import StrEnum
from typing import Final


class SwapState(StrEnum):
    """Where one swap operation stands."""

    PLANNED = "Planned"
    FETCHING = "Fetching"
    STAGED = "Staged"
    PREPARED = "Prepared"
    PAUSING = "Pausing"
    COMMITTING = "Committing"
    COMMITTED = "Committed"
    VERIFIED = "Verified"
    SERVING = "Serving"
    ABORTED = "Aborted"
    ROLLING_BACK = "RollingBack"
    ROLLED_BACK = "RolledBack"
    QUARANTINED = "Quarantined"

    @property
    def terminal(self) -> bool:
        """True when the operation will not move again."""
        return not TRANSITIONS[self]

    @property
    def succeeded(self) -> bool:
        """True when the wanted version is live, proved and open to traffic."""
        return self is SwapState.SERVING

    @property
    def reversible(self) -> bool:
        """True while the old version has never left: failing or cancelling here just drops what is staged."""
        return SwapState.ABORTED in TRANSITIONS[self]


_S = SwapState

TRANSITIONS: Final[dict[SwapState, frozenset[SwapState]]] = {
    _S.PLANNED: frozenset({_S.FETCHING, _S.STAGED, _S.SERVING, _S.ABORTED}),
    _S.FETCHING: frozenset({_S.STAGED, _S.ABORTED}),
    _S.STAGED: frozenset({_S.PREPARED, _S.ABORTED}),
    _S.PREPARED: frozenset({_S.PAUSING, _S.COMMITTING, _S.ABORTED}),
    _S.PAUSING: frozenset({_S.COMMITTING, _S.ABORTED}),
    _S.COMMITTING: frozenset({_S.COMMITTED, _S.ROLLING_BACK}),
    _S.COMMITTED: frozenset({_S.VERIFIED, _S.ROLLING_BACK}),
    _S.VERIFIED: frozenset({_S.SERVING, _S.ROLLING_BACK}),
    _S.ROLLING_BACK: frozenset({_S.ROLLED_BACK, _S.QUARANTINED}),
    _S.SERVING: frozenset(),
    _S.ABORTED: frozenset(),
    _S.ROLLED_BACK: frozenset(),
    _S.QUARANTINED: frozenset(),
}
"""``PLANNED → SERVING`` is the empty swap: the wanted digest is live already. ``PREPARED → COMMITTING`` is the Overlap,
which pauses nobody."""


class IllegalTransition(ValueError):
    """A step that the table does not allow; always a defect of this code, never of its input."""


def step(current: SwapState, wanted: SwapState) -> SwapState:
    """Return ``wanted``.

    Raises:
        IllegalTransition: when the table has no such step.
    """
    if wanted not in TRANSITIONS[current]:
        raise IllegalTransition(f"{current} -> {wanted}")
    return wanted
