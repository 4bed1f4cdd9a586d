"""One rank's end of the messages: holds the versions of the engine's live model, and exchanges them when it is told to.

It is called in the thread in which its engine computes, between two steps, so whatever is long goes on in a thread of
its own (:mod:`.works`). It answers, it never raises: an exception in one rank would leave the others' answers in the
engine's queues. It knows the engine as a :class:`~modelswap_engine.backends.inprocess.host.Host`, and no route to it.
"""

import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec

from modelswap_engine.backends.inprocess import wire
from modelswap_engine.backends.inprocess.adopt import adopt
from modelswap_engine.backends.inprocess.hashes import hashes
from modelswap_engine.backends.inprocess.host import Host
from modelswap_engine.backends.inprocess.lease import StagedLease
from modelswap_engine.backends.inprocess.loader import SkeletonLoader
from modelswap_engine.backends.inprocess.skeleton import Skeleton
from modelswap_engine.backends.inprocess.ways import Ways
from modelswap_engine.backends.inprocess.works import Finish, Works
from modelswap_engine.backends.port import Layout, Reply
from modelswap_engine.limits import Memory, MemoryProbe
from modelswap_engine.protocol.engine_state import MemoryState
from modelswap_engine.protocol.errors import Busy, ErrorBody, IncompatibleModel, Internal, ModelswapError, NotReady
from modelswap_engine.weights.pace import Pace
from modelswap_engine.weights.updater import WeightUpdater

_log: Final = logging.getLogger("modelswap.inprocess")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AgentSettings:
    """How the agent treats its engine.

    Attributes:
        lease_seconds: how long staged tensors stay when nobody asks about them.
        stage_bytes_per_second: upper bound of the rate of staging; 0 means none.
        share: of a core that each thread may use while the engine has requests; 1 is no bound.
        niceness: how much threads give way to the engine, 0 to 19.
    """

    lease_seconds: float = 600.0
    stage_bytes_per_second: int = 0
    share: float = 0.1
    niceness: int = 10


