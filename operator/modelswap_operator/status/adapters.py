"""The status of a LoRAAdapter in this release: an honest no."""

from datetime import datetime

from modelswap_operator.api.loraadapter import LoRAAdapterStatus
from modelswap_operator.api.reasons import ConditionType, Reason
from modelswap_operator.status.conditions import Verdict, conditions

MESSAGE = (
    "this release does not load LoRA adapters: no pod serves it; "
    "delete the object, or keep it for the release that does"
)


def not_yet(observed: LoRAAdapterStatus, *, generation: int, now: datetime) -> LoRAAdapterStatus:
    """Return the status that says so, without ever promising progress."""
    verdicts = (
        Verdict(ConditionType.READY, False, Reason.NOT_YET_SUPPORTED, MESSAGE),
        Verdict(ConditionType.STALLED, True, Reason.NOT_YET_SUPPORTED, MESSAGE),
    )
    found = conditions(verdicts, observed=observed.conditions, generation=generation, now=now)
    return LoRAAdapterStatus(observed_generation=generation, conditions=found)
