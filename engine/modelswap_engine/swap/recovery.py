"""The ways back: dropping what was staged, putting the old tensors back, loading the old version again, or quarantine.

The engine's word that a step failed is never the last one: what is live afterwards is proved. The caller has the mutex.
"""

from collections.abc import Awaitable, Callable
from typing import Final

from modelswap_engine.protocol.errors import Internal, ModelswapError, WorkerLost
from modelswap_engine.protocol.states import SwapState
from modelswap_engine.swap import loader
from modelswap_engine.swap.core import Core, log
from modelswap_engine.swap.operations import Operation
from modelswap_engine.swap.versions import Version

_HOLD: Final = "recovery"


async def guarded(work: Callable[[], Awaitable[None]]) -> ModelswapError | None:
    """Run work and return its error; a defect of ours becomes a typed one without a traceback in it."""
    try:
        await work()
    except ModelswapError as error:
        return error
    except Exception as error:  # noqa: BLE001 - whatever went wrong, the old version must come back
        log.exception("a swap step failed by a defect")
        return Internal(f"{type(error).__name__} in the swap transaction", advice="report it with the engine's log")
    return None


async def abort(core: Core, operation: Operation, error: ModelswapError, *, staged: bool) -> SwapState:
    """Before COMMITTING: the old version has never left; drop what was brought beside it.

    Args:
        core: the shared state.
        operation: the one that fails.
        error: why.
        staged: the engine was asked to stage.
    """

    async def drop() -> None:
        if isinstance(error, WorkerLost) or not core.engine.healthy:
            raise error
        if operation.status.state is SwapState.PAUSING:
            await core.engine.resume(operation.id)
        if staged:
            await core.engine.release(operation.id, previous=core.previous is None)
            await core.refresh_memory()

    operation.note(error=error.body())
    live = core.live
    if await guarded(drop) is not None and live is not None and not await _spared(core, live, operation.id):
        await revive(core, live, operation_id=operation.id)
    return SwapState.ABORTED


async def roll_back(core: Core, operation: Operation, error: ModelswapError, old: Version) -> SwapState:
    """From COMMITTING on: put the old tensors back and prove it, by a whole load where that fails."""
    # When it was the resume that failed, ranks may be stepping already: no ground for putting pointers back.
    standing = operation.status.state is not SwapState.VERIFIED

    async def put_back() -> None:
        if isinstance(error, WorkerLost) or not standing:
            raise error
        await core.engine.rollback(operation.id)
        await core.engine.verify(operation.id, old.digest, strict=False)
        core.publish(old, previous=None)
        await core.engine.resume(operation.id)
        await core.engine.release(operation.id, previous=True)
        await core.refresh_memory()

    operation.advance(SwapState.ROLLING_BACK, error=error.body())
    failure = await guarded(put_back)
    if failure is None:
        return SwapState.ROLLED_BACK
    if standing and await _spared(core, old, operation.id):
        log.warning("rolled back on the replicas that are left: %s", failure.message)
        return SwapState.ROLLED_BACK
    log.warning("rolling back by a whole load of %s: %s", old.digest, failure.message)
    failure = await _reload(core, old, operation.id)
    if failure is None:
        # A version that was sent is lost with the engine's memory: what serves now is proved, but not the old one.
        back = core.live is not None and core.live.digest == old.digest
        return SwapState.ROLLED_BACK if back else SwapState.QUARANTINED
    core.unpublish("Quarantined", failure.body(), quarantine=True)
    return SwapState.QUARANTINED


async def _spared(core: Core, version: Version, operation_id: str) -> bool:
    """Have a version live again on the replicas that are left; the supervisor looks after the others.

    Says whether there are any: they serve from now on, and nobody waits for the rest to be loaded.
    """
    spared = False

    async def settle() -> None:
        nonlocal spared
        spared = await core.engine.settle(operation_id, version.digest)

    if await guarded(settle) is not None or not spared:
        return False
    core.publish(version, previous=None)
    core.poked.set()
    return True


async def revive(core: Core, version: Version, *, operation_id: str) -> bool:
    """Load the version that must be live into the restarted workers; says whether it worked.

    New requests wait at the gate meanwhile, unless a replica is left that serves them. Where it fails and none is,
    nobody is served. The supervisor goes on trying.
    """
    failure = await _reload(core, version, operation_id)
    if failure is None:
        return True
    if core.engine.holds(version.digest):
        log.warning("a replica cannot be restarted, the others serve: %s", failure.message)
        core.away = f"{failure.message} ({failure.advice})" if failure.advice else failure.message
        core.touch()
    else:
        core.unpublish("LoadFailed", failure.body())
        core.poked.set()
    return False


async def _reload(core: Core, version: Version, operation_id: str) -> ModelswapError | None:
    lasting = version.lasting
    alone = not core.engine.holds(version.digest)

    async def load() -> None:
        if alone:
            await loader.reload(core, lasting, operation_id=operation_id)
        else:
            await loader.refill(core, version, operation_id=operation_id)

    if alone:
        core.gate.close(_HOLD)
        core.troubled("Recovering", f"a worker was lost; loading {lasting.version} {lasting.digest} again")
    try:
        failure = await guarded(load)
        if failure is None:
            core.restarts += 1
            core.healthy()
        return failure
    finally:
        if alone:
            core.gate.open(_HOLD)
