"""What is made of a version's answer to a prompt, whichever engine gave it. Pure."""

from typing import Final

from modelswap_engine.protocol.errors import ChecksFailed

ANSWER_TOKENS: Final = 8
"""Of the live version's answer, which is what is compared."""


def not_finite(what: str = "") -> ChecksFailed:
    """Return the error of an output with NaN or infinities in it; ``what`` says more of where."""
    return ChecksFailed(
        f"the version's output{what} holds values that are not finite, though its tensors do not",
        advice="it overflows in this precision; save it in bfloat16 or float32, or choose another version",
    )


def require_alike(change: float, *, allowed: float, number: int) -> None:
    """Hold the change of a mean log-probability against what is allowed.

    Args:
        change: in nats per token; NaN is never allowed.
        allowed: the largest change.
        number: of the prompt, for the message.

    Raises:
        ChecksFailed: it is larger.
    """
    if abs(change) <= allowed:
        return
    raise ChecksFailed(
        f"checks.prompts, number {number}: the mean log-probability of the live version's answer changes by "
        f"{abs(change):.4g}, allowed is {allowed:g}",
        advice="look at the version's answers; allow a larger change if they are as they should be",
        details={"prompt": str(number), "change": f"{abs(change):.6g}", "allowed": f"{allowed:g}"},
    )
