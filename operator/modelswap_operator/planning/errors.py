"""Whether an error can heal by itself. One place, so that planner, memory and status agree."""

from modelswap_engine.protocol.errors import ErrorBody, Refused, StateMoved, from_body
from modelswap_engine.protocol.messages import Plan


def is_final(error: ErrorBody) -> bool:
    """True when the same thing is refused again until somebody changes it."""
    return isinstance(from_body(error), Refused) and not error.retryable


def of_adapter(error: ErrorBody) -> bool:
    """True when an adapter is to blame that lives on the base, and not the version."""
    return bool(error.details.get("adapter"))


def is_content(error: ErrorBody) -> bool:
    """True when the version itself is refused: the same digest fails again until somebody changes the spec."""
    return is_final(error) and not of_adapter(error)


def passing(plan: Plan) -> ErrorBody | None:
    """Return why a plan cannot be followed now although the version itself is not refused; None when it can.

    What an adapter refuses is told by the swap: it may have changed by then.
    """
    if any(is_content(error) for error in plan.refusals):
        return None
    return next((error for error in plan.refusals if not of_adapter(error)), None)


def is_moved(error: ErrorBody) -> bool:
    """True when only the state that the decision was made on has changed: decide again at once."""
    return isinstance(from_body(error), StateMoved)


def text(error: ErrorBody) -> str:
    """Return cause and next step as one sentence."""
    return f"{error.message}; {error.advice}" if error.advice else error.message
