"""An engine that is a server of its own, behind the backend port: our half in its ranks exchanges the weights.

What the engine itself must do for it (stop between two steps, forget cached keys and values, load a whole checkpoint)
is asked of its control side. It knows no engine by name, and takes no request of a client.

An engine cannot be started from here. Where it cannot be trusted any more, it counts as dead, a restart is wanted, and
``load`` waits for the next start.
"""

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from msgspec.structs import replace

from modelswap_engine.backends.external import views
from modelswap_engine.backends.external.adapters import ExternalAdapters
from modelswap_engine.backends.external.control import EngineControl, EngineFacts, Requests
from modelswap_engine.backends.external.exchanging import Exchanging
from modelswap_engine.backends.external.loading import Loading, Starting, emptied, reached
from modelswap_engine.backends.external.ranks import Ranks
from modelswap_engine.backends.external.restart import RestartWish
from modelswap_engine.backends.external.settings import ExternalSettings
from modelswap_engine.backends.external.trials import Trials
from modelswap_engine.backends.external.watch import Watch
from modelswap_engine.backends.inprocess import wire
from modelswap_engine.backends.merging import merged
from modelswap_engine.backends.port import (
    Bounds,
    Hashes,
    Layout,
    Load,
    PromptTrial,
    Reply,
    RequestPolicy,
    Stage,
    StageRetained,
)
from modelswap_engine.protocol.engine_state import Capabilities, MemoryState, RankState
from modelswap_engine.protocol.errors import (
    Busy,
    ChecksFailed,
    Internal,
    NotReady,
    UnsupportedChange,
    WorkerLost,
    from_body,
)

T = TypeVar("T")


