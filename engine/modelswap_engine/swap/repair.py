"""Putting live tensors right that are no longer what their version says, by a swap to the same version.

Found by a check or an audit. Until it is repaired nobody is answered from such weights: new requests wait, answers in
flight end with an error. The swap stages only the fusion groups of the damaged tensors, and its commit is proved by
hashing everything. What is retained is given up: memory that has changed by itself is not trusted twice.
"""

from collections.abc import Sequence

from modelswap_engine.protocol.errors import DigestMismatch, ModelswapError
from modelswap_engine.protocol.messages import SwapRequest
from modelswap_engine.protocol.policy import Loading, Traffic, TrafficMode, VerifyMode
from modelswap_engine.swap import machine, recovery
from modelswap_engine.swap.audit import check
from modelswap_engine.swap.core import Core, log
from modelswap_engine.swap.operations import Operation
from modelswap_engine.swap.transaction import Transaction

_ADVICE = "restart the pod; look for damaged memory if it happens again"


async def repair(core: Core) -> bool:
    """Try once; say whether the live tensors are right. After too many attempts the engine is quarantined."""
    core.preempt()
    async with core.mutex:
        live = core.live
        if live is None or not core.drift.names or core.operations.current is not None:
            return not core.drift.names  # a swap that waits its turn stages what is damaged, too
        core.drift.attempts += 1
        core.drift.begun += 1
        failure = await recovery.guarded(lambda: _attempt(core))
        if core.live is None:
            return False  # it was given up on the way
        if not core.drift.names:
            log.warning("repaired live tensors of %s by loading them again", live.digest)
            return True
        if core.drift.attempts >= core.settings.repair_attempts:
            core.unpublish("Quarantined", _hopeless(core.drift.names, failure).body(), quarantine=True)
        return False


async def _attempt(core: Core) -> None:
    """Look at everything first: a partial check may have found only a part of the damage."""
    live = core.live
    if live is None:
        return
    if (await check(core, live, "*")).ok:
        core.sound()
        return
    request = SwapRequest(
        operation_id=f"repair-{core.settings.boot_id}-{core.drift.begun}",
        target=live.ref,
        traffic=Traffic(mode=TrafficMode.ABORT),
        loading=Loading(verify=VerifyMode.STRICT, keep_previous=False),
    )
    status = machine.begin(request, source=live.ref, at=core.clock.timestamp())
    operation = Operation(status, started=core.clock.monotonic(), on_change=core.touch)
    core.operations.add_own(operation)
    core.touch()
    await Transaction(core, operation, request).run()


def _hopeless(names: Sequence[str], failure: ModelswapError | None) -> ModelswapError:
    why = f": {failure.message}" if failure is not None else ""
    return DigestMismatch(
        f"{len(names)} live tensors could not be repaired, the first is {names[0]}{why}",
        advice=_ADVICE,
        details={"tensor": names[0]},
    )
