"""A commit or rollback in all ranks of an engine, with all that has to be done before the next request.

Each question to an engine costs milliseconds for which requests wait, so our half in it does in one call what it can,
and says what that was; the rest is asked of the engine's own routes. What was said counts once, for the proof that
follows the exchange.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from modelswap_engine.backends.external import views
from modelswap_engine.backends.external.control import EngineControl
from modelswap_engine.backends.external.loading import POLL_SECONDS, forgets
from modelswap_engine.backends.external.ranks import Ranks
from modelswap_engine.backends.external.settings import ExternalSettings
from modelswap_engine.backends.inprocess import wire
from modelswap_engine.backends.port import Reply
from modelswap_engine.protocol.errors import Busy, Internal


@dataclass
class _Said:
    """What the ranks proved in their last exchange, while it counts, and what the engine calls its weights since."""

    answers: Sequence[wire.Answer] = ()
    name: str = ""


class Exchanging:
    """Exchanges of one engine; the errors of ranks are in their replies.

    Args:
        control: of the engine.
        ranks: our half in it.
        bounds: of every wait.
    """

    def __init__(self, control: EngineControl, ranks: Ranks, *, bounds: ExternalSettings) -> None:
        self._control = control
        self._ranks = ranks
        self._bounds = bounds
        self._said = _Said()

    def forget(self) -> None:
        """What the ranks have said, or are about to say, is not true any more, or nobody knows."""
        self._said = _Said()

    async def carry_out(self, call: wire.CommitCall | wire.RollbackCall) -> Sequence[Reply]:
        """Have tensors exchanged, and everything forgotten that was computed with those that went.

        Raises:
            NotReady, WorkerLost: as of :meth:`Ranks.ask`.
        """
        self._said = said = _Said()
        answers = await self._without_requests(call)
        replies = views.replies(answers)
        if any(reply.error is not None for reply in replies):
            return replies
        if not all(answer.forgot for answer in answers) and not await self._forgets():
            stale = Internal(
                "the engine did not forget cached keys and values after its weights were exchanged",
                advice="requests would be answered from both versions; the version before comes back",
            )
            return [replace(reply, error=stale.body()) for reply in replies]
        if all(answer.proved for answer in answers):
            said.answers = answers
        names = {answer.reply.digest if answer.named else "" for answer in answers}
        said.name = names.pop() if len(names) == 1 else ""
        return replies

    async def _without_requests(self, call: wire.CommitCall | wire.RollbackCall) -> Sequence[wire.Answer]:
        """Ask again for a while where requests keep the engine from it: nobody's, such as a question for its health."""
        deadline = time.monotonic() + self._bounds.forget
        answers = await self._ranks.ask(call)
        while _held_up(answers) and time.monotonic() < deadline:
            await asyncio.sleep(POLL_SECONDS)
            answers = await self._ranks.ask(call)
        return answers

    async def _forgets(self) -> bool:
        return await forgets(self._control, within=self._bounds.forget, seconds=self._bounds.call)

    async def prove(self, operation_id: str, *, strict: bool) -> Sequence[Reply]:
        """Return what the ranks proved as they made their exchange, or, once that was said or by hash, do now.

        Raises:
            Cancelled, NotReady, WorkerLost: as of :meth:`Ranks.work`.
        """
        said, self._said.answers = self._said.answers, ()
        if not strict and said and all(answer.reply.operation_id == operation_id for answer in said):
            return views.replies(said)
        seconds = self._bounds.hash if strict else self._bounds.call
        work = self._ranks.work(lambda work: wire.VerifyCall(work, operation_id, strict=strict), seconds=seconds)
        return views.replies(await work)

    async def name(self, digest: str) -> None:
        """Have the engine call its weights by their digest, unless it did so as it exchanged them.

        Raises:
            NotReady, WorkerLost, BadRequest: as of :meth:`EngineControl.set_version`.
        """
        if digest != self._said.name:
            await self._control.set_version(digest, seconds=self._bounds.call)


def _held_up(answers: Sequence[wire.Answer]) -> bool:
    """Say whether ranks refused because the engine has something to do, and for nothing else."""
    return {answer.reply.error.code for answer in answers if answer.reply.error is not None} == {Busy.code}
