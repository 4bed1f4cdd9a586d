"""Versions that are fetched before anybody swaps to them: their bytes come to this pod, and nothing else happens.

One at a time, in the order in which they were asked for, beside requests and swaps: it takes no turn and touches no
engine. A version that cannot be had is tried again; what was asked for before and is not any more is given up.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

import msgspec

from modelswap_engine.protocol.errors import Cancelled, Internal, ModelswapError
from modelswap_engine.protocol.messages import PlanRequest, VersionRef
from modelswap_engine.protocol.prefetch import PrefetchPhase, PrefetchRequest, PrefetchState
from modelswap_engine.sources.port import Brought
from modelswap_engine.swap import fence as fences
from modelswap_engine.swap import sourcing
from modelswap_engine.swap.core import Core
from modelswap_engine.swap.plan import ReadTensors
from modelswap_engine.swap.planner import assess

RETRY_SECONDS: Final = 60.0
LONGEST_RETRY_SECONDS: Final = 960.0

log = logging.getLogger("modelswap.swap")


class Prefetch:
    """What is asked for, and the task that fetches it.

    Args:
        core: the shared state; ``core.prefetched`` tells others of it.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._superseded: asyncio.Future[None] | None = None

    def ask(self, request: PrefetchRequest) -> list[PrefetchState]:
        """Take the place of what was asked for before; what is asked for again goes on where it is.

        Raises:
            Fenced: the caller is not entitled.
        """
        core = self._core
        fences.check_pod(request.fence, core.settings.pod_uid)
        fences.check_control(request.fence, core.journal.state.accepted)
        before = {found.target: found for found in core.prefetched}
        if list(before) != request.targets:
            core.prefetched = [before.get(target) or PrefetchState(target=target) for target in request.targets]
            core.touch()
            self._start_anew()
        return core.prefetched

    def _start_anew(self) -> None:
        if self._superseded is not None and not self._superseded.done():
            self._superseded.set_exception(Cancelled("other versions are wanted now"))
            self._superseded.exception()  # looked at: whoever waits for it may have ended
        self._superseded = asyncio.get_running_loop().create_future()
        self._core.tasks.spawn(self._work(self._superseded))

    async def _work(self, superseded: asyncio.Future[None]) -> None:
        core, pause = self._core, RETRY_SECONDS
        await core.retain()  # what is not wanted any more makes room
        while not superseded.done():
            for found in [found for found in core.prefetched if _due(found)]:
                if not superseded.done():
                    await self._one(found.target, superseded)
            if not any(_due(found) for found in core.prefetched):
                return
            await core.clock.sleep(pause)
            pause = min(2 * pause, LONGEST_RETRY_SECONDS)

    async def _one(self, target: VersionRef, superseded: asyncio.Future[None]) -> None:
        core = self._core
        self._note(target, phase=PrefetchPhase.FETCHING, error=None)
        try:
            # What a swap from the live version would read; more of it may be here already.
            async with assess(core, PlanRequest(target=target), unless=superseded) as assessment:
                refusals, work = assessment.decision.refusals, assessment.decision.work
                if refusals and not refusals[0].retryable:
                    raise refusals[0]
                self._note(target, digest=assessment.version.digest)
                names: Sequence[str] = work.names if isinstance(work, ReadTensors) else ()
                brought = await sourcing.obtain(core, assessment.version.resolved, names, unless=superseded)
            brought = brought or Brought()
            self._note(
                target, phase=PrefetchPhase.FETCHED, bytes_fetched=brought.source, bytes_from_peers=brought.peers
            )
        except ModelswapError as error:
            self._failed(target, error, superseded)
        except Exception as error:
            log.error("a version could not be fetched ahead", exc_info=error)
            self._failed(target, Internal(f"it failed by a defect: {type(error).__name__}"), superseded)

    def _failed(self, target: VersionRef, error: ModelswapError, superseded: asyncio.Future[None]) -> None:
        if not superseded.done():
            self._note(target, phase=PrefetchPhase.FAILED, error=error.body())

    def _note(self, target: VersionRef, **changes: object) -> None:
        core = self._core
        core.prefetched = [
            msgspec.structs.replace(found, **changes) if found.target == target else found for found in core.prefetched
        ]
        core.touch()


def _due(found: PrefetchState) -> bool:
    """Say whether it is worth trying: what was refused for good is not, until it is asked for anew."""
    if found.phase is PrefetchPhase.FAILED and found.error is not None:
        return found.error.retryable
    return found.phase is not PrefetchPhase.FETCHED