class Agent:
    """The versions in one rank.

    Args:
        host: the rank's engine.
        boot_id: of this start of the process.
        settings: how to treat it.
        busy: says whether the engine has requests to give way to; from any thread.
        bound: what its container may still use: what is staged is charged to that one, and not to the sidecar's.
    """

    def __init__(
        self,
        host: Host,
        *,
        boot_id: str,
        settings: AgentSettings | None = None,
        busy: Callable[[], bool] = lambda: False,
        bound: Callable[[], Memory] | None = None,
    ) -> None:
        self._host = host
        self._boot_id = boot_id
        self._bound = bound or MemoryProbe().read
        self._settings = settings or AgentSettings()
        self._lock = threading.RLock()
        self._skeleton: Skeleton | None = None
        self._loader: SkeletonLoader | None = None
        self._updater: WeightUpdater | None = None
        self._unproven = ""
        self._committed: wire.Answer | None = None
        self._ways = Ways()
        niceness, share = self._settings.niceness, self._settings.share
        self._works = Works(answer=self._failed, niceness=niceness, share=share, busy=busy)
        self._lease = StagedLease(seconds=self._settings.lease_seconds, expired=self._expire)

    def answer(self, text: str) -> str:
        """Carry out a call; never raises."""
        number, operation_id = 0, ""
        try:
            envelope = wire.decode_call(text)
            number, operation_id = envelope.number, _operation_of(envelope.call)
            with self._lock:
                found = self._act(envelope.call)
        except Exception as error:  # noqa: BLE001  # a rank answers, whatever happens
            found = self._failed(operation_id, error)
        return wire.encode_answer(msgspec.structs.replace(found, number=number))

    def _act(self, call: wire.Call) -> wire.Answer:
        match call:
            case wire.HelloCall():
                return self._answer(self._reply(), facts=self._facts())
            case wire.LayoutCall():
                return self._answer(self._reply(), layout=self._layout())
            case wire.MemoryCall():
                return self._answer(self._reply(), memory=self._memory())
            case wire.ProgressCall(work=work):
                return self._progress(work)
            case wire.CancelCall(work=work):
                self._works.cancel(work)
                return self._answer(self._reply())
            case wire.HashesCall():
                return self._hashes(call)
            case wire.AdoptCall():
                return self._adopt(call)
            case wire.StageCall():
                return self._stage(call)
            case wire.StageRetainedCall():
                return self._stage_retained(call)
            case wire.PrepareCall(operation_id=operation_id):
                return self._prepare(operation_id)
            case wire.CommitCall():
                return self._commit(call)
            case wire.VerifyCall():
                return self._verify(call)
            case wire.RollbackCall():
                return self._rollback(call)
            case wire.ReleaseCall(operation_id=operation_id, previous=previous):
                return self._release(operation_id, previous=previous)

    def _facts(self) -> wire.Facts:
        refusal = self._host.refusal()
        return wire.Facts(
            software=self._host.software,
            pid=os.getpid(),
            rank=self._host.rank,
            ranks=self._host.ranks,
            architecture=self._host.architecture,
            refusal=refusal,
            commit_method="" if refusal else self._host.ways().method.value,
            digest=self._updater.digest if self._updater is not None and not self._unproven else "",
            adapter_modules=self._host.adapter_modules(),
        )

    def _layout(self) -> Layout:
        groups = self._versions().groups
        return Layout(
            architecture=self._host.architecture,
            groups=tuple(group.sources for group in groups),
            tied=tuple(group.tied for group in groups if group.tied),
        )

    def _memory(self) -> MemoryState:
        bound = self._bound()
        found = MemoryState(limit_bytes=bound.limit, available_bytes=bound.available)
        if self._updater is None:
            return found
        sizes = self._updater.sizes()
        return msgspec.structs.replace(
            found, model_bytes=sizes.live, staged_bytes=sizes.staged, previous_bytes=sizes.previous
        )

    def _progress(self, work: str) -> wire.Answer:
        found = self._works.progress(work)
        if not self._unproven and self._works.operation_of(work):
            self._lease.renew(self._works.operation_of(work))
        return found

    def _hashes(self, call: wire.HashesCall) -> wire.Answer:
        updater, loader = self._versions(), self._rules()

        def work(pace: Pace) -> Finish:
            found = hashes(updater, loader, call.pattern, still=call.still, pace=pace)
            return lambda: self._answer(self._reply(), hashes=found)

        lane = self._works.inquiries
        return self._works.begin(lane, call.work, work, still=call.still, rate=call.bytes_per_second)

    def _adopt(self, call: wire.AdoptCall) -> wire.Answer:
        order, lane = call.order, self._works.changes
        if lane.work == call.work:
            return self._progress(call.work)
        lane.refuse_if_running()
        refusal = self._host.refusal()
        if refusal:
            raise IncompatibleModel(refusal, advice="use the engine's own routes, or restart it on each version")
        self._works.call_off(self._works.inquiries)
        self._updater, self._unproven, self._committed = None, "", None
        self._lease.end()
        if self._skeleton is None:
            self._skeleton = Skeleton(self._host.skeleton(), self._host.load)
        self._loader = loader = SkeletonLoader(self._host, self._skeleton)
        self._ways = ways = self._host.ways()
        started = time.perf_counter()

        def work(pace: Pace) -> Finish:
            updater = adopt(order, loader, ways=ways, pace=pace)
            return lambda: self._adopted(updater, order.operation_id, time.perf_counter() - started)

        return self._works.begin(lane, call.work, work, operation_id=order.operation_id, still=True)

    def _adopted(self, updater: WeightUpdater, operation_id: str, seconds: float) -> wire.Answer:
        self._updater = updater
        self._host.wipe()
        self._host.settled()
        return self._answer(self._reply(operation_id, seconds=seconds, digest=updater.digest))

    def _stage(self, call: wire.StageCall) -> wire.Answer:
        order, lane = call.order, self._works.changes
        if lane.work == call.work:
            return self._progress(call.work)
        updater = self._quiet()
        read, started = updater.begin(order), time.perf_counter()

        def work(pace: Pace) -> Finish:
            staged = read(pace)
            seconds = time.perf_counter() - started

            def done() -> wire.Answer:
                updater.accept(staged)
                return self._answer(
                    self._reply(
                        order.operation_id,
                        seconds=seconds,
                        digest=staged.version.digest,
                        fetched_bytes=staged.fetched_bytes,
                        staged_bytes=updater.sizes().staged,
                    )
                )

            return done

        self._lease.renew(order.operation_id)
        rate = self._settings.stage_bytes_per_second
        return self._works.begin(lane, call.work, work, operation_id=order.operation_id, rate=rate)

    def _stage_retained(self, call: wire.StageRetainedCall) -> wire.Answer:
        updater = self._quiet()
        staged = updater.stage_retained(call.order)
        self._lease.renew(call.order.operation_id)
        size = updater.sizes().staged
        return self._answer(self._reply(call.order.operation_id, digest=staged.version.digest, staged_bytes=size))

    def _prepare(self, operation_id: str) -> wire.Answer:
        updater, started = self._quiet(), time.perf_counter()
        digest = updater.prepare(operation_id)
        self._lease.renew(operation_id)
        return self._answer(self._reply(operation_id, seconds=time.perf_counter() - started, digest=digest))

    def _commit(self, call: wire.CommitCall) -> wire.Answer:
        operation_id = call.operation_id
        # First of all, and whatever comes of the rest: ranks that schedule alike must go on with the same cache.
        forgot = self._host.forget() if call.whole else None
        if forgot is False:
            raise Busy("the engine holds requests", advice="wait for their end")
        if self._committed is not None and self._committed.reply.operation_id == operation_id:
            return self._committed
        updater = self._quiet()
        if self._works.inquiries.still:
            self._works.inquiries.refuse_if_running()
        updater.staged(operation_id)
        self._lease.end()
        self._unproven = operation_id
        self._ways.place.quiesce()  # the step that was queued last still reads the old values
        started = time.perf_counter_ns()
        method = updater.commit(operation_id)
        self._ways.place.quiesce()
        window = (time.perf_counter_ns() - started) / 1000
        self._committed = self._answer(self._window(operation_id, window, method=method, digest=updater.digest))
        if call.whole:
            self._committed = self._proved(self._committed, updater, forgot=bool(forgot))
        return self._committed

    def _proved(self, answer: wire.Answer, updater: WeightUpdater, *, forgot: bool) -> wire.Answer:
        self._verified(answer.reply.operation_id, updater.verify(strict=False), time.perf_counter())
        self._host.called(updater.digest)
        return msgspec.structs.replace(answer, forgot=forgot, proved=True)

    def _verify(self, call: wire.VerifyCall) -> wire.Answer:
        updater, lane, started = self._versions(), self._works.changes, time.perf_counter()
        if lane.work == call.work:
            return self._progress(call.work)
        lane.refuse_if_running()
        if not call.strict:
            return self._verified(call.operation_id, updater.verify(strict=False), started)

        def work(pace: Pace) -> Finish:
            digest = updater.verify(strict=True, pace=pace)
            return lambda: self._verified(call.operation_id, digest, started)

        return self._works.begin(lane, call.work, work, operation_id=call.operation_id, still=True)

    def _verified(self, operation_id: str, digest: str, started: float) -> wire.Answer:
        if self._unproven:
            self._host.wipe()
        self._unproven = ""
        return self._answer(self._reply(operation_id, seconds=time.perf_counter() - started, digest=digest))

    def _rollback(self, call: wire.RollbackCall) -> wire.Answer:
        operation_id = call.operation_id
        forgot = call.whole and self._forgotten()
        self._works.changes.refuse_if_running()
        updater = self._versions()
        self._ways.place.quiesce()
        started = time.perf_counter_ns()
        undone = updater.rollback(operation_id)
        self._ways.place.quiesce()
        window = (time.perf_counter_ns() - started) / 1000
        if undone is not None:
            self._committed, self._unproven = None, operation_id
        answer = self._answer(self._window(operation_id, window, method=undone or "", digest=updater.digest))
        return self._proved(answer, updater, forgot=forgot) if call.whole else answer

    def _forgotten(self) -> bool:
        """Drop the cache, if that can be done here: what must be undone is undone all the same."""
        try:
            return bool(self._host.forget())
        except Exception:  # noqa: BLE001  the engine's own, of any version
            _log.exception("the engine's cache could not be dropped from here; whoever asked does it by its routes")
            return False

    def _release(self, operation_id: str, *, previous: bool) -> wire.Answer:
        if self._works.changes.operation_id == operation_id:
            self._works.call_off(self._works.changes)
        if self._updater is not None:
            self._quiet().release(operation_id, previous=previous)
        self._lease.end()
        return self._answer(self._reply(operation_id))

    def _expire(self, operation_id: str) -> None:
        with self._lock:
            if self._unproven or self._updater is None:
                return
            _log.warning("operation %s is abandoned; what it staged is dropped", operation_id)
            if self._works.changes.operation_id == operation_id:
                self._works.call_off(self._works.changes)
            self._updater.release(operation_id, previous=False)

    def _quiet(self) -> WeightUpdater:
        """Return the versions at a moment at which something may be begun.

        Raises:
            Busy: a long call goes on, or the means to undo the last commit are still needed.
        """
        updater = self._versions()
        self._works.changes.refuse_if_running()
        if self._unproven:
            raise Busy(
                f"what operation {self._unproven} made live is not proven; this would give up the means to undo it",
                advice="verify it, or roll it back and verify that",
            )
        return updater

    def _versions(self) -> WeightUpdater:
        if self._updater is None:
            raise NotReady("no version was adopted", advice="adopt the one that the engine has loaded")
        return self._updater

    def _rules(self) -> SkeletonLoader:
        if self._loader is None:
            raise NotReady("no version was adopted", advice="adopt the one that the engine has loaded")
        return self._loader

    def _window(self, operation_id: str, microseconds: float, *, method: str, digest: str) -> Reply:
        seconds = microseconds / 1e6
        return self._reply(
            operation_id, seconds=seconds, commit_microseconds=microseconds, method=method, digest=digest
        )

    def _reply(self, operation_id: str = "", **fields: Any) -> Reply:
        return Reply(operation_id=operation_id, rank=self._host.rank, boot_id=self._boot_id, **fields)

    def _answer(self, reply: Reply, **fields: Any) -> wire.Answer:
        return wire.Answer(number=0, reply=reply, **fields)

    def _failed(self, operation_id: str, error: Exception | None) -> wire.Answer:
        return self._answer(self._reply(operation_id, error=None if error is None else _body(error)))


def _operation_of(call: wire.Call) -> str:
    match call:
        case wire.AdoptCall(order=order) | wire.StageCall(order=order) | wire.StageRetainedCall(order=order):
            return order.operation_id
        case (
            wire.PrepareCall(operation_id=operation_id)
            | wire.CommitCall(operation_id=operation_id)
            | wire.VerifyCall(operation_id=operation_id)
            | wire.RollbackCall(operation_id=operation_id)
            | wire.ReleaseCall(operation_id=operation_id)
        ):
            return operation_id
        case _:
            return ""


def _body(error: Exception) -> ErrorBody:
    if isinstance(error, ModelswapError):
        return error.body()
    _log.error("defect in the engine's process", exc_info=error)
    return Internal(
        f"{type(error).__name__}: {error}", advice="this is a defect; the engine's log has the traceback"
    ).body()
