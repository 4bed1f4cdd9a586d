"""Our half in all ranks of one engine, asked as one: each rank answers, in order, the call it was asked, or is lost.

It knows the messages and who answered, not what a swap is. No caller can break a call by going away: what was begun is
finished within its own bound, because an engine's answers cannot be trusted after a call that nobody listened to.
"""

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, TypeVar

from modelswap_engine.backends.external.control import EngineControl
from modelswap_engine.backends.external.restart import log
from modelswap_engine.backends.inprocess import wire
from modelswap_engine.protocol.errors import (
    BadRequest,
    Cancelled,
    IncompatibleModel,
    ModelswapError,
    NotReady,
    WorkerLost,
)

T = TypeVar("T")

_FIRST_POLL: Final = 0.005
_LONGEST_POLL: Final = 0.25


class Ranks:
    """The ranks.

    Args:
        control: carries the calls.
        call_seconds: bound of one call.

    Attributes:
        facts: what each rank said of itself when it was greeted; empty while nobody was.
        boot_ids: of the processes of the ranks, in the same order.
    """

    def __init__(self, control: EngineControl, *, call_seconds: float) -> None:
        self._control = control
        self._seconds = call_seconds
        self._one_call = asyncio.Lock()
        self._number = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self.facts: tuple[wire.Facts, ...] = ()
        self.boot_ids: tuple[str, ...] = ()

    def forget(self) -> None:
        """The processes are others now, or nobody knows: greet them again."""
        self.facts, self.boot_ids = (), ()

    async def greet(self, size: int) -> None:
        """Learn who the ranks are.

        Raises:
            IncompatibleModel: weights of this model cannot be exchanged in this engine.
            BadRequest: their release is another than ours.
            NotReady, WorkerLost: as of :meth:`EngineControl.call_all`.
        """
        self.forget()
        answers = await self._exchange(wire.HelloCall(), size=size)
        found = []
        for answer in answers:
            if answer.reply.error is not None:
                raise BadRequest(answer.reply.error.message, advice=answer.reply.error.advice)
            if answer.facts is None or not answer.reply.boot_id:
                raise WorkerLost(f"rank {answer.reply.rank} did not say who it is", advice="restart the engine")
            found.append(answer.facts)
        _same(found, size)
        self.facts, self.boot_ids = tuple(found), tuple(answer.reply.boot_id for answer in answers)

    async def ask(self, call: wire.Call) -> list[wire.Answer]:
        """Ask all ranks; their errors are in the answers.

        Raises:
            NotReady: nothing was sent.
            WorkerLost: the call may have been carried out, or not, or by some.
        """
        if not self.boot_ids:
            raise NotReady("the engine's ranks are not known yet", advice="wait until a version is loaded")
        answers = await self._exchange(call, size=len(self.boot_ids))
        for answer, boot_id in zip(answers, self.boot_ids, strict=True):
            if answer.reply.boot_id != boot_id:
                raise WorkerLost(
                    f"rank {answer.reply.rank} is another process than before ({answer.reply.boot_id}, was {boot_id})",
                    advice="the version is loaded again",
                )
        return answers

    async def work(self, build: Callable[[str], wire.Call], *, seconds: float) -> list[wire.Answer]:
        """Have a long call carried out; whoever gives up on it ends it, and so does the first rank that fails.

        Raises:
            Cancelled: it took longer than ``seconds``.
            NotReady, WorkerLost: as of :meth:`ask`.
        """
        work = secrets.token_hex(8)
        finished = False
        try:
            async with asyncio.timeout(seconds):
                answers = await self._finish(work, await self.ask(build(work)))
            finished = True
            return answers
        except TimeoutError:
            raise Cancelled(
                f"the engine's ranks were not done within {seconds:g} s",
                advice="look at the volume of the checkpoint, or allow more time",
            ) from None
        finally:
            if not finished:
                self._background(self._call_off(work))

    async def _finish(self, work: str, answers: list[wire.Answer]) -> list[wire.Answer]:
        pause, called_off = _FIRST_POLL, False
        while any(answer.running for answer in answers):
            if not called_off and any(_failed(answer) for answer in answers):
                called_off = True
                await self.ask(wire.CancelCall(work))
            await asyncio.sleep(pause)
            pause = min(_LONGEST_POLL, pause * 2)
            answers = await self.ask(wire.ProgressCall(work))
        return answers

    async def _call_off(self, work: str) -> None:
        try:
            await self.ask(wire.CancelCall(work))
        except ModelswapError as error:
            log.warning("work in the engine's ranks could not be called off: %s", error.message)

    async def _exchange(self, call: wire.Call, *, size: int) -> list[wire.Answer]:
        return await asyncio.shield(self._spawn(self._carry(call, size=size)))

    async def _carry(self, call: wire.Call, *, size: int) -> list[wire.Answer]:
        async with self._one_call:
            self._number += 1
            number = self._number
            texts = await self._control.call_all(wire.encode_call(number, call), seconds=self._seconds)
        return _read(texts, number=number, size=size)

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._over)
        return task

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._spawn(work)
        task.set_name("calling off")

    def _over(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # looked at: whoever asked may have gone away

    async def close(self) -> None:
        """Wait for calls that are under way."""
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _read(texts: Sequence[str], *, number: int, size: int) -> list[wire.Answer]:
    if len(texts) != size:
        raise WorkerLost(f"{len(texts)} ranks answered, there are {size}", advice="restart the engine")
    answers = []
    for rank, text in enumerate(texts):
        try:
            answer = wire.decode_answer(text)
        except BadRequest as error:
            raise WorkerLost(f"rank {rank}: {error.message}", advice="restart the engine") from None
        unread = answer.number == 0 and answer.reply.error is not None
        if answer.number != number and not unread:
            raise WorkerLost(
                f"rank {rank} answered call {answer.number}, asked was {number}", advice="restart the engine"
            )
        if answer.reply.rank != rank:
            raise WorkerLost(f"rank {answer.reply.rank} answered in the place of {rank}", advice="restart the engine")
        answers.append(answer)
    return answers


def _failed(answer: wire.Answer) -> bool:
    return not answer.running and answer.reply.error is not None


def _same(found: Sequence[wire.Facts], size: int) -> None:
    first = found[0]
    for rank, facts in enumerate(found):
        if facts.refusal:
            raise IncompatibleModel(
                f"rank {rank}: {facts.refusal}", advice="serve other versions of this model by a restart of the pod"
            )
        if facts.wire != wire.WIRE:
            raise BadRequest(
                f"rank {rank} speaks release {facts.wire} of the messages, the sidecar {wire.WIRE}",
                advice="install the same release of modelswap beside the engine as in the sidecar",
            )
        if facts.ranks != size or facts.architecture != first.architecture or facts.replica != first.replica:
            raise IncompatibleModel(
                f"rank {rank} of {facts.ranks} (replica {facts.replica}, {facts.architecture}) and rank 0 of "
                f"{first.ranks} (replica {first.replica}, {first.architecture}) do not hold one model together",
                advice="one replica per engine process is what can be exchanged; start one pod for each",
            )
