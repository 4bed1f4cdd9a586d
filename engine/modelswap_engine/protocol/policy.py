"""How a swap is to be done: the choices that a ModelVersion, a command line or a trainer makes.

Knows nothing of versions, pods or progress: only what may be chosen, and the defaults.
"""

from enum import StrEnum
from typing import Annotated, Final

import msgspec

from modelswap_engine.protocol.wire import Message

LONGEST_DRAIN_SECONDS: Final = 86400
LONGEST_PROMPT: Final = 16384
"""Characters of a prompt that is checked."""
MOST_PROMPTS: Final = 16
LONGEST_KEY_NAME: Final = 253

DrainSeconds = Annotated[float, msgspec.Meta(ge=0, le=LONGEST_DRAIN_SECONDS)]


class TrafficMode(StrEnum):
    """What happens to requests in flight (docs/architecture.md, Traffic modes)."""

    DRAIN = "Drain"
    OVERLAP = "Overlap"
    RECOMPUTE = "Recompute"
    FREEZE = "Freeze"
    ABORT = "Abort"


class OnTimeout(StrEnum):
    """What a Drain does when requests outlast its time."""

    CANCEL_SWAP = "CancelSwap"
    RECOMPUTE_REQUESTS = "RecomputeRequests"
    ABORT_REQUESTS = "AbortRequests"


class LoadingMode(StrEnum):
    """How tensors are chosen: ``AUTO`` falls back from diff to full when the layout is equal."""

    AUTO = "Auto"
    DIFF = "Diff"
    FULL = "Full"


class VerifyMode(StrEnum):
    """``STRICT`` hashes the live tensors before resume, ``STANDARD`` right after."""

    STANDARD = "Standard"
    STRICT = "Strict"


class Traffic(Message, frozen=True, kw_only=True):
    """How traffic is treated during the swap.

    ``peers_ready`` is how many other pods of the slot are Ready: when there are some, a Drain leaves the
    endpoints before it closes the gate.
    """

    mode: TrafficMode = TrafficMode.DRAIN
    timeout_seconds: DrainSeconds = 60.0
    on_timeout: OnTimeout = OnTimeout.CANCEL_SWAP
    peers_ready: int = 0


class PromptCheck(Message, frozen=True, kw_only=True):
    """A prompt that a new version is tried with before it can answer anybody.

    The live version's answer of a few tokens is what is compared: ``max_logprob_delta`` is the largest allowed change
    of its mean log-probability per token. Without one it is only looked at that the output is finite.
    """

    prompt: Annotated[str, msgspec.Meta(min_length=1, max_length=LONGEST_PROMPT)]
    max_logprob_delta: Annotated[float, msgspec.Meta(ge=0)] | None = None


class Checks(Message, frozen=True, kw_only=True):
    """What must hold before a new version can answer anybody.

    That its tensors are finite is always checked. So is the output of a short prompt in the embedded engine; elsewhere
    only that of ``prompts`` is.
    """

    prompts: Annotated[list[PromptCheck], msgspec.Meta(max_length=MOST_PROMPTS)] = []


class Verification(Message, frozen=True, kw_only=True):
    """Whether a version is taken only when it is signed, and by whom.

    ``keys`` are names of trusted files that are mounted in the pod; none means any of them. It can ask for more than
    the engine does, never for less.
    """

    required: bool = False
    keys: tuple[Annotated[str, msgspec.Meta(max_length=LONGEST_KEY_NAME)], ...] = ()


class Loading(Message, frozen=True, kw_only=True):
    """How the new version is loaded."""

    mode: LoadingMode = LoadingMode.AUTO
    verify: VerifyMode = VerifyMode.STANDARD
    keep_previous: bool = True
