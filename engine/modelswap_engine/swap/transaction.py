"""One swap from PLANNED to its end (docs/architecture.md, The swap).

The order of the steps is the safety argument: everything that can fail for want of something happens before the gate
closes; the intent is on the disk before anything changes; nothing is shown to clients before it is proved. Whatever
fails, :mod:`recovery` brings the old version back, and the gate opens again exactly once.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from modelswap_engine.backends.port import PromptTrial, RequestPolicy, Stage, StageRetained
from modelswap_engine.protocol.errors import Busy, InvalidCheckpoint, ManifestMismatch, ModelswapError
from modelswap_engine.protocol.messages import PlanRequest, SwapRequest
from modelswap_engine.protocol.policy import TrafficMode, VerifyMode
from modelswap_engine.protocol.states import SwapState
from modelswap_engine.sources.port import Brought, Resolved
from modelswap_engine.swap import loader, proceeding, recovery, sourcing
from modelswap_engine.swap.audit import audit
from modelswap_engine.swap.checks import try_out
from modelswap_engine.swap.core import Core
from modelswap_engine.swap.engine import Replies
from modelswap_engine.swap.operations import Operation
from modelswap_engine.swap.plan import CONTINUING, Decision, Nothing, ReadTensors
from modelswap_engine.swap.planner import assess
from modelswap_engine.swap.reclaim import reclaim
from modelswap_engine.swap.records import Intent, Served
from modelswap_engine.swap.traffic import Window
from modelswap_engine.swap.versions import Version

_S = SwapState
_MET: Final = {
    RequestPolicy.RECOMPUTE: "recomputed_requests",
    RequestPolicy.FREEZE: "frozen_requests",
    RequestPolicy.ABORT: "aborted_requests",
}
"""Where a status counts the running requests that a commit met."""
_TOLD_BYTES: Final = 16 << 20
"""How much travels until the status says so anew."""
_NAMES_SHOWN: Final = 100  # of changed tensors, in a status; the plan itself names them all


class Transaction:
    """The swap of one operation. Run it as a task of its own, with the mutex held.

    Args:
        core: the shared state.
        operation: what to report to.
        request: what is asked for.
    """

    def __init__(self, core: Core, operation: Operation, request: SwapRequest) -> None:
        self._core = core
        self._operation = operation
        self._request = request
        self._window = Window(core, operation, request.traffic)
        self._old: Version | None = None
        self._new: Version | None = None
        self._overlaps = request.traffic.mode is TrafficMode.OVERLAP
        self._waits = core.gate.waits
        self._adapted = False
        self._staged = False
        self._touched = False
        self._untried: Sequence[PromptTrial] = ()

    async def run(self) -> None:
        """Go through the whole transaction; never raises but for cancellation at shutdown."""
        core, operation = self._core, self._operation
        self._old = core.live
        held = core.held()
        error = await recovery.guarded(self._steps)
        operation.decided = True
        if error is None:
            state = _S.SERVING
        elif operation.status.state.reversible:
            state = await self._aborted(error)
        else:
            state = await self._rolled_back(error)
        self._leave()
        await recovery.guarded(core.companion.settle)
        await recovery.guarded(lambda: core.forget(*held, *([self._new.digest] if self._new is not None else [])))
        await core.finish(operation, state, error=error.body() if error is not None else None)
        if self._touched:
            audit(core)

    async def _steps(self) -> None:
        self._operation.check()
        if self._operation.holding is not None:
            proceeding.check(self._core)
        await (self._cold() if self._old is None else self._forward())

    async def _forward(self) -> None:
        operation = self._operation
        await self._core.refresh_memory()
        asked = self._request
        request = PlanRequest(
            target=asked.target, traffic=asked.traffic, loading=asked.loading, adapters=asked.adapters
        )
        async with assess(self._core, request, unless=operation.interrupted) as assessment:
            decision, self._new = assessment.decision, assessment.version
            operation.note(
                plan=msgspec.structs.replace(decision.plan, changed_names=decision.plan.changed_names[:_NAMES_SHOWN]),
                header_bytes=assessment.header_bytes,
                target=self._new.ref,
            )
            if decision.refusals:
                raise decision.refusals[0]
            if isinstance(decision.work, Nothing):
                # The wanted bytes are live already; only their name and the adapters on them may be new.
                await self._core.companion.stage(operation.id, asked.adapters, target=self._new.ref)
                operation.check()
                await self._wait(self._new)
                self._core.companion.seal()
                operation.check()
                self._core.publish(self._new, previous=self._core.previous)
            else:
                await self._stage(decision, self._new)
                await self._exchange(decision, self._new)

    async def _stage(self, decision: Decision, new: Version) -> None:
        core, operation = self._core, self._operation
        operation.advance(_S.FETCHING)
        work, began = decision.work, core.clock.monotonic()
        fetched = await self._bring(new.resolved, work.names) if isinstance(work, ReadTensors) else None
        order = self._order(decision, new)
        self._staged = True
        retained = core.previous
        if isinstance(order, StageRetained) or order.drop_previous:
            core.previous = None  # whatever happens to it now, it is no longer surely there
        try:
            replies = await core.engine.stage(order, unless=operation.interrupted)
        except (ManifestMismatch, InvalidCheckpoint):
            await self._unchanged(new, suspected=True)  # overwritten under the reader is not a bad version
            raise
        if isinstance(order, StageRetained):
            core.previous = retained
        seconds = core.clock.monotonic() - began
        operation.advance(_S.STAGED, staging_seconds=seconds, **_staged(replies, fetched))
        operation.check()
        for listener in core.listeners:
            await core.bounded(
                "preparing the tokenizer",
                listener.prepare(new.digest, new.directory),
                core.settings.stage_seconds,
                unless=operation.interrupted,
            )
        await core.companion.stage(operation.id, self._request.adapters, target=new.ref)
        if isinstance(order, Stage):
            await self._unchanged(new)
        same_tokens = decision.continuable
        self._untried = await try_out(core, operation, self._request, new.digest, same_tokens=same_tokens)
        await self._wait(new)
        await core.engine.prepare(operation.id, new.digest, overlap=self._overlaps)
        operation.advance(_S.PREPARED)
        operation.check()

    async def _wait(self, new: Version) -> None:
        """Where the swap was asked to wait: until it is told to go on. What follows costs memory, or service.

        Adapters are assigned and taken away meanwhile, so theirs are given back and staged again as they are then.
        """
        core, operation, holding = self._core, self._operation, self._operation.holding
        if holding is None:
            return
        if holding.over:  # it was told before it came here
            self._meet(holding.peers_ready)
            return
        await core.companion.settle()
        await recovery.guarded(core.refresh_memory)
        operation.note(hold=holding.state(held=True))
        await holding.passed(unless=operation.interrupted)
        self._meet(holding.peers_ready)
        effect = await core.companion.assess(self._request.adapters, target=new.ref)
        if effect.refusals:
            raise effect.refusals[0]
        if effect.changes and self._request.traffic.mode in CONTINUING:
            raise Busy("adapters of the base changed while the swap waited", advice="plan it again")
        self._adapted = bool(effect.changes)
        await core.companion.stage(operation.id, self._request.adapters, target=new.ref)
        operation.check()

    def _meet(self, peers_ready: int) -> None:
        """Drain by who else serves when it goes on, not by who did when it was asked for."""
        traffic = msgspec.structs.replace(self._request.traffic, peers_ready=peers_ready)
        self._window = Window(self._core, self._operation, traffic)

    async def _bring(self, resolved: Resolved, names: Sequence[str]) -> Brought | None:
        """Have the bytes of tensors in this pod; return how many travelled, None where they are read at the source."""
        operation = self._operation

        def travelled(brought: Brought) -> None:
            if brought.source + brought.peers - operation.status.bytes_travelled >= _TOLD_BYTES:
                operation.note(**_counted_bytes(brought))

        return await sourcing.obtain(self._core, resolved, names, travelled=travelled, unless=operation.interrupted)

    async def _unchanged(self, new: Version, *, suspected: bool = False) -> None:
        work = new.resolved.unchanged(suspected=suspected)
        await self._core.bounded("the source", work, self._core.settings.resolve_seconds)

    def _order(self, decision: Decision, new: Version) -> Stage | StageRetained:
        work, operation_id, directory = decision.work, self._operation.id, str(new.directory)
        if not isinstance(work, ReadTensors):
            return StageRetained(operation_id=operation_id, digest=new.digest, directory=directory)
        return Stage(
            operation_id=operation_id,
            digest=new.digest,
            directory=directory,
            tensors=tuple(new.resolved.range_of(name) for name in work.names),
            drop_previous=work.drop_previous,
            keep_previous=decision.keep_previous,
        )

    async def _exchange(self, decision: Decision, new: Version) -> None:
        """From PREPARED to where the new version serves."""
        core, operation, window = self._core, self._operation, self._window
        await window.leave_endpoints()
        if new.lasts:  # what cannot be loaded again must not be what a restart looks for
            await core.record(Intent(operation_id=operation.id, source=operation.status.source, target=new.ref))
        operation.check()
        if self._overlaps and self._old is not None:
            await self._switch(new, self._old, keep=decision.keep_previous)
            return
        operation.advance(_S.PAUSING)
        continuable = decision.continuable and not self._adapted and not self._untried
        policy = await window.shut(continuable=continuable)
        operation.check()
        core.companion.seal()
        await core.engine.pause(operation.id, policy)
        operation.check()
        self._touched = True
        operation.advance(_S.COMMITTING, stop_latency_seconds=window.seconds, **self._counted(policy))
        replies = await core.engine.commit(operation.id, policy)
        operation.advance(_S.COMMITTED, **_committed(replies, policy))
        # Where memory was damaged, nothing is believed that was not hashed.
        strict = self._request.loading.verify is VerifyMode.STRICT or bool(core.drift.names)
        await core.engine.verify(operation.id, new.digest, strict=strict)
        if self._untried:
            await core.engine.try_live(operation.id, self._untried)
        operation.advance(_S.VERIFIED)
        core.publish(new, previous=self._old)
        core.sound()
        await core.engine.resume(operation.id)
        self._leave()
        await self._tidy(keep=decision.keep_previous)

    async def _switch(self, new: Version, old: Version, *, keep: bool) -> None:
        """Overlap: new requests go to the new instance from one moment to the next, and none waits for it."""
        core, operation = self._core, self._operation
        core.companion.seal()
        self._touched = True
        operation.advance(_S.COMMITTING)
        replies = await core.engine.commit(operation.id, RequestPolicy.OVERLAP)
        operation.advance(_S.COMMITTED, **_committed(replies, RequestPolicy.OVERLAP))
        await core.engine.verify(operation.id, new.digest, strict=self._request.loading.verify is VerifyMode.STRICT)
        operation.advance(_S.VERIFIED)
        core.retiring = old
        core.publish(new, previous=old)
        if new.lasts:  # whatever becomes of the engine while the old instance ends, this is what it must serve
            await core.record_owed(Served(version=new.ref))
        if await reclaim(core, operation, old) is not None:
            # An engine that cannot let go of an instance is not sound; what must be live is loaded anew.
            await recovery.revive(core, new, operation_id=operation.id)
            return
        await self._tidy(keep=keep)

    async def _tidy(self, *, keep: bool) -> None:
        """The new version serves; nothing that fails from here on takes it back."""
        core, operation = self._core, self._operation

        async def tidy() -> None:
            if not keep:
                core.previous = None
            await core.engine.release(operation.id, previous=not keep)  # what undid the commit is not needed any more
            await core.refresh_memory()

        if await recovery.guarded(tidy) is not None:
            core.poked.set()  # the supervisor looks after the engine

    async def _cold(self) -> None:
        """Nothing is live: load the whole version, without traffic to care for."""
        core, operation = self._core, self._operation
        resolved = await loader.find(core, self._request.target, unless=operation.interrupted)
        operation.advance(_S.FETCHING, header_bytes=resolved.header_bytes)
        brought = await self._bring(resolved, [entry.name for entry in resolved.manifest.tensors])
        await core.companion.adopt(self._request.adapters, target=self._request.target)
        self._staged = True
        self._new = await loader.load(
            core,
            resolved,
            asked=self._request.target,
            operation_id=operation.id,
            unless=operation.interrupted,
        )
        total = resolved.manifest.total_bytes
        counted = _counted_bytes(Brought(source=total) if brought is None else brought)
        operation.advance(_S.STAGED, target=self._new.ref, bytes_staged=total, **counted)
        for state in (_S.PREPARED, _S.PAUSING, _S.COMMITTING, _S.COMMITTED, _S.VERIFIED):
            operation.advance(state)
        core.healthy()
        core.accept()

    async def _aborted(self, error: ModelswapError) -> SwapState:
        core = self._core
        if self._old is None:
            if not core.quarantined:
                core.unpublish("LoadFailed", error.body())
                core.poked.set()
            return _S.ABORTED
        return await recovery.abort(core, self._operation, error, staged=self._staged)

    async def _rolled_back(self, error: ModelswapError) -> SwapState:
        assert self._old is not None, "a cold load does not commit"  # noqa: S101
        return await recovery.roll_back(self._core, self._operation, error, self._old)

    def _leave(self) -> None:
        """Open the gate, once, and be ready again unless something else keeps the engine from it."""
        core = self._core
        self._operation.note(waited_requests=core.gate.waits - self._waits)
        seconds = self._window.reopen()
        if seconds is not None:
            self._operation.note(pause_seconds=seconds)
        core.closing = False
        if core.reason == "Draining":
            core.healthy()

    def _counted(self, policy: RequestPolicy) -> dict[str, int]:
        return {"drained_requests": self._window.inside} if policy is RequestPolicy.NONE_RUNNING else {}


def _staged(replies: Replies, brought: Brought | None) -> dict[str, int]:
    if brought is None:
        # Where files are read at the source, every rank reads the same bytes, which count once.
        brought = Brought(source=max(reply.fetched_bytes for reply in replies))
    return {"bytes_staged": sum(reply.staged_bytes for reply in replies), **_counted_bytes(brought)}


def _counted_bytes(brought: Brought) -> dict[str, int]:
    return {"bytes_fetched": brought.source, "bytes_from_peers": brought.peers}


def _committed(replies: Replies, policy: RequestPolicy) -> dict[str, float | int | str]:
    met = {_MET[policy]: sum(reply.requests for reply in replies)} if policy in _MET else {}
    return {
        "commit_window_microseconds": max(reply.commit_microseconds for reply in replies),
        "commit_method": ",".join(sorted({reply.method for reply in replies})),
        **met,
    }
