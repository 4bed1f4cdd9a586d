"""One pass over a slot: look, decide, do it, say how it stands (docs/architecture.md, Pieces)."""

import asyncio
from collections import Counter
from collections.abc import Coroutine
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import datetime
from typing import Any

import structlog

from modelswap_engine.protocol import telemetry
from modelswap_engine.protocol.errors import ErrorBody
from modelswap_operator.api.labels import MODELVERSION_KIND, MODELVERSIONS
from modelswap_operator.api.reasons import Reason
from modelswap_operator.effects.observe import Contacts, Look
from modelswap_operator.planning.actions import (
    Action,
    AskAdapters,
    AskPlans,
    CancelSwaps,
    FailedAttempt,
    LookAtSource,
    NoteAttempts,
    PlanOrder,
    RecordFailure,
    RenewHolds,
    ResolveOrder,
    SendAdapters,
    SendPrefetch,
    StartSwaps,
    Wait,
    WriteAssignment,
)
from modelswap_operator.planning.assess import Assessment, highest_epoch
from modelswap_operator.planning.modelversion import plan, rest
from modelswap_operator.planning.progress import expired
from modelswap_operator.planning.snapshot import Snapshot
from modelswap_operator.runtime.adapter_reports import AdapterReports
from modelswap_operator.runtime.memory import SlotMemory
from modelswap_operator.runtime.task import Again, ObjectTask
from modelswap_operator.runtime.tools import Tools
from modelswap_operator.status import events
from modelswap_operator.status.conditions import standing
from modelswap_operator.status.summarize import summarize

_log = structlog.get_logger(__name__)


