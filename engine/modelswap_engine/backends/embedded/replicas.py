"""All ranks of all replicas: every call is fanned out to them, every answer is seen, and so is what each has proven.

Knows no transaction: what is asked, and whether answers agree, is decided elsewhere.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from modelswap_engine.backends.embedded import wire
from modelswap_engine.backends.embedded.group import WorkerGroup
from modelswap_engine.backends.embedded.process import CallOff
from modelswap_engine.backends.embedded.settings import EmbeddedSettings
from modelswap_engine.backends.port import Reply
from modelswap_engine.protocol.engine_state import RankState
from modelswap_engine.protocol.errors import Internal, NotReady

_AnswerT = TypeVar("_AnswerT", wire.Answer, wire.HashesAnswer, wire.TransferAnswer, wire.MemoryAnswer)


class Replicas:
    """The worker groups of one engine.

    Args:
        settings: sizes and bounds.
        environ: environment of the workers.

    Attributes:
        started: whether the engine is meant to run.
    """

    def __init__(self, settings: EmbeddedSettings, *, environ: Mapping[str, str]) -> None:
        self._settings = settings
        self._groups = [
            WorkerGroup(replica, settings, on_lost=self._lost, environ=environ)
            for replica in range(settings.data_parallel)
        ]
        self._proven: dict[int, str] = {}
        self.started = False

    def __iter__(self) -> Iterator[WorkerGroup]:
        return iter(self._groups)

    @property
    def groups(self) -> Sequence[WorkerGroup]:
        """All of them."""
        return self._groups

    def serving(self) -> list[WorkerGroup]:
        """Return those that requests may be given to."""
        return [group for group in self._groups if group.serving and group.alive]

    async def start(self, groups: Iterable[WorkerGroup]) -> None:
        """Start replicas, several at a time; the failure of one does not keep the others from coming up."""
        self.started = True
        outcomes = await asyncio.gather(*(group.start() for group in groups), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def stop(self) -> None:
        """End every rank; requests still running end with an error."""
        await asyncio.gather(*(group.stop("the engine was stopped") for group in self._groups))
        self._proven.clear()
        self.started = False

    # What each has proven.

    def note(self, replies: list[Reply]) -> list[Reply]:
        """Remember what ranks have proven to hold."""
        for reply in replies:
            if reply.error is None:
                self._proven[reply.rank] = reply.digest
            else:
                self._proven.pop(reply.rank, None)
        return replies

    def doubt(self, groups: Iterable[WorkerGroup] | None = None) -> None:
        """Forget what all ranks, or those of some replicas, have proven."""
        if groups is None:
            self._proven.clear()
            return
        for group in groups:
            for worker in group.workers:
                self._proven.pop(worker.rank, None)

    def holds(self, group: WorkerGroup, digest: str) -> bool:
        """Say whether a replica serves, and every rank of it has proven to hold a version."""
        return group.alive and group.serving and all(self._proven.get(w.rank) == digest for w in group.workers)

    def _lost(self, rank: int) -> None:
        self._proven.pop(rank, None)

    def states(self) -> list[RankState]:
        """Say who is alive, and what each rank has proven under its boot id."""
        return [
            RankState(
                rank=worker.rank,
                boot_id=worker.boot_id,
                pid=worker.pid,
                alive=worker.alive,
                digest=self._proven.get(worker.rank, "") if worker.alive else "",
                replica=group.replica,
                running=len(group.streams) if worker is group.workers[0] else 0,
                restarts=max(0, group.starts - 1),
            )
            for group in self._groups
            for worker in group.workers
        ]

    # Asking.

    async def control(
        self,
        build: Callable[[int], wire.Order],
        what: str,
        *,
        timeout: float | None = None,
        call_off: CallOff | None = None,
        groups: Sequence[WorkerGroup] | None = None,
    ) -> list[Reply]:
        """Ask every rank (of some replicas) for a plain reply, as :meth:`ask` does."""
        seconds = timeout or self._settings.call_timeout
        answers = await self.ask(build, wire.Answer, timeout=seconds, what=what, call_off=call_off, groups=groups)
        return [answer.reply for answer in answers]

    async def ask(
        self,
        build: Callable[[int], wire.Order],
        kind: type[_AnswerT],
        *,
        timeout: float,
        what: str,
        call_off: CallOff | None = None,
        groups: Sequence[WorkerGroup] | None = None,
    ) -> list[_AnswerT]:
        """Ask every rank (of some replicas) at once; a lost rank is raised only when all others have answered.

        Raises:
            WorkerLost: a rank is gone.
            NotReady: the engine was not started.
        """
        if not self.started:
            raise NotReady("the engine is not started")
        asked = (
            group.ask(build, timeout=timeout, what=what, call_off=call_off)
            for group in (self._groups if groups is None else groups)
        )
        answers: list[_AnswerT] = []
        for outcome in [outcome for outcomes in await asyncio.gather(*asked) for outcome in outcomes]:
            if isinstance(outcome, BaseException):
                raise outcome
            if not isinstance(outcome, kind):
                raise Internal(f"a worker answered with {type(outcome).__name__} while {what}")
            answers.append(outcome)
        return answers
