"""A condition as the API conventions have it."""

from collections.abc import Iterable

import msgspec

from modelswap_operator.api.reasons import ConditionType


class Condition(msgspec.Struct, rename="camel", frozen=True, kw_only=True):
    """One observation about an object; ``status`` is ``True``, ``False`` or ``Unknown``."""

    type: str
    status: str
    reason: str
    message: str
    observed_generation: int = 0
    last_transition_time: str = ""

    @property
    def true(self) -> bool:
        """Say whether the condition holds."""
        return self.status == "True"


def find(conditions: Iterable[Condition], kind: ConditionType) -> Condition | None:
    """Return the condition of a type, or None while it is absent."""
    return next((c for c in conditions if c.type == kind), None)
