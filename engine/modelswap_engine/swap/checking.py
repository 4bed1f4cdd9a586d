"""A look at the live tensors that somebody asked for: against the version, or a snapshot of an earlier moment."""

from contextlib import nullcontext
from typing import Final

from modelswap_engine.protocol.engine_state import CheckState
from modelswap_engine.protocol.errors import Busy, NotReady
from modelswap_engine.protocol.messages import CheckAction, CheckRequest, CheckResult
from modelswap_engine.swap import snapshot
from modelswap_engine.swap.audit import check
from modelswap_engine.swap.core import Core
from modelswap_engine.swap.still import still

_NAMES_SHOWN: Final = 100


async def look(core: Core, request: CheckRequest) -> CheckResult:
    """Re-hash live tensors; a mismatch with the live version holds all requests until it is repaired.

    Raises:
        BadRequest: the pattern names nothing, or snapshots are switched off.
        NotFound: a comparison without a snapshot.
        Busy: an operation is in progress.
        DrainTimeout: requests inside did not end in the time that the check may wait for them.
        NotReady: nothing is live.
    """
    if core.operations.current is not None:
        raise Busy(f"operation {core.operations.current.id!r} is in progress", advice="try again when it has ended")
    async with core.mutex:
        if core.live is None:
            raise NotReady("no version is live in this engine", advice="read the state for the reason")
        by_snapshot = {CheckAction.SNAPSHOT: snapshot.take, CheckAction.COMPARE: snapshot.compare}.get(request.action)
        async with still(core, request.timeout_seconds) if request.still else nullcontext():
            result = await (by_snapshot or check)(core, core.live, request.pattern, still=request.still)
    core.last_check = _remembered(result, request, finished_at=core.clock.timestamp())
    core.touch()
    return result


def _remembered(result: CheckResult, request: CheckRequest, *, finished_at: str) -> CheckState:
    """Return what the state says of a check that somebody asked for; at most so many names."""
    return CheckState(
        action=request.action,
        pattern=request.pattern,
        digest=result.digest,
        ok=result.ok,
        tensors=result.checked,
        bytes=result.bytes,
        seconds=result.seconds,
        mismatched=list(dict.fromkeys(item.name for item in result.mismatched))[:_NAMES_SHOWN],
        finished_at=finished_at,
    )
