"""Conditions from verdicts, clean by kstatus: those of negative polarity (Stalled, …) exist only while True."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from modelswap_operator.api.conditions import Condition, find
from modelswap_operator.api.reasons import NEGATIVE_POLARITY, ConditionType
from modelswap_operator.api.times import stamp

MESSAGE_LIMIT = 4096


@dataclass(frozen=True)
class Verdict:
    """What is to be said in one condition. ``status``: True, False, or None for Unknown."""

    type: ConditionType
    status: bool | None
    reason: str
    message: str


def standing(conditions: Iterable[Condition]) -> str:
    """Return in one word what an object is: what needs a person first, ``Unknown`` while nothing is said."""
    true = {condition.type for condition in conditions if condition.true}
    order = (
        ConditionType.STALLED,
        ConditionType.SUSPENDED,
        ConditionType.SOURCE_DRIFTED,
        ConditionType.READY,
        ConditionType.RECONCILING,
    )
    return next((kind.value for kind in order if kind in true), "Unknown")


def cut(text: str, limit: int = MESSAGE_LIMIT) -> str:
    """Return a text that fits its field; the schema refuses longer ones."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def conditions(
    verdicts: Iterable[Verdict], *, observed: Iterable[Condition], generation: int, now: datetime
) -> tuple[Condition, ...]:
    """Return the conditions to write; ``lastTransitionTime`` moves only when the status does."""
    before = tuple(observed)
    found = []
    for verdict in verdicts:
        if verdict.type in NEGATIVE_POLARITY and verdict.status is not True:
            continue
        word = {True: "True", False: "False", None: "Unknown"}[verdict.status]
        old = find(before, verdict.type)
        same = old is not None and old.status == word and old.last_transition_time != ""
        found.append(
            Condition(
                type=verdict.type,
                status=word,
                reason=verdict.reason,
                message=cut(verdict.message),
                observed_generation=generation,
                last_transition_time=old.last_transition_time if old is not None and same else stamp(now),
            )
        )
    return tuple(found)
