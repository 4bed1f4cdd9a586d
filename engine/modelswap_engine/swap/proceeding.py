"""What is said to a swap that waits once it has staged: that its lease goes on, or that it does.

The operation keeps its turn while it waits, so nothing else changes weights under what is staged; what makes any
operation give up (a cancel, a lost worker, the end of the process) makes this one give up, too.
"""

from modelswap_engine.protocol.errors import Busy, NotReady
from modelswap_engine.protocol.messages import HoldRequest, ProceedRequest, SwapStatus
from modelswap_engine.swap import fence as fences
from modelswap_engine.swap.core import Core
from modelswap_engine.swap.holding import Holding
from modelswap_engine.swap.operations import Operation


def check(core: Core) -> None:
    """Refuse to wait where the wait would keep something broken from being put right.

    Raises:
        NotReady: no version is live.
        Busy: live tensors are damaged and to be repaired.
    """
    if core.live is None:
        raise NotReady("no version is live in this engine, so none can go on serving", advice="swap without a hold")
    if core.drift.names:
        raise Busy("live tensors are damaged and are repaired first", advice="try again when they are")


def renew(core: Core, operation_id: str, request: HoldRequest) -> SwapStatus:
    """Begin the lease of an operation anew; one that does not wait, or no longer, is returned as it is.

    Raises:
        NotFound: no such operation.
        Fenced: the caller is not entitled.
    """
    fences.check_pod(request.fence, core.settings.pod_uid)
    fences.check_control(request.fence, core.journal.state.accepted)
    found = core.operations.find(operation_id)
    if not isinstance(found, Operation) or found.done or found.holding is None:
        return core.operations.status(operation_id)
    found.holding.renew(request.seconds)
    return found.shown()


async def proceed(core: Core, operation_id: str, request: ProceedRequest) -> SwapStatus:
    """Let an operation go on; one that does already, or has ended, is returned as it is.

    The decision to commit is one of its own, with its own revision: it is accepted, and in the journal, before the
    operation moves.

    Raises:
        NotFound: no such operation.
        Fenced: the caller is not entitled.
        Unavailable: the journal does not take it; the operation waits on.
    """
    fences.check_pod(request.fence, core.settings.pod_uid)
    found = core.operations.find(operation_id)
    if not isinstance(found, Operation) or found.done or found.holding is None or found.holding.over:
        return core.operations.status(operation_id)
    fences.check_order(request.fence, core.journal.state.accepted, target=found.status.target)
    await core.tasks.see_through(_proceed(core, found, found.holding, request))
    return found.status


async def _proceed(core: Core, operation: Operation, holding: Holding, request: ProceedRequest) -> None:
    accepted = fences.accept(
        request.fence, core.journal.state.accepted, operation_id=operation.id, target=operation.status.target
    )
    await core.record(accepted)
    if holding.over or operation.done or not operation.reversible:
        return  # it gave up, or another call let it go on, while this was written
    operation.note(hold=None, revision=accepted.revision)
    holding.let_go(peers_ready=request.peers_ready)