class SlotTask(ObjectTask):
    """Brings one slot to what its ModelVersion says."""

    kind = MODELVERSION_KIND
    plural = MODELVERSIONS

    def __init__(self, tools: Tools, *, namespace: str, name: str) -> None:
        super().__init__(tools, namespace=namespace, name=name)
        self._memory = SlotMemory()
        self._adapters = AdapterReports(tools, namespace=namespace, slot=name, memory=self._memory.adapters)
        self._contacts = Contacts()
        self._asking: set[asyncio.Task[None]] = set()
        self._log = _log.bind(kind=self.kind, namespace=namespace, name=name)

    async def look_and_act(self) -> Again:
        """Make one pass."""
        tools = self._tools
        look = await tools.observer.look(
            namespace=self.namespace,
            slot=self.name,
            epoch=tools.fencing.epoch,
            contacts=self._contacts,
        )
        if look.snapshot.elsewhere:
            self.standings = Counter()
            return Again()
        now = tools.now()
        snapshot = replace(look.snapshot, policy=tools.changes())
        look = replace(look, snapshot=self._memory.take_in(snapshot, now))
        if highest_epoch(look.snapshot) > look.snapshot.epoch:
            return await self._outdone(look.snapshot)
        action = plan(look.snapshot, now)
        with self._span(look.snapshot, action):
            await self._perform(look, action, now)
        self.standings = Counter()
        if not look.snapshot.deleted:
            await self._report(look, action, now)
        self.standings += await self._adapters.report(look, now)
        if look.snapshot.deleted:
            # Adapters without a slot are looked at again, so that they are counted.
            idle = isinstance(action, Wait)
            return Again(finished=idle and not look.snapshot.adapters, seconds=None if idle else 0.0)
        return Again(seconds=rest(action, now))

    def _span(self, snapshot: Snapshot, action: Action) -> AbstractContextManager[None]:
        """Give what a pass does a span of its own; most passes do nothing."""
        if isinstance(action, Wait):
            return nullcontext()
        revision = snapshot.assignment.revision if snapshot.assignment is not None else 0
        place = {"k8s.namespace.name": self.namespace, "modelswap.slot": self.name}
        facts = {"modelswap.generation": snapshot.generation, "modelswap.revision": revision}
        return telemetry.within(
            telemetry.Span("reconcile", {**place, **facts, "modelswap.action": type(action).__name__})
        )

    async def _outdone(self, snapshot: Snapshot) -> Again:
        """Somebody decided under a higher epoch: that is over when this process still leads, else it keeps out."""
        seen, fencing = highest_epoch(snapshot), self._tools.fencing
        self._log.error("a decision under a higher epoch was seen", seen=seen, epoch=snapshot.epoch)
        self._tools.metrics.outdone()
        text = f"a decision under epoch {seen} was seen, this operator's is {snapshot.epoch}"
        await self._tell(
            snapshot, (events.Note(reason=Reason.STALE_LEADER, action="Reconcile", text=text, warning=True),)
        )
        if not await fencing.outbid(seen):
            return Again()
        self._tools.metrics.leading(fencing.epoch)
        self._log.warning("this process holds the lease: a higher epoch was claimed", epoch=fencing.epoch)
        return Again(seconds=0.0)

    async def close(self) -> None:
        """Stop waiting for answers of pods."""
        for task in self._asking:
            task.cancel()
        await asyncio.gather(*self._asking, return_exceptions=True)

    async def _perform(self, look: Look, action: Action, now: datetime) -> None:
        tools = self._tools
        match action:
            case WriteAssignment():
                await tools.performer.publish(look, action)
                self._log.info("assignment published", revision=action.assignment.revision, why=action.why)
            case StartSwaps():
                self._memory.sent(action.orders)
                failed = await tools.performer.start(action)
                self._note(look.snapshot, failed, now)
                refused = {f.pod.uid for f in failed}
                action = StartSwaps(orders=tuple(o for o in action.orders if o.pod.uid not in refused))
            case RenewHolds():
                for failed_one in await tools.performer.renew(action):
                    self._log.warning(
                        "lease not renewed",
                        pod=failed_one.pod.name,
                        operation=failed_one.operation_id,
                        code=failed_one.error.code,
                        error=failed_one.error.message,
                    )
            case SendPrefetch():
                untaught = await tools.performer.prefetch(action)
                self._memory.asked_ahead(action.orders, untaught, now=now)
                for failed_one in untaught:
                    self._log.warning(
                        "not told what to fetch ahead", pod=failed_one.pod.name, code=failed_one.error.code
                    )
            case CancelSwaps():
                self._note(look.snapshot, await tools.performer.cancel(look, action), now)
            case NoteAttempts():
                self._note(look.snapshot, action.attempts, now)
            case AskPlans():
                for order in action.orders:
                    self._ask(order)
            case LookAtSource():
                self._watch(action)
            case SendAdapters():
                untold = await tools.performer.tell(action)
                self._memory.adapters.tell(action.orders, untold, now=now, random=tools.random())
                for pod in untold:
                    self._log.warning(
                        "adapters not told", pod=pod.pod.name, code=pod.error.code, error=pod.error.message
                    )
            case AskAdapters():
                for question in action.orders:
                    self._look_up(question)
            case RecordFailure() | Wait():
                pass
        await self._tell(look.snapshot, events.of_action(action))

    def _note(self, snapshot: Snapshot, attempts: tuple[FailedAttempt, ...], now: datetime) -> None:
        slow = snapshot.spec is not None and expired(Assessment(snapshot), now)
        self._memory.note(attempts, now=now, random=self._tools.random(), slow=slow)
        for attempt in attempts:
            self._log.warning(
                "attempt failed",
                pod=attempt.pod.name,
                operation=attempt.operation_id,
                code=attempt.error.code,
                error=attempt.error.message,
            )

    def _ask(self, order: PlanOrder) -> None:
        """Ask in the background: a pod may have to read a whole checkpoint to answer."""
        self._memory.asked(order)
        self._begin("plan", self._answer(order))

    def _look_up(self, order: ResolveOrder) -> None:
        """Ask in the background: a pod reads whole adapters to answer."""
        self._memory.adapters.looking_up(order)
        self._begin("adapters", self._looked_up(order))

    def _watch(self, action: LookAtSource) -> None:
        """Ask in the background: a source may take its time."""
        self._memory.looking(action)
        self._begin("look", self._looked(action))

    def _begin(self, what: str, question: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(question, name=f"{what} {self.namespace}/{self.name}")
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    async def _looked(self, action: LookAtSource) -> None:
        answer = await self._tools.performer.look(action)
        self._memory.looked(action, answer, now=self._tools.now(), random=self._tools.random())
        if isinstance(answer, ErrorBody):
            self._log.warning("source not looked at", pod=action.pod.name, code=answer.code, error=answer.message)
        self.wake()

    async def _looked_up(self, order: ResolveOrder) -> None:
        answer = await self._tools.performer.look_up(order)
        self._memory.adapters.looked_up(order, answer, now=self._tools.now(), random=self._tools.random())
        self.wake()

    async def _answer(self, order: PlanOrder) -> None:
        answer = await self._tools.performer.ask(order)
        if self._memory.answered(order, answer, now=self._tools.now(), random=self._tools.random()):
            self.wake()

    async def _report(self, look: Look, action: Action, now: datetime) -> None:
        """Write the status if it says anything new, and the Events that this is worth."""
        before = look.snapshot.status
        after = summarize(look.snapshot, action, now)
        self.standings[self.kind, standing(after.conditions)] += 1
        if after == before:
            return
        if await self.show(after, resource_version=look.resource_version):
            await self._tell(look.snapshot, events.of_status(before, after))

    async def _tell(self, snapshot: Snapshot, notes: tuple[events.Note, ...]) -> None:
        if not snapshot.uid:
            return
        for note in notes:
            await self._tools.events.write(
                kind=MODELVERSION_KIND,
                namespace=self.namespace,
                name=self.name,
                uid=snapshot.uid,
                note=note,
            )
