"""The steps of a swap through the port, each answer looked at; and how a call failed, in whichever way it said so."""

import asyncio
import itertools
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from modelswap_engine.backends.port import Backend, Load, Reply, RequestPolicy, Stage, StageRetained
from modelswap_engine.protocol.errors import ModelswapError
from tests.conformance.candidates import Subject, Versions
from tests.support.orders import hashes_of, load_order, stage_order
from tests.support.whole_folders import digest_in as digest_of

NOBODY: Final = RequestPolicy.NONE_RUNNING
HALF: Final = 132  # of the vocabulary
SECONDS: Final = 20.0
PROMPTS: Final = ("one", "two words", "the same beginning " * 18)
"""The last one is longer than a page of any engine's cache."""
_operations = itertools.count(1)


class Case:
    """One test's view of the subject."""

    def __init__(self, subject: Subject, versions: Versions) -> None:
        self.subject, self.versions = subject, versions

    @property
    def backend(self) -> Backend:
        return self.subject.backend

    @staticmethod
    def operation() -> str:
        return f"op-{next(_operations)}"

    def agreed(self, replies: Sequence[Reply], operation: str) -> Reply:
        """Return the first of the replies: of every rank, in order, to this operation, from the process it lives in."""
        assert [reply.error for reply in replies] == [None] * len(replies)
        assert self._signed(replies, operation)
        assert [reply.rank for reply in replies] == [rank.rank for rank in self.backend.ranks()]
        assert len({reply.digest for reply in replies}) == 1
        return replies[0]

    def _signed(self, replies: Sequence[Reply], operation: str) -> bool:
        boots = {rank.rank: rank.boot_id for rank in self.backend.ranks()}
        return all(
            (reply.operation_id, reply.boot_id) == (operation, boots[reply.rank]) and reply.boot_id for reply in replies
        )

    async def failed(self, call: Awaitable[Sequence[Reply]], operation: str = "") -> str:
        """Return the code with which a call failed, "" if it did not; what replies say is signed by their ranks."""
        try:
            replies = await call
        except ModelswapError as error:
            return error.code
        assert replies
        if operation:
            assert self._signed(replies, operation)
        return next((reply.error.code for reply in replies if reply.error is not None), "")

    async def load(self, folder: Path) -> None:
        order = self.load_order(folder)
        assert self.agreed(await self.backend.load(order), order.operation_id).digest == digest_of(folder)

    def order(self, new: Path, operation: str, *, old: Path | None = None, drop_previous: bool = False) -> Stage:
        """Return the order to stage what differs from a version that is live."""
        groups = self.backend.layout().groups
        made = stage_order(
            old or self.versions.old, new, operation_id=operation, groups=groups, drop_previous=drop_previous
        )
        return replace(made, digest=digest_of(new), directory=str(self.versions.sides))

    def back(self, folder: Path) -> StageRetained:
        """Return the order to stage a version that is retained."""
        return StageRetained(
            operation_id=self.operation(), digest=digest_of(folder), directory=str(self.versions.sides)
        )

    def load_order(self, folder: Path) -> Load:
        """Return the order to load a version."""
        return replace(load_order(folder), digest=digest_of(folder), directory=str(self.versions.sides))

    async def staged(self, new: Path, *, old: Path | None = None) -> str:
        """Stage and prepare what differs; return the operation."""
        operation = self.operation()
        return await self.prepared(self.order(new, operation, old=old))

    async def prepared(self, order: Stage | StageRetained) -> str:
        for call in (self.backend.stage(order), self.backend.prepare(order.operation_id)):
            assert self.agreed(await call, order.operation_id).digest == order.digest
        return order.operation_id

    async def pause(self, operation: str) -> None:
        self.agreed(await self.backend.pause(operation, timeout=SECONDS, policy=NOBODY), operation)

    async def commit(self, operation: str) -> Reply:
        await self.pause(operation)
        return self.agreed(await self.backend.commit(operation, NOBODY), operation)

    async def verify(self, operation: str, *, strict: bool = True) -> str:
        return self.agreed(await self.backend.verify(operation, strict=strict), operation).digest

    async def resume(self, operation: str) -> None:
        self.agreed(await self.backend.resume(operation), operation)

    async def undo(self, operation: str) -> None:
        """Go back to the old version from a pause, whether there was a commit or not, and serve it."""
        self.agreed(await self.backend.rollback(operation), operation)
        assert await self.verify(operation) == digest_of(self.versions.old)
        await self.resume(operation)

    async def release(self, operation: str, *, previous: bool = False) -> None:
        self.agreed(await self.backend.release(operation, previous=previous), operation)

    async def exchange(self, operation: str) -> None:
        """Go from prepared to serving."""
        wanted = self.agreed(await self.backend.prepare(operation), operation).digest
        await self.commit(operation)
        assert await self.verify(operation) == wanted
        await self.resume(operation)

    async def swap(self, new: Path, *, old: Path | None = None) -> None:
        operation = await self.staged(new, old=old)
        await self.exchange(operation)
        await self.release(operation)

    async def answers(self, *, tokens: int = 24) -> list[list[int]]:
        return [await self.subject.answer(text, tokens=tokens) for text in PROMPTS]

    async def holds(self, folder: Path) -> bool:
        """Say whether what is live is a version: all that can be seen of it, and nobody disagrees."""
        found, wanted = await self.backend.hashes("*"), hashes_of(folder)
        wrong = [item for item in found.runtime if item.actual != item.expected]
        seen = {name: wanted.get(name) for name in found.tensors}
        return found.tensors == seen and not wrong and not found.disagreed

    async def until_lost(self) -> None:
        """Wait until the backend has noticed that the engine is gone."""
        async with asyncio.timeout(SECONDS):
            while any(rank.alive for rank in self.backend.ranks()):
                await asyncio.sleep(0.02)  # it says so in no other way

    def proven(self) -> set[str]:
        return {rank.digest for rank in self.backend.ranks()}


def letters(answers: Sequence[Sequence[int]]) -> str:
    """Say which version made all of these tokens: ``old``, ``new``, or ``mixed``."""
    tokens = [token for answer in answers for token in answer]
    assert tokens
    return "old" if max(tokens) < HALF else "new" if min(tokens) >= HALF else "mixed"
