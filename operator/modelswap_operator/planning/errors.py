"""Whether an error can heal by itself. One place, so that planner, memory and status agree."""

from modelswap_engine.protocol.errors import ErrorBody, Refused, StateMoved, from_body


def is_content(error: ErrorBody) -> bool:
    """True when the version itself is refused: the same digest fails again until somebody changes the spec."""
    return isinstance(from_body(error), Refused) and not error.retryable


def is_moved(error: ErrorBody) -> bool:
    """True when only the state that the decision was made on has changed: decide again at once."""
    return isinstance(from_body(error), StateMoved)


def text(error: ErrorBody) -> str:
    """Return cause and next step as one sentence."""
    return f"{error.message}; {error.advice}" if error.advice else error.message
