"""The embedded engine behind the backend port: fans every call out to the ranks and collects their replies.

The front half only: asyncio, no torch. Ranks agree or nothing is committed is the coordinator's rule; this class makes
sure that every rank was asked and every answer is seen.
"""

import asyncio
import contextlib
import importlib.metadata
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, TypeVar

from msgspec.structs import replace

from modelswap_engine.backends.adapters import AdapterLayout, LoadAdapter
from modelswap_engine.backends.embedded import wire
from modelswap_engine.backends.embedded.group import WorkerGroup
from modelswap_engine.backends.embedded.limits import check_request
from modelswap_engine.backends.embedded.lora.replicas import ReplicatedAdapters
from modelswap_engine.backends.embedded.process import CallOff
from modelswap_engine.backends.embedded.settings import EmbeddedSettings
from modelswap_engine.backends.embedded.shared_memory import shared_memory
from modelswap_engine.backends.embedded.streams import TokenStream
from modelswap_engine.backends.merging import merged, summed
from modelswap_engine.backends.port import (
    Generate,
    Hashes,
    Layout,
    Load,
    PromptTrial,
    Reply,
    RequestPolicy,
    Stage,
    StageRetained,
    TensorRange,
)
from modelswap_engine.backends.transfer import (
    FillMemory,
    ReadTensor,
    SendBroadcast,
    TransferOrder,
    TransferReply,
    WriteFile,
)
from modelswap_engine.protocol.engine_state import Capabilities, MemoryState, RankState
from modelswap_engine.protocol.errors import (
    Cancelled,
    Internal,
    NotReady,
    PeerFailed,
    SourceNotFound,
    SourceUnreadable,
    from_body,
)
from modelswap_engine.protocol.policy import TrafficMode

_AnswerT = TypeVar("_AnswerT", wire.Answer, wire.HashesAnswer, wire.TransferAnswer, wire.MemoryAnswer)


_SPLIT: Final = "the ranks of a split model would run two instances in different orders, which hangs"
_REPLICAS: Final = "a replica that is restarted meanwhile would have only one of the two instances"


