"""Long calls of one rank: what was begun last, how far it is, and what came of it.

There are two lanes, because what only asks goes on beside what changes something. An outcome counts when somebody in
the engine's own thread asks for it: only then is anything taken over.
"""

import dataclasses
from collections.abc import Callable

from modelswap_engine.backends.inprocess import wire
from modelswap_engine.backends.inprocess.jobs import Counting, Job, LeftBehind
from modelswap_engine.protocol.errors import Busy, Cancelled, NotFound
from modelswap_engine.weights.pace import Pace

Finish = Callable[[], wire.Answer]
"""Takes an outcome over and answers with it."""
Body = Callable[[Pace], Finish]


@dataclasses.dataclass(eq=False)
class Lane:
    """The long call that was begun last, of one kind.

    ``still`` says that the engine was promised to compute nothing meanwhile.
    """

    work: str = ""
    operation_id: str = ""
    still: bool = False
    job: Job[Finish] | None = None
    answer: wire.Answer | None = None

    def refuse_if_running(self) -> None:
        """Refuse what would come between a long call and its outcome.

        Raises:
            Busy: it goes on.
        """
        if self.job is not None and not self.job.over:
            raise Busy(f"work {self.work} goes on", advice="wait for its outcome, or cancel it")


class Works:
    """Both lanes.

    Args:
        answer: makes the answer about an operation, with what went wrong.
        niceness: how much the threads give way to the engine.
        share: of a core that each may use while the engine is ``busy`` and was not promised to be still.
        busy: says whether it has requests; from any thread.
    """

    def __init__(
        self,
        *,
        answer: Callable[[str, Exception | None], wire.Answer],
        niceness: int,
        share: float,
        busy: Callable[[], bool],
    ) -> None:
        self.changes, self.inquiries = Lane(), Lane()
        self._answer = answer
        self._niceness = niceness
        self._share = share
        self._busy = busy
        self._left = LeftBehind()

    def begin(
        self, lane: Lane, work: str, body: Body, *, operation_id: str = "", still: bool = False, rate: int = 0
    ) -> wire.Answer:
        """Begin a long call, or say how far it is if it was begun already.

        Raises:
            Busy: another one of its lane goes on.
            SourceUnreadable: too many that were called off still hang.
        """
        if lane.work != work:
            lane.refuse_if_running()
            self._left.refuse_to_pile_up()
            lane.work, lane.operation_id, lane.still, lane.answer = work, operation_id, still, None
            share = 1.0 if still else self._share
            pace = Counting(bytes_per_second=rate, niceness=self._niceness, share=share, busy=self._busy)
            lane.job = Job(body, pace)
        return self.progress(work)

    def progress(self, work: str) -> wire.Answer:
        """Say how far a long call is, or what came of it.

        Raises:
            NotFound: none of this id was begun, or another one after it.
        """
        lane = self._lane(work)
        if lane is None:
            raise NotFound(f"no work {work} was begun, or it was forgotten", advice="begin it again under a new id")
        if lane.answer is None:
            lane.answer = self._outcome(lane)
        if lane.answer is not None:
            return lane.answer
        running = self._answer(lane.operation_id, None)
        return wire.Answer(
            number=0, reply=running.reply, running=True, done_bytes=lane.job.pace.nbytes if lane.job else 0
        )

    def _outcome(self, lane: Lane) -> wire.Answer | None:
        job = lane.job
        if job is None or not job.over:
            return None
        lane.job = None
        try:
            return job.outcome()()
        except Exception as error:  # noqa: BLE001  # the outcome, whatever it is
            return self._answer(lane.operation_id, error)

    def operation_of(self, work: str) -> str:
        """Return the operation that a long call belongs to, "" for none."""
        lane = self._lane(work)
        return lane.operation_id if lane is not None else ""

    def cancel(self, work: str) -> None:
        """End a long call; nothing to do where it has ended, or never began."""
        lane = self._lane(work)
        if lane is not None:
            self.call_off(lane)

    def call_off(self, lane: Lane) -> None:
        """End whatever goes on in a lane."""
        job, lane.job = lane.job, None
        if job is not None:
            job.pace.cancel()
            self._left.add(job)
            error = Cancelled("the work was called off", details={"work": lane.work})
            lane.answer = self._answer(lane.operation_id, error)

    def _lane(self, work: str) -> Lane | None:
        return next((lane for lane in (self.changes, self.inquiries) if work and lane.work == work), None)
