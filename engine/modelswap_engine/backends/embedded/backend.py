"""The embedded engine behind the backend port: fans every call out to the ranks and collects their replies.

The front half only: asyncio, no torch. Ranks agree or nothing is committed is the coordinator's rule; this class makes
sure that every rank was asked and every answer is seen.
"""

import importlib.metadata
import os
from collections.abc import Mapping, Sequence
from typing import Final

from modelswap_engine.backends.adapters import AdapterLayout, LoadAdapter
from modelswap_engine.backends.embedded import wire
from modelswap_engine.backends.embedded.limits import check_request
from modelswap_engine.backends.embedded.loads import Loads
from modelswap_engine.backends.embedded.lora.replicas import ReplicatedAdapters
from modelswap_engine.backends.embedded.process import CallOff
from modelswap_engine.backends.embedded.replicas import Replicas
from modelswap_engine.backends.embedded.settings import EmbeddedSettings
from modelswap_engine.backends.embedded.streams import TokenStream
from modelswap_engine.backends.embedded.transfer.orders import TransferOrders
from modelswap_engine.backends.merging import merged, summed
from modelswap_engine.backends.port import (
    Bounds,
    Generate,
    Hashes,
    Layout,
    Load,
    PromptTrial,
    Reply,
    RequestPolicy,
    Stage,
    StageRetained,
)
from modelswap_engine.backends.transfer import (
    TransferOrder,
    TransferReply,
)
from modelswap_engine.protocol.engine_state import Capabilities, MemoryState, RankState
from modelswap_engine.protocol.errors import (
    Cancelled,
    Internal,
    NotReady,
    SourceUnreadable,
    from_body,
)
from modelswap_engine.protocol.policy import TrafficMode

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
        self._version = f"transformers {importlib.metadata.version('transformers')}"  # reads files
        self._replicas = Replicas(settings, environ=os.environ if environ is None else environ)
        self._control = self._replicas.control
        self._transfers = TransferOrders(self._replicas)
        self._adapters = ReplicatedAdapters(
            self._replicas.groups, ask=self._control, load_seconds=settings.adapter_timeout
        )
        self._loads = Loads(self._replicas, adapters=self._adapters, transfers=self._transfers, settings=settings)

    # Life.

    async def start(self) -> None:
        """Start the ranks, without weights."""
        await self._replicas.start(self._replicas)

    async def stop(self) -> None:
        """End every rank; requests still running end with an error."""
        await self._replicas.stop()
        self._loads.facts = None

    async def load(self, order: Load) -> Sequence[Reply]:
        """Load a whole version into every rank, restarting dead ranks; proven by hash before it answers.

        With ``keep_proven`` replicas that have proven it go on as they are.

        Raises:
            SourceNotFound: a tensor has no path, and no replica that is kept has it.
            ModelswapError: the one that has it could not give it.
        """
        return await self._loads.load(order)

    async def settle(self, operation_id: str, digest: str) -> Sequence[Reply]:
        """Bring what lives back to a version that it holds; replicas that cannot are ended, and answer nothing."""
        return await self._loads.settle(operation_id, digest)

    # What it is.

    def bounds(self) -> Bounds:
        """Say how long calls may take."""
        found = self._settings
        return Bounds(
            call=found.call_timeout,
            stage=found.stage_timeout,
            load=found.start_timeout + found.load_timeout,  # dead workers are started first
            hash=found.hash_timeout,
        )

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
            commit_method=self._loads.facts.commit_method if self._loads.facts is not None else "",
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
        return self._replicas.states()

    async def memory(self) -> MemoryState:
        """Say where the memory is, summed over ranks."""
        answers = await self._replicas.ask(
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
        self._replicas.doubt()
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
        return self._replicas.note(replies)

    async def rollback(self, operation_id: str) -> Sequence[Reply]:
        """Put the tensors from before this operation's commit back; only legal while paused."""
        self._replicas.doubt()
        return await self._control(lambda call: wire.RollbackCall(call=call, operation_id=operation_id), "rolling back")

    async def resume(self, operation_id: str) -> Sequence[Reply]:
        """Let the ranks step again."""
        return await self._control(lambda call: wire.ResumeCall(call=call, operation_id=operation_id), "resuming")

    async def release(self, operation_id: str, *, previous: bool) -> Sequence[Reply]:
        """Drop what is staged for the operation; with ``previous`` also the retained version."""
        return await self._control(
            lambda call: wire.ReleaseCall(call=call, operation_id=operation_id, previous=previous), "releasing"
        )

    async def hashes(self, pattern: str, *, bytes_per_second: int = 0, still: bool = False) -> Hashes:
        """Re-hash live tensors whose checkpoint names match a glob; all can be seen while requests run.

        Raises:
            WorkerLost: a rank is gone.
            Cancelled: it took too long.
            ModelswapError: a rank could not hash.
        """
        del still
        answers = await self._replicas.ask(
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
        return await self._transfers.make(order, timeout=timeout)

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

    # Generation.

    def generate(self, request: Generate) -> TokenStream:
        """Run a prompt; the request is with the engine when this returns. Closing the stream aborts it.

        Raises:
            BadRequest: the prompt or the sampling is not one the engine can run.
            NotReady: nothing is loaded, or the worker is gone.
        """
        check_request(request, self._loaded())
        serving = self._replicas.serving()
        if not serving:
            raise NotReady("the worker is gone", advice="try again; it is being restarted")
        # A replica that was just caught up gets its adapters a moment later than its weights.
        fit = [group for group in serving if not request.adapter or request.adapter in group.slots.values()]
        return min(fit or serving, key=lambda group: len(group.streams)).generate(request)

    def running(self) -> int:
        """Say how many requests the engine is working on."""
        return sum(len(group.streams) for group in self._replicas)

    @property
    def max_tokens(self) -> int:
        """Prompt and answer together may have at most this many tokens; 0 while nothing is loaded."""
        return self._loads.facts.max_tokens if self._loads.facts is not None else 0

    def _loaded(self) -> wire.ModelFacts:
        if self._loads.facts is None:
            raise NotReady("no version is loaded", advice="wait until the engine is ready")
        return self._loads.facts