class EmbeddedBackend:
    """transformers in worker processes; see :class:`modelswap_engine.backends.port.Backend`.

    Args:
        settings: sizes and bounds.
        environ: environment of the workers; by default this process's.
    """

    def __init__(
        self,
        settings: EmbeddedSettings,
        *,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._settings = settings
        self._environ = os.environ if environ is None else environ
        self._version = f"transformers {importlib.metadata.version('transformers')}"  # reads files
        self._groups = [
            WorkerGroup(replica, settings, on_lost=self._lost, environ=self._environ)
            for replica in range(settings.data_parallel)
        ]
        self._started = False
        self._proven: dict[int, str] = {}
        self._facts: wire.ModelFacts | None = None
        self._adapters = ReplicatedAdapters(self._groups, ask=self._control, load_seconds=settings.adapter_timeout)

    # Life.

    async def start(self) -> None:
        """Start the ranks, without weights."""
        self._started = True
        await self._start(self._groups)

    async def _start(self, groups: Iterable[WorkerGroup]) -> None:
        """Start replicas, several at a time; the failure of one does not keep the others from coming up."""
        outcomes = await asyncio.gather(*(group.start() for group in groups), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    def _lost(self, rank: int) -> None:
        self._proven.pop(rank, None)

    async def stop(self) -> None:
        """End every rank; requests still running end with an error."""
        await asyncio.gather(*(group.stop("the engine was stopped") for group in self._groups))
        self._proven.clear()
        self._facts = None
        self._started = False

    async def load(self, order: Load) -> Sequence[Reply]:
        """Load a whole version into every rank, restarting dead ranks; proven by hash before it answers.

        With ``keep_proven`` replicas that have proven it go on as they are.

        Raises:
            SourceNotFound: a tensor has no path, and no replica that is kept has it.
            ModelswapError: the one that has it could not give it.
        """
        self._started = True
        kept = [group for group in self._groups if order.keep_proven and self._holds(group, order.digest)]
        groups = [group for group in self._groups if group not in kept]
        with contextlib.ExitStack() as memory:
            tensors = await self._brought(order.tensors, kept, memory)
            return await self._load(replace(order, tensors=tensors), groups, kept)

    async def _brought(
        self, tensors: tuple[TensorRange, ...], kept: Sequence[WorkerGroup], memory: contextlib.ExitStack
    ) -> tuple[TensorRange, ...]:
        """Return tensors with a place for each: those that only an engine has are written into memory by a replica."""
        absent = tuple(item for item in tensors if not item.path)
        if not absent:
            return tensors
        if not kept:
            raise SourceNotFound(
                f"tensor {absent[0].name} (and {len(absent) - 1} more) was sent to the engine, and is in no replica's "
                "memory any more",
                advice="send the weights again, or load a version at a source",
            )
        placed = memory.enter_context(shared_memory(absent))
        replies = await self._transfer(FillMemory(tensors=placed), kept[:1], timeout=self._settings.load_timeout)
        errors = [from_body(reply.error) for reply in replies if reply.error is not None]
        if errors:
            raise next((error for error in errors if not isinstance(error, PeerFailed)), errors[0])
        by_name = {item.name: item for item in placed}
        return tuple(by_name.get(item.name, item) for item in tensors)

    async def _load(self, order: Load, groups: Sequence[WorkerGroup], kept: Sequence[WorkerGroup]) -> list[Reply]:
        self._forget(groups)
        for group in groups:
            group.serving = False
            group.forget_adapters()
        if not kept:
            self._facts = None
            self._adapters.forget()
        await self._start(group for group in groups if not group.alive)
        answers = await self._ask(
            lambda call: wire.LoadCall(call=call, order=order),
            wire.Answer,
            timeout=self._settings.load_timeout,
            what="loading",
            call_off=CallOff(
                order=lambda call: wire.CancelCall(call=call),
                error=SourceUnreadable,
                advice="the source hangs or is slow; check its volume, or allow more time (load_timeout)",
                expendable=True,  # what loads serves nobody
            ),
            groups=groups,
        )
        replies = self._note_proof([answer.reply for answer in answers])
        if all(answer.reply.error is None for answer in answers):
            self._facts = answers[0].facts if answers else self._facts
            for group in groups:
                await self._adapters.catch_up(group)
                group.serving = group.alive
        return [*replies, *self._held(kept, order)]

    def _holds(self, group: WorkerGroup, digest: str) -> bool:
        return group.alive and group.serving and all(self._proven.get(w.rank) == digest for w in group.workers)

    @staticmethod
    def _held(groups: Iterable[WorkerGroup], order: Load) -> list[Reply]:
        return [
            Reply(
                operation_id=order.operation_id,
                rank=worker.rank,
                boot_id=worker.boot_id,
                digest=order.digest,
                kept=True,
            )
            for group in groups
            for worker in group.workers
        ]

    async def settle(self, operation_id: str, digest: str) -> Sequence[Reply]:
        """Bring what lives back to a version that it holds; replicas that cannot are ended, and answer nothing."""
        return [
            reply
            for replies in await asyncio.gather(*(self._settle(group, operation_id, digest) for group in self._groups))
            for reply in replies
        ]

    async def _settle(self, group: WorkerGroup, operation_id: str, digest: str) -> list[Reply]:
        if not group.alive or not group.serving:
            return []
        outcomes = await group.ask(
            lambda call: wire.SettleCall(call=call, operation_id=operation_id),
            timeout=self._settings.call_timeout,
            what="coming to rest",
        )
        replies = [outcome.reply for outcome in outcomes if isinstance(outcome, wire.Answer)]
        if len(replies) == len(outcomes) and all(r.error is None and r.digest == digest for r in replies):
            return self._note_proof(replies)
        if len(outcomes) > 1:
            group.kill("its ranks could not be brought back to one version")
        group.serving = False
        return []

    def _forget(self, groups: Iterable[WorkerGroup]) -> None:
        for group in groups:
            for worker in group.workers:
                self._proven.pop(worker.rank, None)

    # What it is.

    def capabilities(self) -> Capabilities:
        """Say what this backend can do."""
        settings = self._settings
        why = _SPLIT if settings.tensor_parallel > 1 else _REPLICAS if settings.data_parallel > 1 else ""
        refused = {TrafficMode.OVERLAP.value: why} if why else {}
        return Capabilities(
            kind="embedded",
            version=self._version,
            traffic_modes=[mode for mode in TrafficMode if mode not in refused],
            refused_modes=refused,
            rollback=True,
            commit_method=self._facts.commit_method if self._facts is not None else "",
            max_loras=self._settings.lora_slots,
        )

    def layout(self) -> Layout:
        """Say how parameters are made of checkpoint tensors.

        Raises:
            NotReady: nothing is loaded.
        """
        facts = self._loaded()
        return Layout(architecture=facts.architecture, groups=facts.groups, tied=facts.tied)

    def ranks(self) -> Sequence[RankState]:
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

    async def memory(self) -> MemoryState:
        """Say where the memory is, summed over ranks."""
        answers = await self._ask(
            lambda call: wire.MemoryCall(call=call),
            wire.MemoryAnswer,
            timeout=self._settings.call_timeout,
            what="reporting memory",
        )
        return summed([answer.memory for answer in answers])

    # The swap.

    async def stage(self, order: Stage | StageRetained) -> Sequence[Reply]:
        """Stage beside the live tensors while requests run."""
        if isinstance(order, StageRetained):
            retained = order
            return await self._control(lambda call: wire.StageRetainedCall(call=call, order=retained), "staging")
        wanted = order
        return await self._control(
            lambda call: wire.StageCall(call=call, order=wanted),
            "staging",
            timeout=self._settings.stage_timeout,
            call_off=CallOff(
                order=lambda _: wire.CancelStage(operation_id=wanted.operation_id),
                error=SourceUnreadable,
                advice="the source hangs or is slow; check its volume, or allow more time (stage_timeout)",
            ),
        )

    async def try_out(self, operation_id: str, trials: Sequence[PromptTrial]) -> Sequence[Reply]:
        """Run prompts on what is staged, beside the live version."""
        return await self._control(
            lambda call: wire.TryOutCall(call=call, operation_id=operation_id, trials=tuple(trials)),
            "trying prompts",
            timeout=self._settings.stage_timeout,
            call_off=CallOff(
                order=lambda _: wire.CancelStage(operation_id=operation_id),
                error=Cancelled,
                advice="try fewer or shorter prompts, or allow more time (stage_timeout)",
            ),
        )

    async def prepare(self, operation_id: str, *, overlap: bool = False) -> Sequence[Reply]:
        """Promise that commit can no longer fail for want of anything; with ``overlap`` the second instance is warm."""
        return await self._control(
            lambda call: wire.PrepareCall(call=call, operation_id=operation_id, overlap=overlap),
            "bringing up a second instance" if overlap else "preparing",
            timeout=self._settings.stage_timeout if overlap else None,
        )

    async def pause(
        self, operation_id: str, *, timeout: float, policy: RequestPolicy = RequestPolicy.NONE_RUNNING
    ) -> Sequence[Reply]:
        """Park every rank between two steps, which is the same for every policy."""
        return await self._control(
            lambda call: wire.PauseCall(call=call, operation_id=operation_id, timeout=timeout),
            "pausing",
            timeout=timeout + self._settings.call_timeout,
        )

    async def commit(self, operation_id: str, policy: RequestPolicy) -> Sequence[Reply]:
        """Make the staged tensors live; only legal while paused."""
        self._proven.clear()
        return await self._control(
            lambda call: wire.CommitCall(call=call, operation_id=operation_id, policy=policy), "committing"
        )

    async def retire(self, operation_id: str) -> Sequence[Reply]:
        """End the instance that an overlapping commit left behind."""
        return await self._control(lambda call: wire.RetireCall(call=call, operation_id=operation_id), "retiring")

    async def verify(self, operation_id: str, *, strict: bool) -> Sequence[Reply]:
        """Prove that what is live is what was staged."""
        replies = await self._control(
            lambda call: wire.VerifyCall(call=call, operation_id=operation_id, strict=strict),
            "verifying",
            timeout=self._settings.hash_timeout if strict else None,
            call_off=CallOff(
                order=lambda call: wire.CancelCall(call=call),
                error=Cancelled,
                advice="allow more time (hash_timeout), or hash in the background (loading.verify: Standard)",
            )
            if strict
            else None,
        )
        return self._note_proof(replies)

    async def rollback(self, operation_id: str) -> Sequence[Reply]:
        """Put the tensors from before this operation's commit back; only legal while paused."""
        self._proven.clear()
        return await self._control(lambda call: wire.RollbackCall(call=call, operation_id=operation_id), "rolling back")

    async def resume(self, operation_id: str) -> Sequence[Reply]:
        """Let the ranks step again."""
        return await self._control(lambda call: wire.ResumeCall(call=call, operation_id=operation_id), "resuming")

    async def release(self, operation_id: str, *, previous: bool) -> Sequence[Reply]:
        """Drop what is staged for the operation; with ``previous`` also the retained version."""
        return await self._control(
            lambda call: wire.ReleaseCall(call=call, operation_id=operation_id, previous=previous), "releasing"
        )

    async def hashes(self, pattern: str, *, bytes_per_second: int = 0) -> Hashes:
        """Re-hash live tensors whose checkpoint names match a glob, while requests run.

        Raises:
            WorkerLost: a rank is gone.
            Cancelled: it took too long.
            ModelswapError: a rank could not hash.
        """
        answers = await self._ask(
            lambda call: wire.HashesCall(call=call, pattern=pattern, bytes_per_second=bytes_per_second),
            wire.HashesAnswer,
            timeout=self._settings.hash_timeout,
            what="hashing",
            call_off=CallOff(
                order=lambda call: wire.CancelCall(call=call),
                error=Cancelled,
                advice="ask for fewer tensors, or when the engine has less to do",
            ),
        )
        found: dict[int, Hashes] = {}
        for rank, answer in zip(self.ranks(), answers, strict=True):
            if answer.error is not None:
                raise from_body(answer.error)
            if answer.hashes is None:
                raise Internal("a worker answered a hash call with nothing")
            found[rank.rank] = answer.hashes
        return merged(found)

    async def transfer(self, order: TransferOrder, *, timeout: float) -> Sequence[TransferReply]:
        """Take weights in on every rank, or have one replica give them out, within so many seconds."""
        return await self._transfer(order, self._concerned(order), timeout=timeout)

    def _concerned(self, order: TransferOrder) -> Sequence[WorkerGroup]:
        match order:
            case SendBroadcast():
                return self._groups[:1]  # whose first rank is in the group
            case WriteFile() | ReadTensor() | FillMemory():
                return [group for group in self._groups if group.serving and group.alive][:1] or self._groups[:1]
            case _:
                return self._groups

    async def _transfer(
        self, order: TransferOrder, groups: Sequence[WorkerGroup], *, timeout: float
    ) -> Sequence[TransferReply]:
        answers = await self._ask(
            lambda call: wire.TransferCall(call=call, order=order),
            wire.TransferAnswer,
            timeout=timeout,
            what="transferring weights",
            call_off=CallOff(
                order=lambda call: wire.CancelTransfer(call=call),
                error=Cancelled,
                advice="look whether the sender still runs, or allow more time",
            ),
            groups=groups,
        )
        return [answer.reply for answer in answers]

    # Adapters.

    def adapters(self) -> AdapterLayout:
        """Say what adapters can be.

        Raises:
            NotReady: nothing is loaded.
        """
        return self._loaded().adapters

    async def load_adapter(self, order: LoadAdapter) -> Sequence[Reply]:
        """Read an adapter into memory while requests run."""
        return await self._adapters.load(order)

    async def place_adapter(self, adapter_id: str, slot: int) -> Sequence[Reply]:
        """Put a loaded adapter into a slot."""
        return await self._adapters.place(adapter_id, slot)

    async def clear_slot(self, slot: int) -> Sequence[Reply]:
        """Empty a slot."""
        return await self._adapters.clear_slot(slot)

    async def drop_adapter(self, adapter_id: str) -> Sequence[Reply]:
        """Forget an adapter."""
        return await self._adapters.drop(adapter_id)

    async def _control(
        self,
        build: Callable[[int], wire.Order],
        what: str,
        *,
        timeout: float | None = None,
        call_off: CallOff | None = None,
        groups: Sequence[WorkerGroup] | None = None,
    ) -> list[Reply]:
        seconds = timeout or self._settings.call_timeout
        answers = await self._ask(build, wire.Answer, timeout=seconds, what=what, call_off=call_off, groups=groups)
        return [answer.reply for answer in answers]

    async def _ask(
        self,
        build: Callable[[int], wire.Order],
        kind: type[_AnswerT],
        *,
        timeout: float,
        what: str,
        call_off: CallOff | None = None,
        groups: Sequence[WorkerGroup] | None = None,
    ) -> list[_AnswerT]:
        """Ask every rank (of some replicas) at once; a lost rank is raised only when all others have answered."""
        if not self._started:
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

    def _note_proof(self, replies: list[Reply]) -> list[Reply]:
        for reply in replies:
            if reply.error is None:
                self._proven[reply.rank] = reply.digest
            else:
                self._proven.pop(reply.rank, None)
        return replies

    # Generation.

    def generate(self, request: Generate) -> TokenStream:
        """Run a prompt; the request is with the engine when this returns. Closing the stream aborts it.

        Raises:
            BadRequest: the prompt or the sampling is not one the engine can run.
            NotReady: nothing is loaded, or the worker is gone.
        """
        check_request(request, self._loaded())
        serving = [group for group in self._groups if group.serving and group.alive]
        if not serving:
            raise NotReady("the worker is gone", advice="try again; it is being restarted")
        # A replica that was just caught up gets its adapters a moment later than its weights.
        fit = [group for group in serving if not request.adapter or request.adapter in group.slots.values()]
        return min(fit or serving, key=lambda group: len(group.streams)).generate(request)

    def running(self) -> int:
        """Say how many requests the engine is working on."""
        return sum(len(group.streams) for group in self._groups)

    @property
    def max_tokens(self) -> int:
        """Prompt and answer together may have at most this many tokens; 0 while nothing is loaded."""
        return self._facts.max_tokens if self._facts is not None else 0

    def _loaded(self) -> wire.ModelFacts:
        if self._facts is None:
            raise NotReady("no version is loaded", advice="wait until the engine is ready")
        return self._facts
