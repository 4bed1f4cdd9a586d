"""Answers for the ranks of an engine of whom nothing can be asked apart: one outcome, said for each of them."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from modelswap_engine.backends.external.plain.book import Book
from modelswap_engine.backends.port import Reply
from modelswap_engine.protocol.errors import ModelswapError, NotReady, WorkerLost

Work = Callable[[], Awaitable[Reply]]


class Replying:
    """Carries work out, one at a time, and makes replies of what comes of it.

    Args:
        book: knows the ranks.
        boot_id: of the engine's present start.
        lost: told why an engine is not there any more, or not to be trusted.

    Attributes:
        calls: held while work goes on.
    """

    def __init__(self, book: Book, *, boot_id: Callable[[], str], lost: Callable[[str], None]) -> None:
        self._book = book
        self._boot_id = boot_id
        self._lost = lost
        self.calls = asyncio.Lock()

    async def answer(self, operation_id: str, work: Work) -> Sequence[Reply]:
        """Carry work out; a refusal is a reply.

        Raises:
            WorkerLost: the engine is not there, or cannot be trusted any more.
        """
        try:
            async with self.calls:
                reply = await work()
        except WorkerLost as error:
            self._lost(error.message)
            raise
        except NotReady as error:
            self._lost(error.message)
            raise WorkerLost(error.message, advice=error.advice) from None
        except ModelswapError as error:
            return self.refused(operation_id, error)
        return self.every(reply)

    def refused(self, operation_id: str, error: ModelswapError) -> Sequence[Reply]:
        """Return a refusal for every rank."""
        return self.every(self.reply(operation_id, error=error.body()))

    def every(self, reply: Reply) -> list[Reply]:
        """Return a reply for every rank."""
        return [msgspec.structs.replace(reply, rank=rank) for rank in self._book.numbers()]

    def reply(self, operation_id: str, **fields: Any) -> Reply:
        """Return the reply of the first rank."""
        return Reply(operation_id=operation_id, rank=0, boot_id=self._boot_id(), **fields)