class ExternalBackend:
    """See the module and :class:`modelswap_engine.backends.port.Backend`.

    Args:
        control: the engine's control side.
        settings: bounds.
        requests: those that clients have in the engine.
        restart: takes the wish that the engine be restarted.
        starting: tells whoever starts the engine on what. Where nobody listens, an engine that holds another version
            than it must cannot be helped.
        adapters: those of the engine; None where none are to be.
        launched: names the start that the engine's launcher speaks of, "" without one.
    """

    def __init__(
        self,
        control: EngineControl,
        *,
        requests: Requests,
        restart: RestartWish,
        settings: ExternalSettings | None = None,
        starting: Starting | None = None,
        adapters: ExternalAdapters | None = None,
        launched: Callable[[], str] = str,
    ) -> None:
        self._control = control
        self._settings = settings or ExternalSettings()
        self._requests = requests
        self._restart = restart
        self._ranks = Ranks(control, call_seconds=self._settings.call)
        self._exchanging = Exchanging(control, self._ranks, bounds=self._settings)
        self._loading = Loading(control, self._ranks, bounds=self._settings, starting=starting)
        self._trials = Trials(control, bounds=self._settings)
        self._watch = Watch(
            control,
            seconds=self._settings.watch,
            answer_seconds=self._settings.answer,
            misses=self._settings.misses,
            lost=self._lost,
            launched=launched,
        )
        self._adapters = adapters
        if adapters is not None:
            adapters.attach(self._distrust)
        self._facts: EngineFacts | None = None
        self._layout: Layout | None = None
        self._proven: dict[int, str] = {}
        self._alive = False
        self._empty_for = ""
        self._ended = 0

    # Life.

    async def start(self) -> None:
        """Begin to look after the engine, which is started by somebody else, and not before it is known on what."""
        await self._loading.withdraw()
        self._watch.start()

    async def stop(self) -> None:
        """Let go of the engine, which goes on."""
        await self._watch.stop()
        if self._adapters is not None:
            await self._adapters.stop()
        await self._ranks.close()
        self._lost()
        await self._control.close()

    def suspect(self) -> None:
        """Somebody saw the engine fail: it is looked at now, and not at the next interval."""
        self._watch.hurry()

    def _lost(self) -> None:
        self._alive, self._empty_for = False, ""
        self._exchanging.forget()
        self._proven.clear()
        if self._adapters is not None:
            self._adapters.lost()

    def _distrust(self, why: str) -> WorkerLost:
        """Nobody knows what the ranks did: only another start of the engine helps."""
        self._lost()
        return self._restart.distrust(why, boot_id=self._facts.boot_id if self._facts is not None else "")

    async def load(self, order: Load) -> Sequence[Reply]:
        """Take over what the engine holds, where that is proven to be the version; else have it loaded.

        Waits for an engine that is not there yet, and for the next start of one that must end. Requests in it are
        ended, for they run on weights that nobody vouches for.
        """
        if order.keep_proven and self._alive and self._proven and set(self._proven.values()) == {order.digest}:
            return self._replies(order.operation_id, digest=order.digest)
        self._lost()
        with self._requests.barred():
            self._requests.end()
            folder = await self._loading.offer(order)
            self._facts = await reached(self._control, bounds=self._settings, restart=self._restart)
            loaded = await self._decisive("load", self._loading.load(order, self._facts, folder=folder))
            if loaded.layout is not None and self._adapters is not None:
                await self._adapters.begin(self._facts.adapters, self._adaptable(), order.tensors)
        if loaded.layout is not None:
            self._layout, self._alive = loaded.layout, True
            await self._watch.expect(self._facts.boot_id)
        return self._note(loaded.replies)

    def _adaptable(self) -> frozenset[str]:
        return frozenset(name for rank in self._ranks.facts for name in rank.adapter_modules)

    async def settle(self, operation_id: str, digest: str) -> Sequence[Reply]:
        """There is one replica: nothing is left when it is lost."""
        return ()

    # What it is.

    def bounds(self) -> Bounds:
        """Say how long calls may take."""
        return self._settings.bounds

    def capabilities(self) -> Capabilities:
        """Say what this backend can do; little is known before the engine has answered."""
        return views.capabilities(self._facts, self._ranks.facts, adapters=self._adapters is not None)

    @property
    def served_name(self) -> str:
        """The engine's own name of the base model, "" while it is not known."""
        names = self._facts.served_model_names if self._facts is not None else ()
        return names[0] if names else ""

    def layout(self) -> Layout:
        """Say how parameters are made of checkpoint tensors.

        Raises:
            NotReady: nothing is loaded.
        """
        if self._layout is None:
            raise NotReady("no version is loaded", advice="wait until the engine is ready")
        return self._layout

    def ranks(self) -> Sequence[RankState]:
        """Say who is alive, and what each rank has proven under its boot id."""
        return views.ranks(self._ranks.facts, self._ranks.boot_ids, alive=self._alive, proven=self._proven)

    async def memory(self) -> MemoryState:
        """Say where the memory is, summed over ranks."""
        return views.memory(await self._decisive("memory", self._ranks.ask(wire.MemoryCall())))

    def running(self) -> int:
        """Say how many requests clients have in the engine; whether it noticed that they left is seen by ``pause``."""
        return self._requests.running()

    # The swap.

    async def stage(self, order: Stage | StageRetained) -> Sequence[Reply]:
        """Stage beside the live tensors while requests run."""
        if isinstance(order, StageRetained):
            return await self._ask("stage", wire.StageRetainedCall(order))
        wanted = order
        work = self._ranks.work(lambda work: wire.StageCall(work, wanted), seconds=self._settings.stage)
        return views.replies(await self._decisive("stage", work))

    async def try_out(self, operation_id: str, trials: Sequence[PromptTrial]) -> Sequence[Reply]:
        """Run prompts on what is live: before the pause the version from before, after the commit the wanted one."""
        try:
            if self._empty_for == operation_id:
                await self._decisive("checks.prompts", self._trials.carry_out(operation_id, trials))
            else:
                await self._trials.rehearse(operation_id, trials)
        except (ChecksFailed, UnsupportedChange, Busy) as error:
            return [replace(reply, error=error.body()) for reply in self._replies(operation_id)]
        return self._replies(operation_id)

    async def prepare(self, operation_id: str, *, overlap: bool = False) -> Sequence[Reply]:
        """Promise that commit can no longer fail for want of anything."""
        if overlap:
            raise UnsupportedChange(views.NO_OVERLAP, advice="use traffic mode Drain")
        replies = await self._ask("prepare", wire.PrepareCall(operation_id))
        await self._loading.withdraw()
        return replies

    async def pause(self, operation_id: str, *, timeout: float, policy: RequestPolicy) -> Sequence[Reply]:
        """See to it that nobody has a request in the engine: then it makes no step, and need not be stopped.

        Raises:
            Busy: requests that nobody waits for any more ran for longer than ``timeout``.
        """
        started = time.monotonic()
        if policy is RequestPolicy.ABORT:
            self._ended = self._requests.end()
        elif policy is not RequestPolicy.NONE_RUNNING:
            raise UnsupportedChange(views.NO_MIXTURE, advice="use traffic mode Drain or Abort")
        await self._decisive("pause", emptied(self._control, seconds=timeout))
        self._empty_for = operation_id
        return self._replies(operation_id, seconds=time.monotonic() - started)

    async def commit(self, operation_id: str, policy: RequestPolicy) -> Sequence[Reply]:
        """Make the staged tensors live, and have everything forgotten that the old ones computed."""
        self._require_empty(operation_id)
        self._proven.clear()
        call = wire.CommitCall(operation_id, whole=True)
        first, *others = await self._decisive("commit", self._exchanging.carry_out(call))
        return [replace(first, requests=self._ended), *others]

    async def rollback(self, operation_id: str) -> Sequence[Reply]:
        """Put the tensors from before this operation's commit back; what the new ones computed is forgotten too."""
        self._require_empty(operation_id)
        self._proven.clear()
        call = wire.RollbackCall(operation_id, whole=True)
        return await self._decisive("rollback", self._exchanging.carry_out(call))

    def _require_empty(self, operation_id: str) -> None:
        if self._empty_for != operation_id:
            raise Internal(f"operation {operation_id} has not paused the engine, so no weights are exchanged in it")

    async def retire(self, operation_id: str) -> Sequence[Reply]:
        """There is never a second instance."""
        return self._replies(operation_id)

    async def verify(self, operation_id: str, *, strict: bool) -> Sequence[Reply]:
        """Prove that what is live is what was staged; then the engine may call it by its name."""
        replies = await self._decisive("verify", self._exchanging.prove(operation_id, strict=strict))
        digests = {reply.digest for reply in replies if reply.error is None}
        if len(digests) == 1 and all(reply.error is None for reply in replies):
            if self._adapters is not None:
                await self._adapters.verify()
            await self._exchanging.name(digests.pop())
        return self._note(replies)

    async def resume(self, operation_id: str) -> Sequence[Reply]:
        """Nothing was stopped: new requests wait at the gate."""
        self._empty_for, self._ended = "", 0
        return self._replies(operation_id)

    async def release(self, operation_id: str, *, previous: bool) -> Sequence[Reply]:
        """Drop what is staged for the operation; with ``previous`` also the retained version."""
        return await self._ask("release", wire.ReleaseCall(operation_id, previous=previous))

    async def hashes(self, pattern: str, *, bytes_per_second: int = 0, still: bool = False) -> Hashes:
        """Re-hash live tensors whose checkpoint names match a glob, while requests run.

        Raises:
            Busy: with ``still``, requests that nobody waits for any more went on.
        """
        if still:
            await emptied(self._control, seconds=self._settings.call)
        work = self._ranks.work(
            lambda work: wire.HashesCall(work, pattern, bytes_per_second, still=still), seconds=self._settings.hash
        )
        found: dict[int, Hashes] = {}
        for answer in await self._decisive("hashes", work):
            if answer.reply.error is not None:
                raise from_body(answer.reply.error)
            if answer.hashes is None:
                raise Internal(f"rank {answer.reply.rank} answered a hash call with nothing")
            found[answer.reply.rank] = answer.hashes
        return merged(found)

    async def _ask(self, what: str, call: wire.Call) -> Sequence[Reply]:
        return views.replies(await self._decisive(what, self._ranks.ask(call)))

    async def _decisive(self, what: str, call: Awaitable[T]) -> T:
        try:
            return await call
        except WorkerLost as error:
            raise self._distrust(f"{what}: {error.message}") from error
        except NotReady as error:  # it is not there, and did nothing: what it was told to keep is gone
            self._lost()
            raise WorkerLost(f"{what}: {error.message}", advice=error.advice) from error

    def _replies(self, operation_id: str, *, digest: str = "", seconds: float = 0.0) -> list[Reply]:
        """Answer for the ranks, of whom nothing was asked."""
        return [
            Reply(operation_id=operation_id, rank=rank, boot_id=boot_id, digest=digest, seconds=seconds)
            for rank, boot_id in enumerate(self._ranks.boot_ids)
        ]

    def _note(self, replies: Sequence[Reply]) -> Sequence[Reply]:
        for reply in replies:
            if reply.error is None:
                self._proven[reply.rank] = reply.digest
            else:
                self._proven.pop(reply.rank, None)
        return replies
