"""What the process remembers of one slot between passes; the planner is given a frozen view of it.

Everything here may be lost at any moment: it only keeps the operator from asking or trying again too soon.
"""

from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime, timedelta
from types import MappingProxyType

from modelswap_engine.protocol.errors import ErrorBody
from modelswap_engine.protocol.looking import SourceLook
from modelswap_engine.protocol.messages import Plan
from modelswap_operator.planning import watching
from modelswap_operator.planning.actions import FailedAttempt, LookAtSource, PlanOrder, PrefetchOrder, SwapOrder
from modelswap_operator.planning.backoff import LONGEST_SECONDS, SLOW_SECONDS, delay
from modelswap_operator.planning.errors import is_content, is_moved, passing
from modelswap_operator.planning.progress import advance
from modelswap_operator.planning.snapshot import Attempt, Memory, PlanKey, PlanResult, Progress, Snapshot, Watched
from modelswap_operator.planning.staging import swapping
from modelswap_operator.runtime.adapter_memory import AdapterMemory

UNASKED = timedelta(seconds=30)
"""Until a pod that could not be told what to fetch ahead is told again."""
MOVED_AT_ONCE = 3
"""How often a pod whose state moved meanwhile is tried again without waiting."""


class SlotMemory:
    """Plans asked for, attempts that failed, when the slot last came further, and which pods are known to be idle.

    Attributes:
        adapters: the same for the slot's adapters.
    """

    def __init__(self) -> None:
        self._plans: dict[PlanKey, PlanResult] = {}
        self._attempts: dict[str, Attempt] = {}
        self._progress: Progress | None = None
        self._generation = 0
        self._idle: set[str] = set()
        self._unasked: dict[str, datetime] = {}
        self._watched: Watched | None = None
        self.adapters = AdapterMemory()

    def view(self) -> Memory:
        """Return it as the planner may see it."""
        return Memory(
            plans=MappingProxyType(dict(self._plans)),
            attempts=MappingProxyType(dict(self._attempts)),
            progress=self._progress,
            idle=frozenset(self._idle),
            resolved=self.adapters.resolved,
            untold=self.adapters.untold,
            led_away=self.adapters.led_away,
            unasked=MappingProxyType(dict(self._unasked)),
            watched=self._watched,
            watched_adapters=self.adapters.watched,
        )

    def take_in(self, snapshot: Snapshot, now: datetime) -> Snapshot:
        """Forget what a fresh look has made pointless, and note progress; returns it with what is remembered now.

        What it says of memory is not read: answers of pods come in while a slot is looked at. Another spec, or a
        request to look again, cuts every wait short.
        """
        snapshot = replace(snapshot, memory=self.view())
        if snapshot.generation != self._generation:
            self._generation = snapshot.generation
            self._plans.clear()
        live = {p.uid: p.state.live.digest for p in snapshot.pods if p.state is not None and p.state.live is not None}
        present = {p.uid for p in snapshot.pods}
        revision = snapshot.assignment.revision if snapshot.assignment is not None else 0
        self._attempts = {
            uid: attempt
            for uid, attempt in self._attempts.items()
            if uid in present and attempt.revision == revision and live.get(uid) != attempt.digest
        }
        self._unasked = {uid: at for uid, at in self._unasked.items() if uid in present and at > now}
        if snapshot.asked_again:
            self._wait_no_longer(now)
        read = {p.uid for p in snapshot.pods if p.state is not None}
        self._idle &= present - read
        self._idle |= {p.uid for p in snapshot.pods if p.uid in read and swapping(p) is None}
        self.adapters.take_in(snapshot, now)
        self._progress = advance(snapshot, now)
        self._watched = watching.watched(snapshot, now)
        return replace(snapshot, memory=self.view())

    def looking(self, action: LookAtSource) -> None:
        """Remember that a pod looks at the source."""
        if action.adapter:
            self.adapters.looking_at(action.adapter)
        elif self._watched is not None:
            self._watched = watching.asked(self._watched)

    def looked(self, action: LookAtSource, answer: SourceLook | ErrorBody, *, now: datetime, random: float) -> None:
        """Remember what a pod saw there; one that could not tell changes nothing of what is known."""
        target = action.request.target
        if action.adapter:
            self.adapters.looked_at(action.adapter, target, answer, now=now, random=random)
        elif self._watched is not None:
            self._watched = watching.answered(self._watched, target, answer, now=now, random=random)

    def asked_ahead(self, orders: Iterable[PrefetchOrder], failed: Iterable[FailedAttempt], *, now: datetime) -> None:
        """Remember which pods could not be told what to fetch ahead."""
        for order in orders:
            self._unasked.pop(order.pod.uid, None)
        self._unasked |= {attempt.pod.uid: now + UNASKED for attempt in failed}

    def _wait_no_longer(self, now: datetime) -> None:
        """Make every waiting try due, and forget refusals; how many tries there were stays, for they are numbered."""
        self._attempts = {uid: replace(attempt, retry_at=now) for uid, attempt in self._attempts.items()}
        self._plans = {
            key: replace(plan, retry_at=now) if plan.error is not None else plan
            for key, plan in self._plans.items()
            if plan.error is None or not is_content(plan.error)
        }

    def sent(self, orders: Iterable[SwapOrder]) -> None:
        """Remember, before it is sent, that a pod is asked to swap: its answer may be lost on the way.

        One that is asked to stage and to wait serves on, whatever becomes of the call.
        """
        self._idle -= {order.pod.uid for order in orders if order.request.hold is None}

    def note(self, attempts: Iterable[FailedAttempt], *, now: datetime, random: float, slow: bool) -> None:
        """Remember failed attempts; the next try waits longer, and much longer once the deadline has passed."""
        for attempt in attempts:
            before = self._attempts.get(attempt.pod.uid)
            again = before is not None and before.revision == attempt.revision
            number = before.attempts + 1 if before is not None and again else 1
            wait = delay(number, random, longest=SLOW_SECONDS if slow else LONGEST_SECONDS)
            at_once = is_moved(attempt.error) and number <= MOVED_AT_ONCE
            self._attempts[attempt.pod.uid] = Attempt(
                operation_id=attempt.operation_id,
                revision=attempt.revision,
                digest=attempt.digest,
                attempts=number,
                retry_at=now if at_once else now + wait,
                error=attempt.error,
            )

    def asked(self, order: PlanOrder) -> None:
        """Remember that a pod is working on a plan."""
        before = self._plans.get(order.key)
        self._plans[order.key] = PlanResult(pod=order.pod.name, attempts=before.attempts if before else 0)

    def answered(self, order: PlanOrder, answer: Plan | ErrorBody, *, now: datetime, random: float) -> bool:
        """Remember the answer; False when nobody waits for it any more."""
        before = self._plans.get(order.key)
        if before is None or not before.pending:
            return False
        error = passing(answer) if isinstance(answer, Plan) else answer
        if error is not None:
            number = before.attempts + 1
            self._plans[order.key] = PlanResult(
                pod=order.pod.name, error=error, attempts=number, retry_at=now + delay(number, random)
            )
        elif isinstance(answer, Plan):
            self._plans[order.key] = PlanResult(pod=order.pod.name, plan=answer)
        return True
