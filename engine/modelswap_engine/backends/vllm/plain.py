"""vLLM behind the backend port by its HTTP routes alone, with nothing of ours in its processes.

An exchange is a folder of whole fusion groups, written by us from proven bytes. A commit has the paused engine load it
over the live tensors and forget what it cached; the label of its weights is no version's until that is proved. vLLM
cannot be trusted after a load that went wrong in any way: it is then restarted, on the version before, and never asked
again. On a processor it hides the weights of linear layers: what it holds there follows from proven files that it said
it loaded, and from nothing that can be read back, so versions are served only where that was allowed.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from modelswap_engine.backends.external import views
from modelswap_engine.backends.external.control import EngineFacts, Requests
from modelswap_engine.backends.external.loading import Starting, emptied, reached
from modelswap_engine.backends.external.plain import report
from modelswap_engine.backends.external.plain.adopt import Found, Sight, look, started_on
from modelswap_engine.backends.external.plain.book import Book
from modelswap_engine.backends.external.plain.live import Held
from modelswap_engine.backends.external.plain.replying import Replying
from modelswap_engine.backends.external.plain.staging import Staging
from modelswap_engine.backends.external.plain.sums import DIGITS
from modelswap_engine.backends.external.restart import RestartWish
from modelswap_engine.backends.external.settings import ExternalSettings
from modelswap_engine.backends.external.watch import Watch
from modelswap_engine.backends.port import (
    Hashes,
    Layout,
    Load,
    PromptTrial,
    Reply,
    RequestPolicy,
    Stage,
    StageRetained,
)
from modelswap_engine.backends.vllm.control import VllmControl
from modelswap_engine.backends.vllm.plain_facts import Started
from modelswap_engine.checkpoint.canonical import CONFIG, architecture_of
from modelswap_engine.protocol.engine_state import Capabilities, MemoryState, RankState
from modelswap_engine.protocol.errors import (
    Internal,
    NotReady,
    SourceChanged,
    UnsupportedChange,
    Unverifiable,
    WorkerLost,
)

_UNPROVED: Final = "unproved"
"""What the engine calls its weights from before a load until they are proved."""

_LOOK_SECONDS: Final = 0.05

_AT_START: Final = "default"
"""What vLLM calls its weights until it is told another name."""


class PlainVllm:
    """See the module and :class:`modelswap_engine.backends.port.Backend`.

    Args:
        control: the engine's control side.
        folder: seen by the engine under the same path.
        requests: those that clients have in the engine.
        restart: takes the wish that the engine be restarted.
        settings: bounds.
        starting: tells whoever starts the engine on what.
        started_on: the digest that the launcher started the engine on, "" where that is not known.
        launched: names the start that the launcher speaks of, "" without one.
        unverifiable: serve versions of which the engine does not show every tensor.
    """

    def __init__(
        self,
        control: VllmControl,
        *,
        folder: Path,
        requests: Requests,
        restart: RestartWish,
        settings: ExternalSettings | None = None,
        starting: Starting | None = None,
        started_on: Callable[[], str] = str,
        launched: Callable[[], str] = str,
        unverifiable: bool = False,
    ) -> None:
        self._control = control
        self._settings = settings or ExternalSettings()
        self._requests = requests
        self._restart = restart
        self._starting = starting
        self._started_on = started_on
        self._unverifiable = unverifiable
        self._staging = Staging(folder, experimental=unverifiable)
        self._book = Book(self._staging)
        self._replies = Replying(self._book, boot_id=lambda: self._boot_id, lost=lambda _: self._lost())
        self._watch = Watch(
            control,
            seconds=self._settings.watch,
            answer_seconds=self._settings.answer,
            misses=self._settings.misses,
            lost=self._lost,
            launched=launched,
        )
        self._facts: EngineFacts | None = None
        self._found: Found | None = None
        self._architecture = ""
        self._alive = False
        self._paused_for = ""
        self._ended = 0

    # Life.

    async def start(self) -> None:
        """Begin to look after the engine, which is started by somebody else, and not before it is known on what."""
        await self._withdraw()
        self._watch.start()

    async def stop(self) -> None:
        """Let go of the engine, which goes on."""
        await self._watch.stop()
        self._lost()
        await self._control.close()

    def suspect(self) -> None:
        """Somebody saw the engine fail: it is looked at now, and not at the next interval."""
        self._watch.hurry()

    def _lost(self) -> None:
        self._alive, self._book.proven, self._paused_for = False, "", ""

    def _distrust(self, why: str) -> WorkerLost:
        """Nobody knows what is live: only another start of the engine helps."""
        return self._restart.distrust(why, boot_id=self._boot_id)

    @property
    def _boot_id(self) -> str:
        return self._facts.boot_id if self._facts is not None else ""

    async def _withdraw(self) -> None:
        if self._starting is not None:
            await self._starting.withdraw()

    async def load(self, order: Load) -> Sequence[Reply]:
        """Take over what the engine was started on; one that holds anything else must be started again."""
        return await self._replies.answer(order.operation_id, lambda: self._load(order))

    async def _load(self, order: Load) -> Reply:
        self._lost()
        self._book.clear()
        with self._requests.barred():
            self._requests.end()
            folder = await self._starting.offer(order) if self._starting is not None else None
            self._found = await self._taken_over(order, folder)
        self._book.took(self._found.held)
        await self._book.prune()
        self._alive = True
        await self._watch.expect(self._boot_id)
        return self._replies.reply(order.operation_id, digest=order.digest)

    async def _taken_over(self, order: Load, folder: Path | None) -> Found:
        """Take over the engine; where somebody starts it on the version, the next start if this one is not right."""
        try:
            return await self._adopt(order, await self._reached(), folder=folder)
        except WorkerLost:
            if folder is None:
                raise
            return await self._adopt(order, await self._reached(), folder=folder)

    async def _reached(self) -> EngineFacts:
        self._facts = await reached(self._control, bounds=self._settings, restart=self._restart)
        return self._facts

    async def _adopt(self, order: Load, facts: EngineFacts, *, folder: Path | None) -> Found:
        call = self._settings.call
        started = Started(await self._control.config(seconds=call), version=facts.version)
        self._architecture = await asyncio.to_thread(_architecture, Path(order.directory))
        why = started.refusal(self._architecture)
        if why:
            raise UnsupportedChange(
                f"weights of this vLLM cannot be exchanged over its HTTP routes: {why}",
                advice="serve versions by a restart of the engine",
            )
        if await self._control.paused(seconds=call):
            await self._control.resume(seconds=call)
        await emptied(self._control, seconds=call)
        live = await self._control.checksums(seconds=self._settings.hash)
        loaded_from = await self._loaded_from(order, folder, Path(started.loaded_from))
        sight = Sight(exact=started.whole, dtype=started.dtype, digits=DIGITS, loaded_from=loaded_from)
        found = await look(order, live, sight=sight, recalled={})
        if found.made.tied:
            raise UnsupportedChange(
                "the head is tied to the embedding, which vLLM does not load right a second time on a processor",
                advice="serve versions by a restart of the engine",
            )
        verdict, label = found.held.judge(live), facts.weight_version
        said = label == order.digest or (label == _AT_START and loaded_from is not None)
        if verdict.wrong or (verdict.unseen and not said):
            named = f"parameter {verdict.wrong[0]} differs" if verdict.wrong else f"it calls them {label!r}"
            raise self._distrust(f"it holds other weights than {order.digest}: {named}")
        self._require_seen(verdict.unseen, order.digest)
        await self._control.set_version(order.digest, seconds=call)
        return found

    async def _loaded_from(self, order: Load, folder: Path | None, named: Path) -> Path | None:
        """Return the folder with the version that the engine was started on, None if it was started on anything else.

        A launcher is asked, since the path that it gives to an engine leads elsewhere later.
        """
        if folder is not None:
            return folder if await asyncio.to_thread(self._started_on) == order.digest else None
        return named if await asyncio.to_thread(started_on, order, named) else None

    def _require_seen(self, unseen: Sequence[str], digest: str) -> None:
        if unseen and not self._unverifiable:
            raise Unverifiable(
                f"parameter {unseen[0]} (and {len(unseen) - 1} more) of vLLM cannot be seen to be that of {digest}",
                advice="use the in-process route, or pass --allow-unverifiable",
                details={"tensor": unseen[0]},
            )

    async def settle(self, operation_id: str, digest: str) -> Sequence[Reply]:
        """There is one replica: nothing is left when it is lost."""
        return ()

    # What it is.

    def capabilities(self) -> Capabilities:
        """Say what this backend can do."""
        return views.plain_capabilities(self._facts)

    @property
    def served_name(self) -> str:
        """The engine's own name of the base model, "" while it is not known."""
        names = self._facts.served_model_names if self._facts is not None else ()
        return names[0] if names else ""

    def layout(self) -> Layout:
        """Say how parameters are made of checkpoint tensors."""
        made = self._loaded().made
        return Layout(architecture=self._architecture, groups=made.groups, tied=made.tied)

    def _loaded(self) -> Found:
        if self._found is None:
            raise NotReady("no version is loaded", advice="wait until the engine is ready")
        return self._found

    def ranks(self) -> Sequence[RankState]:
        """Say who is alive, and what each rank has proven under the engine's boot id."""
        alive, proven = self._alive, self._book.proven if self._alive else ""
        numbers = self._book.numbers()
        return [RankState(rank=rank, boot_id=self._boot_id, alive=alive, digest=proven) for rank in numbers]

    async def memory(self) -> MemoryState:
        """Say nothing: the engine's memory is its own, and what is staged lies on a disk."""
        return MemoryState()

    def running(self) -> int:
        """Say how many requests clients have in the engine."""
        return self._requests.running()

    async def hashes(self, pattern: str, *, bytes_per_second: int = 0, still: bool = False) -> Hashes:
        """Compare the checksums with the version that must be live; the engine bounds no rate."""
        del bytes_per_second, still
        found = self._loaded()
        await self._at_rest()
        began = time.monotonic()
        async with self._replies.calls:
            live = await self._checksums()
        held = self._book.target or found.held
        return report.hashes(held, found.made, live, pattern=pattern, seconds=time.monotonic() - began)

    async def _at_rest(self) -> None:
        """Wait for a moment without requests, for a while: vLLM makes no step while it hashes."""
        looks = int(self._settings.rest / _LOOK_SECONDS)
        for _ in range(looks if self._requests.running() else 0):
            await asyncio.sleep(_LOOK_SECONDS)
            if not self._requests.running():
                return

    async def _checksums(self) -> dict[int, dict[str, str]]:
        try:
            return await self._control.checksums(seconds=self._settings.hash)
        except WorkerLost as error:
            self._lost()
            raise self._distrust(error.message) from error

    # The swap.

    async def stage(self, order: Stage | StageRetained) -> Sequence[Reply]:
        """Write the folders of the exchange; the engine is not asked anything."""

        async def stage() -> Reply:
            staged = await self._book.stage(order, self._loaded(), recalled={})
            fetched = 0 if isinstance(order, StageRetained) else staged.nbytes
            return self._replies.reply(
                order.operation_id, digest=staged.after.digest, staged_bytes=staged.nbytes, fetched_bytes=fetched
            )

        return await self._replies.answer(order.operation_id, stage)

    async def try_out(self, operation_id: str, trials: Sequence[PromptTrial]) -> Sequence[Reply]:
        """Refuse: over HTTP nothing can be tried before it is live."""
        why = "checks.prompts: vLLM cannot try a version before it is live"
        return self._replies.refused(operation_id, UnsupportedChange(why, advice="leave checks.prompts out"))

    async def prepare(self, operation_id: str, *, overlap: bool = False) -> Sequence[Reply]:
        """See that the engine still is the start that holds the live version, and have no other begin on it."""

        async def prepare() -> Reply:
            self._book.of(operation_id)
            if overlap:
                raise UnsupportedChange(views.NO_OVERLAP, advice="use traffic mode Drain")
            facts = await self._control.facts(seconds=self._settings.call)
            if facts.boot_id != self._boot_id or not self._alive:
                raise WorkerLost("vLLM was restarted", advice="the version is loaded again by itself; try again then")
            await self._withdraw()
            return self._replies.reply(operation_id, digest=self._book.prepare(operation_id).after.digest)

        return await self._replies.answer(operation_id, prepare)

    async def pause(self, operation_id: str, *, timeout: float, policy: RequestPolicy) -> Sequence[Reply]:
        """Stop the engine once it has let go of its last request."""

        async def pause() -> Reply:
            started = time.monotonic()
            if policy is RequestPolicy.ABORT:
                self._ended = self._requests.end()
            elif policy is not RequestPolicy.NONE_RUNNING:
                raise UnsupportedChange(views.NO_MIXTURE, advice="use traffic mode Drain or Abort")
            # Of vLLM's own pauses one waits for requests without an end, and one keeps them.
            await emptied(self._control, seconds=timeout)
            await self._control.pause(RequestPolicy.NONE_RUNNING, seconds=self._settings.call)
            self._paused_for = operation_id
            return self._replies.reply(operation_id, seconds=time.monotonic() - started)

        return await self._replies.answer(operation_id, pause)

    async def commit(self, operation_id: str, policy: RequestPolicy) -> Sequence[Reply]:
        """Have the engine load what is staged over what is live, and forget what it cached."""

        async def commit() -> Reply:
            staged = self._book.prepared(operation_id)
            self._require_pause(operation_id)
            await staged.require_untouched()
            self._book.committed(staged)
            began = time.perf_counter()
            try:
                await self._control.set_version(_UNPROVED, seconds=self._settings.call)
                await self._control.reload(str(staged.there), seconds=self._settings.load)
                await staged.require_untouched()
                forgotten = await self._control.flush(seconds=self._settings.call)
            except (WorkerLost, SourceChanged) as error:
                raise self._distrust(f"commit: {error.message}") from error
            if not forgotten:
                raise self._distrust("it did not forget cached keys and values of the weights before")
            self._book.answered_well()
            took = (time.perf_counter() - began) * 1e6
            return self._replies.reply(
                operation_id, commit_microseconds=took, requests=self._ended, method=views.BY_DISK
            )

        return await self._replies.answer(operation_id, commit)

    def _require_pause(self, operation_id: str) -> None:
        if self._paused_for != operation_id:
            raise Internal(f"operation {operation_id} has not paused the engine, so no weights are exchanged in it")

    async def retire(self, operation_id: str) -> Sequence[Reply]:
        """There is never a second instance."""
        return self._replies.every(self._replies.reply(operation_id))

    async def verify(self, operation_id: str, *, strict: bool) -> Sequence[Reply]:
        """Say what is live; then the engine may call its weights by its name.

        A version that was just loaded follows from files that were proved and had not changed once vLLM had answered
        that it loaded them; the checksums that vLLM shows are read once requests go on, as after every swap. With
        ``strict``, and wherever its answer is not enough, they are read before.
        """

        async def verify() -> Reply:
            target = self._target()
            if strict or self._book.loaded is None:
                wrong = target.judge(await self._checksums()).wrong
                if wrong:
                    raise self._distrust(f"verify: parameter {wrong[0]} is not that of {target.digest}")
            self._require_seen(target.unknown, target.digest)
            await self._control.set_version(target.digest, seconds=self._settings.call)
            self._book.proven = target.digest
            return self._replies.reply(operation_id, digest=target.digest)

        return await self._replies.answer(operation_id, verify)

    def _target(self) -> Held:
        if self._book.target is None or not self._alive:
            raise WorkerLost("vLLM holds no version that is known", advice="it is loaded again by itself")
        return self._book.target

    async def rollback(self, operation_id: str) -> Sequence[Reply]:
        """Nothing to do before a commit; after one, the version before comes back with another start of the engine."""

        async def rollback() -> Reply:
            self._require_pause(operation_id)
            if self._book.undoable(operation_id) is not None:
                raise self._distrust(f"operation {operation_id} is taken back, and vLLM keeps no weights from before")
            return self._replies.reply(operation_id)

        return await self._replies.answer(operation_id, rollback)

    async def resume(self, operation_id: str) -> Sequence[Reply]:
        """Let the engine step again."""

        async def resume() -> Reply:
            self._ended = 0
            if self._paused_for:
                await self._control.resume(seconds=self._settings.call)
                self._paused_for = ""
            return self._replies.reply(operation_id)

        return await self._replies.answer(operation_id, resume)

    async def release(self, operation_id: str, *, previous: bool) -> Sequence[Reply]:
        """Drop what is staged for the operation; of one that was committed, what it replaced is retained."""
        self._staging.stop()

        async def release() -> Reply:
            self._book.release(operation_id, previous=previous)
            await self._book.prune()
            return self._replies.reply(operation_id)

        return await self._replies.answer(operation_id, release)


def _architecture(directory: Path) -> str:
    file = directory / CONFIG
    return architecture_of({CONFIG: file.read_bytes()}) if file.exists() else ""
