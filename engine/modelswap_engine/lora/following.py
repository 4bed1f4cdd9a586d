"""Bringing a pod's adapters to what is assigned to it, and keeping them there.

Level-triggered: whatever differs from the assignment is worked on, one task for each name. Some are read at the same
time, fewer of one place (`turns`), so that one whose source hangs or is bad keeps no other waiting; what is taken away
waits for none. What cannot be had leaves what is served under its name alone, is told in the state, and is tried again.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, Final

from modelswap_engine.lora.assignments import Assignments
from modelswap_engine.lora.changes import Changes
from modelswap_engine.lora.reading import defect
from modelswap_engine.lora.registrations import Registrations
from modelswap_engine.lora.registry import Registry
from modelswap_engine.lora.shelf import Shelf, log
from modelswap_engine.lora.terms import settled
from modelswap_engine.lora.turns import Turns
from modelswap_engine.protocol.adapters import AdapterSource, AssignedProblem, AssignedState, place_of
from modelswap_engine.protocol.assignment import AssignedAdapter
from modelswap_engine.protocol.errors import (
    AdapterLimit,
    AdapterNotFound,
    Cancelled,
    IncompatibleAdapter,
    InsufficientMemory,
    ModelswapError,
    Refused,
    StaleRevision,
    Unavailable,
)
from modelswap_engine.protocol.messages import Fence, VersionRef
from modelswap_engine.swap.clock import Clock, within
from modelswap_engine.swap.records import Assigned

FILE_SECONDS: Final = 15.0
"""How often the mounted assignment is looked at; with an operator at work a call comes sooner."""

SHORTEST_PAUSE: Final = 0.5
LONGEST_PAUSE: Final = 60.0
REFUSED_PAUSE: Final = 300.0
"""What is refused for its content is looked at again so rarely: somebody may have put other content there."""


@dataclass(frozen=True, kw_only=True)
class _Problem:
    source: AdapterSource
    requested_at: str
    error: ModelswapError
    attempts: int
    retry_at: float

    @property
    def room(self) -> bool:
        """True when it may be for the others that this one is not here."""
        return isinstance(self.error, AdapterLimit | InsufficientMemory)

    @property
    def late(self) -> bool:
        """True when its source did not answer in time."""
        return self.error.code == Unavailable.code

    def at_once(self) -> "_Problem":
        """Return it due, if that can help: to know whether there is room a whole adapter is read."""
        return replace(self, attempts=1, retry_at=0.0) if self.room and self.attempts else self


class Following:
    """The adapters of one engine, and what is assigned.

    Args:
        assignments: what is assigned.
        changes: how that comes about.
        registry, shelf, registrations: what there is.
        check_name: raises when a name cannot be an adapter's.
        clock: time.
        pod_uid: the pod this runs in.
    """

    def __init__(
        self,
        *,
        assignments: Assignments,
        changes: Changes,
        registry: Registry,
        shelf: Shelf,
        registrations: Registrations,
        check_name: Callable[[str], None],
        clock: Clock,
        pod_uid: str,
    ) -> None:
        self._assignments = assignments
        self._changes = changes
        self._registry = registry
        self._shelf = shelf
        self._registrations = registrations
        self._check_name = check_name
        self._clock = clock
        self._pod_uid = pod_uid
        self._turns = Turns()
        self._busy: dict[str, asyncio.Task[None]] = {}
        self._problems: dict[str, _Problem] = {}
        self._drains: dict[str, float] = {}
        self._followed: Assigned | None = None
        self._woken = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None

    # Life

    def wake(self) -> None:
        """Something has changed that may be worth a look."""
        self._woken.set()
        if self._loop is None and self._assignments.record is not None:
            self._loop = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """End what goes on."""
        tasks = [*self._busy.values(), *([self._loop] if self._loop is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                await self._step()
            except Exception:  # noqa: BLE001 - a defect of ours must not end this: nobody would begin it again
                log.exception("adapters are not followed for %g s", FILE_SECONDS)
                await self._clock.sleep(FILE_SECONDS)

    async def _step(self) -> None:
        self._woken.clear()
        self.follow()
        times = [problem.retry_at for name, problem in self._problems.items() if name not in self._busy]
        pause = max(SHORTEST_PAUSE, min([FILE_SECONDS, *(at - self._clock.monotonic() for at in times)]))
        try:
            await within(self._clock, pause, self._woken.wait())
        except TimeoutError:
            await self._assignments.adopt()

    # A start

    async def bring_all(self, seconds: float) -> None:
        """Have what is assigned, and nothing else, before requests are let in, as far as that can be had in time."""
        self.follow(starting=True)
        try:
            await within(self._clock, seconds, self._idle())
        except TimeoutError:
            log.warning("the base serves before %d of its adapters are there", len(self._busy))
        self.wake()

    async def _idle(self) -> None:
        while self._busy:
            await asyncio.wait(self._busy.values(), return_when=asyncio.FIRST_COMPLETED)

    # Following

    def follow(self, *, starting: bool = False) -> None:
        """Begin with whatever is not as it is assigned and due.

        Adapters of an object that was deleted stay as they are; only a start has still to know which they were.
        """
        record, base = self._assignments.record, self._changes.base_digest
        if record is None or not base or (record.released and not starting):
            return
        if record is not self._followed:  # it may have made room
            self._followed = record
            self._problems = {name: held.at_once() for name, held in self._problems.items()}
        self._drains |= {item.name: item.drain_timeout_seconds for item in record.adapters}
        self._problems = {name: held for name, held in self._problems.items() if name in self._assignments.adapters}
        for name in self._unassigned():
            self._begin(name, self._let_go(record, name))
        for item in record.adapters:
            self._look_at(record, item, base)

    def _look_at(self, record: Assigned, item: AssignedAdapter, base: str) -> None:
        source = item.source_for(base)
        known = self._registrations.get(item.name)
        if known is not None and known.accepted.order > record.order:
            self._stuck(item, source, _overruled(item.name, known.accepted.revision, record.revision))
        elif source is None:
            self._stuck(item, source, _no_source(item.name, base))
        elif self._served(record, source):
            self._problems.pop(item.name, None)
        elif self._due(item, source):
            self._begin(item.name, self._bring(record, item, source))

    def _due(self, item: AssignedAdapter, source: AdapterSource) -> bool:
        problem = self._problems.get(source.name)
        asked = (source, item.requested_at)
        if problem is None or not problem.attempts or (problem.source, problem.requested_at) != asked:
            return True
        return problem.retry_at <= self._clock.monotonic()

    def _served(self, record: Assigned, source: AdapterSource) -> bool:
        """Say whether a name leads to this content, on these terms, by this owner's decision."""
        known = self._registrations.get(source.name)
        if known is None or known.accepted.owner_uid != record.owner_uid or not self._registry.has(source.name):
            return False
        entry = self._registry.resolve(source.name)
        content = entry.content
        terms = (content.uri, content.base_digest, content.pinned) == (source.uri, source.base_digest, source.pinned)
        return entry.present and terms and source.digest in ("", content.digest)

    def _unassigned(self) -> list[str]:
        """Return names that an object decided about once and that are not assigned; a person's stay out of it."""
        record = self._assignments.record
        if record is None:
            return []
        return [
            name
            for name, item in self._registrations.items()
            if item.sources
            and item.accepted.owned
            and name not in self._assignments.adapters
            and item.accepted.order <= record.order
        ]

    def _begin(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        if name in self._busy:
            work.close()
            return
        task = asyncio.create_task(work)
        self._busy[name] = task
        task.add_done_callback(lambda _: self._ended(name))

    def _ended(self, name: str) -> None:
        del self._busy[name]
        self._registrations.base.touch()
        self.wake()

    async def _bring(self, record: Assigned, item: AssignedAdapter, source: AdapterSource) -> None:
        def entitled(_: VersionRef) -> None:
            now = self._assignments.record
            if now is None or self._assignments.adapters.get(item.name) != item or now.owner_uid != record.owner_uid:
                raise Cancelled("another assignment came", advice="it is followed instead")

        problem = self._problems.get(source.name)
        again = problem is not None and problem.source == source and problem.late
        try:
            self._check_name(item.name)
            async with self._turns.take(place_of(source.uri), again=again):
                await self._changes.load(
                    settled(source),
                    fence=self._fence(record),
                    operation_id=_operation(record),
                    drain_seconds=item.drain_timeout_seconds,
                    entitled=entitled,
                )
        except Cancelled:
            return
        except ModelswapError as error:
            self._failed(item, source, error)
        except Exception as error:  # noqa: BLE001 - a defect of ours: told, and not begun again at once
            log.exception("adapter %s", source.name)
            self._failed(item, source, defect(source.name, error))
        else:
            self._problems.pop(item.name, None)

    async def _let_go(self, record: Assigned, name: str) -> None:
        def entitled(_: VersionRef) -> None:
            if name in self._assignments.adapters:
                raise Cancelled("it is assigned again")

        try:
            fence, operation = self._fence(record), _operation(record)
            if not self._registry.has(name):
                await self._changes.forget(name, fence=fence, operation_id=operation)
                return
            entry = await self._changes.unload(name, fence=fence, operation_id=operation, entitled=entitled)
        except (AdapterNotFound, Cancelled):
            return  # somebody decided about it meanwhile
        except Exception:  # noqa: BLE001 - whatever it is, it is not begun again at once
            log.exception("adapter %s is not unloaded for %g s", name, LONGEST_PAUSE)
            await self._clock.sleep(LONGEST_PAUSE)  # it stays busy, so that it is not begun again at once
        else:
            self._shelf.sweep(entry)
            self._shelf.drain(entry, self._drains.pop(name, 0.0))

    # Problems

    def _failed(self, item: AssignedAdapter, source: AdapterSource, error: ModelswapError) -> None:
        before = self._problems.get(source.name)
        attempts = before.attempts + 1 if before is not None and before.source == source else 1
        if attempts == 1:
            log.warning("adapter %s is assigned and cannot be loaded: %s", source.name, error.message)
        problem = _Problem(source=source, requested_at=item.requested_at, error=error, attempts=attempts, retry_at=0.0)
        self._problems[source.name] = replace(problem, retry_at=self._clock.monotonic() + _pause(problem))

    def _stuck(self, item: AssignedAdapter, source: AdapterSource | None, error: ModelswapError) -> None:
        """Something that only another decision, or another base, can change."""
        shown = source or AdapterSource(name=item.name, uri=item.sources[0].uri if item.sources else "")
        self._problems[item.name] = _Problem(
            source=shown,
            requested_at=item.requested_at,
            error=error,
            attempts=0,
            retry_at=self._clock.monotonic() + REFUSED_PAUSE,
        )

    def state(self) -> AssignedState | None:
        """Return how far this pod is."""
        record = self._assignments.record
        if record is None:
            return None
        return AssignedState(
            owner_uid=record.owner_uid,
            epoch=record.epoch,
            revision=record.revision,
            adapters=len(record.adapters),
            open=self._open(record),
            problems=[
                AssignedProblem(
                    name=name,
                    uri=held.source.uri,
                    digest=held.source.digest,
                    base_digest=held.source.base_digest,
                    attempts=held.attempts,
                    error=held.error.body(),
                )
                for name, held in sorted(self._problems.items())
                if name in self._assignments.adapters
            ],
        )

    def _open(self, record: Assigned) -> int:
        if record.released:
            return 0
        base, names = self._changes.base_digest, {*self._busy, *self._unassigned()}
        for item in record.adapters:
            source = item.source_for(base)
            if source is not None and item.name not in self._problems and not self._served(record, source):
                names.add(item.name)
        return len(names)

    def _fence(self, record: Assigned) -> Fence:
        return Fence(pod_uid=self._pod_uid, owner_uid=record.owner_uid, epoch=record.epoch, revision=record.revision)


def _pause(problem: _Problem) -> float:
    longer = 2.0 ** min(problem.attempts - 1, 10)
    if problem.room:
        return min(REFUSED_PAUSE, longer)
    final = isinstance(problem.error, Refused) and not problem.error.retryable
    return REFUSED_PAUSE if final else min(LONGEST_PAUSE, longer)


def _operation(record: Assigned) -> str:
    return f"assigned-{record.epoch}-{record.revision}"


def _no_source(name: str, base: str) -> IncompatibleAdapter:
    return IncompatibleAdapter(
        f"adapter {name} is assigned without a source for base {base}, which is live",
        advice="add one to spec.sources of the LoRAAdapter, with this base as baseDigest or with none",
        details={"adapter": name, "actual": base},
    )


def _overruled(name: str, decided: int, assigned: int) -> StaleRevision:
    return StaleRevision(
        f"somebody decided about adapter {name} by hand in revision {decided}, after the assignment's {assigned}",
        advice="the operator overrules that with its next decision; change the LoRAAdapter instead",
    )
