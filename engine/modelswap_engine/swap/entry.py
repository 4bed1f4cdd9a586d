"""How a swap is let in: who asks, on which state, and that it becomes one operation that runs to its end.

From the last check to the known operation nothing is awaited, so of two callers at the same time one gets ``Busy``.
"""

from modelswap_engine.protocol.errors import BadRequest, Busy, ForeignOwner, ModelswapError, NotReady
from modelswap_engine.protocol.messages import Fence, SwapRequest, SwapStatus, VersionRef
from modelswap_engine.protocol.wire import LONGEST_ID
from modelswap_engine.swap import fence as fences
from modelswap_engine.swap import machine, proceeding
from modelswap_engine.swap.core import Core
from modelswap_engine.swap.holding import Holding
from modelswap_engine.swap.operations import Operation
from modelswap_engine.swap.startup import takeover
from modelswap_engine.swap.transaction import Transaction


def known(core: Core, operation_id: str, fence: Fence) -> SwapStatus | None:
    """Return what is known of an operation id that comes again, None for a new one.

    Raises:
        BadRequest: not an id.
        WrongPod: the call is meant for another pod.
    """
    if not 0 < len(operation_id) <= LONGEST_ID:
        raise BadRequest(f"operationId must have 1 to {LONGEST_ID} characters")
    fences.check_pod(fence, core.settings.pod_uid)
    if core.operations.find(operation_id) is None:
        return None
    return core.operations.status(operation_id)


async def check_owner(core: Core, fence: Fence, target: VersionRef) -> None:
    """Check the caller against the accepted decision; the assignment file may know of a newer owner.

    Raises:
        ForeignOwner, StaleRevision: the caller is not entitled.
    """
    accepted = core.journal.state.accepted
    try:
        fences.check_order(fence, accepted, target=target)
    except ForeignOwner:
        taken = None
        if accepted is not None:
            taken = takeover(accepted, await core.assignment(), pod_uid=core.settings.pod_uid)
        if taken is None:
            raise
        fences.check_order(fence, taken, target=target)
        await core.record(taken)
        core.touch()


async def accept(core: Core, request: SwapRequest, *, if_match: str | None) -> SwapStatus:
    """Make the request an operation, and return its first status once the decision is in the journal.

    Raises:
        Fenced: the caller is not entitled, or decided on another state.
        Busy: another operation is in progress.
        NotReady: the engine is stopping, or the swap is to wait and no version is live.
    """
    again = known(core, request.operation_id, request.fence)
    if again is not None:
        return again
    fences.check_order(request.fence, core.journal.state.accepted, target=request.target)
    fences.check_match(if_match, core.etag)
    if core.stopping:
        raise NotReady("the engine is stopping", advice="try another replica")
    if request.hold is not None:
        proceeding.check(core)
    operation = begin(core, request)
    await core.tasks.see_through(_begin(core, operation, request))
    return operation.status


def begin(core: Core, request: SwapRequest) -> Operation:
    """Make the request the one operation in progress; who is entitled to it was checked before.

    Raises:
        Busy: another operation is in progress, or a weight update is open.
    """
    current = core.operations.current
    if current is not None and current is core.operations.own and current.reversible:
        # A repair that has not touched anything gives way: the swap takes the damaged tensors along.
        current.interrupt(Busy("a swap came first", advice="it stages what is damaged, too"))
    elif current is not None:
        raise Busy(f"operation {current.id!r} is in progress", advice="wait for its end, or cancel it")
    if core.update is not None and core.update.id != request.operation_id:
        raise Busy(f"weight update {core.update.id!r} is open", advice="wait for its commit, or abort it")
    status = machine.begin(request, source=core.live_ref() or VersionRef(), at=core.clock.timestamp())
    holding = Holding(request.hold, clock=core.clock) if request.hold is not None else None
    operation = Operation(status, started=core.clock.monotonic(), on_change=core.touch, holding=holding)
    core.operations.add(operation)
    core.touch()
    return operation


async def _begin(core: Core, operation: Operation, request: SwapRequest) -> None:
    accepted = fences.accept(
        request.fence, core.journal.state.accepted, operation_id=operation.id, target=request.target
    )
    try:
        await core.record(accepted)
    except ModelswapError:
        core.operations.drop(operation)
        raise
    core.tasks.spawn(run(core, operation, request))


async def run(core: Core, operation: Operation, request: SwapRequest) -> None:
    """Carry an operation out, once its turn has come."""
    core.preempt()
    async with core.mutex:
        await Transaction(core, operation, request).run()
