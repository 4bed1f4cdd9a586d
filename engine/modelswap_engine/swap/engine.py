"""The backend as the transaction uses it: every call bounded in time, every rank's answer looked at.

A rank answers data, so that no rank can hide behind another one's exception; here the first bad answer becomes the one
typed error. An engine that does not answer in time counts as lost.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from modelswap_engine.backends.port import (
    Backend,
    Hashes,
    Load,
    PromptTrial,
    Reply,
    RequestPolicy,
    Stage,
    StageRetained,
)
from modelswap_engine.protocol.engine_state import MemoryState, RankState
from modelswap_engine.protocol.errors import (
    DigestMismatch,
    Internal,
    ModelswapError,
    PeerFailed,
    WorkerLost,
    from_body,
)
from modelswap_engine.swap.clock import Clock, within
from modelswap_engine.swap.patience import Patience
from modelswap_engine.swap.settings import SwapSettings

T = TypeVar("T")
Replies = Sequence[Reply]


class Engine:
    """The bounded and checked calls.

    Attributes:
        patience: how long each is waited for.
    """

    def __init__(self, *, backend: Backend, clock: Clock, settings: SwapSettings) -> None:
        self._backend = backend
        self._clock = clock
        self._settings = settings
        self.patience = Patience.over(backend.bounds(), settings)
        self._proved: dict[int, str] = {}

    @property
    def healthy(self) -> bool:
        """True when every rank lives, and still as the process in which it proved its version."""
        ranks = self._backend.ranks()
        return bool(ranks) and all(self._well(rank) for rank in ranks)

    @property
    def able(self) -> bool:
        """True when at least one replica is whole and healthy: it serves while others are restarted."""
        return self._some_replica(lambda rank: True)

    def holds(self, digest: str) -> bool:
        """Say whether at least one replica is whole and healthy and has proved this version."""
        return self._some_replica(lambda rank: rank.digest == digest)

    def _some_replica(self, condition: Callable[[RankState], bool]) -> bool:
        replicas: dict[int, bool] = {}
        for rank in self._backend.ranks():
            well = self._well(rank) and condition(rank)
            replicas[rank.replica] = replicas.get(rank.replica, True) and well
        return any(replicas.values())

    def _well(self, rank: RankState) -> bool:
        return rank.alive and self._proved.get(rank.rank) == rank.boot_id

    @property
    def missing(self) -> int:
        """How many replicas have to be loaded anew."""
        return len({rank.replica for rank in self._backend.ranks() if not self._well(rank)})

    @property
    def processes(self) -> int:
        """How many ranks there are; each of them takes what is received as a whole."""
        return len(self._backend.ranks()) or 1

    @property
    def replicas(self) -> int:
        """How many copies of a model the engine holds."""
        return len({rank.replica for rank in self._backend.ranks()}) or 1

    @property
    def running(self) -> int:
        """How many requests the engine works on."""
        return self._backend.running()

    def tied(self) -> tuple[tuple[str, ...], ...]:
        """The names that are one piece of memory."""
        return self._backend.layout().tied

    def groups(self) -> tuple[tuple[str, ...], ...]:
        """The fusion groups."""
        return self._backend.layout().groups

    async def load(self, order: Load, *, unless: asyncio.Future[None] | None = None) -> bool:
        """Load a whole version and prove it on every rank; given up when ``unless`` says so.

        Says whether a replica was left as it was, adapters and all.
        """
        call, seconds = self._backend.load(order), self.patience.load
        replies = await self._replies("load", order.operation_id, call, seconds, unless=unless)
        _agree(replies, order.digest)
        self._remember()
        return any(reply.kept for reply in replies)

    async def settle(self, operation_id: str, digest: str) -> bool:
        """Bring back to a version what lives and holds it; says whether that is a whole replica, which serves again."""
        replies = await self._bounded("settle", self._backend.settle(operation_id, digest), self.patience.call)
        _agree(replies, digest)
        self._proved |= {reply.rank: reply.boot_id for reply in replies}
        return bool(replies) and self.holds(digest)

    async def stage(self, order: Stage | StageRetained, *, unless: asyncio.Future[None]) -> Replies:
        """Stage beside the live tensors; given up when ``unless`` says so, and then ended by :meth:`release`."""
        call, seconds = self._backend.stage(order), self.patience.stage
        return await self._replies("stage", order.operation_id, call, seconds, unless=unless)

    async def try_out(self, operation_id: str, trials: Sequence[PromptTrial], *, unless: asyncio.Future[None]) -> None:
        """Run prompts before anybody is stopped; given up when ``unless`` says so."""
        call, seconds = self._backend.try_out(operation_id, trials), self.patience.stage
        await self._replies("try_out", operation_id, call, seconds, unless=unless)

    async def try_live(self, operation_id: str, trials: Sequence[PromptTrial]) -> None:
        """Run prompts on what was committed, for an engine that runs none on what is staged."""
        await self._short("try_out", operation_id, self._backend.try_out(operation_id, trials))

    async def prepare(self, operation_id: str, digest: str, *, overlap: bool = False) -> None:
        """Make every rank promise, and agree on what it holds; ``overlap`` brings up a second instance."""
        call = self._backend.prepare(operation_id, overlap=overlap)
        seconds = self.patience.stage if overlap else self.patience.call
        _agree(await self._replies("prepare", operation_id, call, seconds), digest)

    async def pause(self, operation_id: str, policy: RequestPolicy) -> None:
        """Park every rank between two steps."""
        seconds = self._settings.pause_seconds
        call = self._backend.pause(operation_id, timeout=seconds, policy=policy)
        await self._replies("pause", operation_id, call, seconds + self.patience.call)

    async def commit(self, operation_id: str, policy: RequestPolicy) -> Replies:
        """Make the staged tensors live."""
        return await self._short("commit", operation_id, self._backend.commit(operation_id, policy))

    async def retire(self, operation_id: str) -> Replies:
        """End the old instance."""
        return await self._short("retire", operation_id, self._backend.retire(operation_id))

    async def verify(self, operation_id: str, digest: str, *, strict: bool) -> None:
        """Prove that what is live is this version."""
        call = self._backend.verify(operation_id, strict=strict)
        seconds = self.patience.hash if strict else self.patience.call
        _agree(await self._replies("verify", operation_id, call, seconds), digest)
        self._remember()

    async def rollback(self, operation_id: str) -> None:
        """Put the tensors from before the commit back."""
        await self._short("rollback", operation_id, self._backend.rollback(operation_id))

    async def resume(self, operation_id: str) -> None:
        """Let the ranks step again."""
        await self._short("resume", operation_id, self._backend.resume(operation_id))

    async def release(self, operation_id: str, *, previous: bool) -> None:
        """Drop what is staged, and the retained previous version if asked."""
        await self._short("release", operation_id, self._backend.release(operation_id, previous=previous))

    async def hashes(
        self, pattern: str, *, unless: asyncio.Future[None], bytes_per_second: int = 0, still: bool = False
    ) -> Hashes:
        """Re-hash live tensors; given up when ``unless`` says so. ``still``: nobody is let in meanwhile."""
        call = self._backend.hashes(pattern, bytes_per_second=bytes_per_second, still=still)
        return await self._bounded("hashes", call, self.patience.hash, unless=unless)

    async def memory(self) -> MemoryState:
        """Say where the memory is."""
        return await self._bounded("memory", self._backend.memory(), self.patience.call)

    async def _short(self, name: str, operation_id: str, call: Coroutine[Any, Any, Replies]) -> Replies:
        return await self._replies(name, operation_id, call, self.patience.call)

    async def _replies(
        self,
        name: str,
        operation_id: str,
        call: Coroutine[Any, Any, Replies],
        seconds: float,
        *,
        unless: asyncio.Future[None] | None = None,
    ) -> Replies:
        replies = await self._bounded(name, call, seconds, unless=unless)
        if not replies:
            raise WorkerLost(f"no rank answered to {name}", advice="the engine restarts its workers by itself")
        raise_first([from_body(reply.error) for reply in replies if reply.error is not None])
        for reply in replies:
            if reply.operation_id != operation_id:
                raise Internal(f"rank {reply.rank} answered to {reply.operation_id!r}, asked was {operation_id!r}")
        return replies

    async def _bounded(
        self, name: str, call: Coroutine[Any, Any, T], seconds: float, *, unless: asyncio.Future[None] | None = None
    ) -> T:
        try:
            return await within(self._clock, seconds, call, unless=unless)
        except TimeoutError:
            raise WorkerLost(
                f"the engine did not answer to {name} within {seconds:g} s",
                advice="the engine restarts its workers by itself",
            ) from None

    def _remember(self) -> None:
        self._proved = {rank.rank: rank.boot_id for rank in self._backend.ranks()}


def raise_first(errors: Sequence[ModelswapError]) -> None:
    """Raise the first error of the ranks that says why, if there are any.

    A rank that only failed because another did knows nothing of the reason.
    """
    if errors:
        raise next((error for error in errors if not isinstance(error, PeerFailed)), errors[0])


def _agree(replies: Replies, digest: str) -> None:
    for reply in replies:
        if reply.digest != digest:
            raise DigestMismatch(
                f"rank {reply.rank} holds {reply.digest or 'nothing'}, wanted is {digest}",
                advice="the version is not used; look for damaged memory or storage if it happens again",
                details={"rank": str(reply.rank), "expected": digest, "actual": reply.digest},
            )
