"""One operation's progress as values: each step takes a status and returns the next.

The legal steps are the table of ``protocol.states``; nothing else in ``swap`` sets a state. Pure.
"""

from typing import Any

import msgspec

from modelswap_engine.protocol.errors import ErrorBody
from modelswap_engine.protocol.holding import HoldState
from modelswap_engine.protocol.messages import SwapRequest, SwapStatus, VersionRef
from modelswap_engine.protocol.states import SwapState, step


def begin(request: SwapRequest, *, source: VersionRef, at: str) -> SwapStatus:
    """Return the first status of an accepted operation."""
    return SwapStatus(
        operation_id=request.operation_id,
        seq=1,
        revision=request.fence.revision,
        source=source,
        target=request.target,
        hold=HoldState(mark=request.hold.mark, seconds_left=request.hold.seconds) if request.hold else None,
        started_at=at,
    )


def note(status: SwapStatus, **facts: Any) -> SwapStatus:
    """Return the status with more facts, in the same state."""
    return msgspec.structs.replace(status, seq=status.seq + 1, **facts)


def advance(status: SwapStatus, state: SwapState, **facts: Any) -> SwapStatus:
    """Return the status one legal step further.

    Raises:
        IllegalTransition: the table has no such step; a defect of the caller.
    """
    return note(status, state=step(status.state, state), **facts)


def end(status: SwapStatus, state: SwapState, *, at: str, error: ErrorBody | None = None, **facts: Any) -> SwapStatus:
    """Return the terminal status.

    The first error is the cause and stays; a later one (of the way back) only fills an empty place.

    Raises:
        IllegalTransition: the table has no such step.
        ValueError: the state is not a terminal one.
    """
    if not state.terminal:
        raise ValueError(f"{state} does not end an operation")
    return advance(status, state, error=status.error or error, finished_at=at, **facts)
