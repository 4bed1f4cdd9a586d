"""SGLang behind the backend port by its HTTP routes alone, with nothing of ours in its process.

An exchange is prepared as two folders that the engine sees: one with the tensors that change, one with those that go.
A commit has the engine load the first while it is paused and empty of cache, a rollback the second. What is live after
either is read from checksums and never from what the engine answers. Where an engine died, or cannot be told from a
mixture, a restart is wanted, and nothing is asked of it again.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from modelswap_engine.backends.external.control import EngineFacts, Requests
from modelswap_engine.backends.external.loading import Starting
from modelswap_engine.backends.external.plain import report
from modelswap_engine.backends.external.plain.book import Book
from modelswap_engine.backends.external.plain.memory import SumMemory
from modelswap_engine.backends.external.plain.replying import Replying
from modelswap_engine.backends.external.plain.staging import Staging
from modelswap_engine.backends.external.plain.sums import Sums
from modelswap_engine.backends.external.restart import RestartWish
from modelswap_engine.backends.external.views import NO_MIXTURE
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
from modelswap_engine.backends.sglang.client import SglangClient
from modelswap_engine.backends.sglang.control import ENGINE, REFUSED, SglangControl
from modelswap_engine.backends.sglang.exchange import LINK, Exchange
from modelswap_engine.backends.sglang.settings import PlainSettings
from modelswap_engine.backends.sglang.support import layout_of
from modelswap_engine.backends.sglang.takeover import Taken, Takeover
from modelswap_engine.backends.sglang.watch import RequestCount, Watch
from modelswap_engine.protocol.engine_state import Capabilities, MemoryState, RankState
from modelswap_engine.protocol.errors import (
    BadRequest,
    Internal,
    ModelswapError,
    NotReady,
    UnsupportedChange,
    WorkerLost,
)
from modelswap_engine.protocol.policy import TrafficMode

log: Final = logging.getLogger("modelswap.sglang")
Work = Callable[[], Awaitable[Reply]]


class PlainSglang:
    """SGLang without anything of ours in it; see :class:`modelswap_engine.backends.port.Backend`.

    Args:
        client: its routes.
        folder: shared with the engine under the same path.
        wish: told when its container must be restarted.
        settings: bounds.
        requests: those that clients have in it, where somebody carries them; else it is asked for their number.
        starting: tells whoever starts it on what; None where nobody listens.
    """

    def __init__(
        self,
        client: SglangClient,
        *,
        folder: Path,
        wish: RestartWish,
        settings: PlainSettings | None = None,
        requests: Requests | None = None,
        starting: Starting | None = None,
    ) -> None:
        self._settings = settings = settings or PlainSettings()
        self._client = client
        self._control = SglangControl(client)
        self._wish = wish
        self._folder = folder
        self._requests = requests
        self._starting = starting
        self._staging = Staging(folder, experimental=settings.experimental)
        self._exchange = Exchange(
            self._control,
            folder=folder,
            wish=wish,
            update_seconds=settings.update_seconds,
            hash_seconds=settings.hash_seconds,
            experimental=settings.experimental,
        )
        self._memory = SumMemory(folder / "checksums")
        self._takeover = Takeover(
            client=client,
            control=self._control,
            exchange=self._exchange,
            staging=self._staging,
            memory=self._memory,
            wish=wish,
            settings=settings,
        )
        self._book = Book(self._staging, in_use=self._linked)
        self._replies = Replying(self._book, boot_id=lambda: self._boot_id, lost=lambda why: self._lost(why, False))
        self._watch = Watch(
            self._control,
            every=settings.watch_seconds,
            seconds=settings.call_seconds,
            busy=self._replies.calls.locked,
            lost=self._lost,
        )
        self._count = RequestCount(self._control, seconds=settings.call_seconds)
        self._facts: EngineFacts | None = None
        self._taken: Taken | None = None
        self._paused = False
        self._met = 0
        self._shown: Mapping[int, Sums] = {}
        self._canary: asyncio.Task[None] | None = None

    # Life.

    async def start(self) -> None:
        """Have the engine wait, where somebody listens, until it is known on what it is started."""
        await self._withdraw()

    async def _withdraw(self) -> None:
        if self._starting is not None:
            await self._starting.withdraw()

    def suspect(self) -> None:
        """Somebody saw the engine fail: it is looked at now, and not at the next interval."""
        self._watch.hurry()

    async def stop(self) -> None:
        """Let go of the engine, which goes on."""
        await self._watch.end()
        await self._count.end()
        if self._canary is not None:
            self._canary.cancel()
            await asyncio.gather(self._canary, return_exceptions=True)
        await self._control.close()

    def _lost(self, why: str, hangs: bool) -> None:
        log.error("SGLang is lost: %s", why)
        if hangs:
            self._wish.want(why, boot_id=self._boot_id)
        self._facts, self._book.proven = None, ""

    async def load(self, order: Load) -> Sequence[Reply]:
        """Wait for the engine, and have it hold a version: most often it was started on it.

        Requests in it are ended, for they run on weights that nobody vouches for.
        """
        with self._requests.barred() if self._requests is not None else contextlib.nullcontext():
            if self._requests is not None:
                self._requests.end()
            if self._starting is not None:
                await self._starting.offer(order)
            return await self._replies.answer(order.operation_id, lambda: self._load(order))

    async def _load(self, order: Load) -> Reply:
        self._watch.boot_id = ""
        self._facts, self._taken = None, None
        self._book.clear()
        taken = await self._takeover.take(order)
        self._facts, self._taken, self._paused = taken.facts, taken, False
        self._book.took(taken.found.held)
        self._shown = taken.live
        await self._remember()
        await self._book.prune()
        self._watch.begin(taken.facts.boot_id)
        return self._replies.reply(order.operation_id, digest=order.digest)

    async def settle(self, operation_id: str, digest: str) -> Sequence[Reply]:
        """Say that the engine serves a version, if it proves it; never raises."""
        try:
            async with self._replies.calls:
                held = next((item for item in self._book.ends() if item.digest == digest), None)
                if held is None or self._facts is None:
                    return []
                await self._exchange.prove(held)
                await self._resume()
                self._book.target, self._book.proven = held, digest
        except ModelswapError as error:
            log.warning("SGLang cannot be shown to hold %s: %s", digest, error.message)
            return []
        return self._replies.every(self._replies.reply(operation_id, digest=digest))

    # What it is.

    def capabilities(self) -> Capabilities:
        """Say what this backend can do."""
        return Capabilities(
            kind=ENGINE,
            version=f"SGLang {self._taken.server.version}" if self._taken is not None else "SGLang",
            traffic_modes=[mode for mode in TrafficMode if mode.value not in self._denied],
            refused_modes=dict(self._denied),
            rollback=True,
            commit_method="disk",
            max_loras=0,
        )

    @property
    def _denied(self) -> Mapping[str, str]:
        """What it cannot do; beside that, whoever carries its answers could not say where a mixed one changes."""
        return REFUSED if self._requests is None else {**REFUSED, TrafficMode.RECOMPUTE.value: NO_MIXTURE}

    @property
    def served_name(self) -> str:
        """The engine's own name of the model, "" while it is not known; it answers to any."""
        return self._taken.facts.served_model_names[0] if self._taken is not None else ""

    def layout(self) -> Layout:
        """Say how parameters are made of checkpoint tensors."""
        taken = self._loaded()
        made = taken.found.made
        return Layout(architecture=taken.architecture, groups=made.groups, tied=made.tied)

    def ranks(self) -> Sequence[RankState]:
        """Say who is alive, and what each rank has proven under its boot id."""
        facts, proven = self._facts, self._book.proven
        if facts is None:
            return [RankState()]
        numbers = self._book.numbers()
        return [RankState(rank=rank, boot_id=facts.boot_id, alive=True, digest=proven) for rank in numbers]

    async def memory(self) -> MemoryState:
        """Say nothing: the engine's memory is its own, and what is staged lies on a disk."""
        return MemoryState()

    def running(self) -> int:
        """Say how many requests the engine has, as of a moment ago where nobody here carries them."""
        return self._count.now() if self._requests is None else self._requests.running()

    async def hashes(self, pattern: str, *, bytes_per_second: int = 0, still: bool = False) -> Hashes:
        """Compare the checksums with the version that must be live; the engine bounds no rate."""
        del bytes_per_second, still
        taken, began = self._loaded(), time.monotonic()
        async with self._replies.calls:
            live = await self._exchange.observe()
        return report.hashes(
            self._book.target or taken.found.held,
            taken.found.made,
            live,
            pattern=pattern,
            seconds=time.monotonic() - began,
        )

    # The swap.

    async def stage(self, order: Stage | StageRetained) -> Sequence[Reply]:
        """Write the folders for the way there and back; the engine is not asked anything."""
        return await self._replies.answer(order.operation_id, lambda: self._stage(order))

    async def _stage(self, order: Stage | StageRetained) -> Reply:
        taken, recalled = self._loaded(), {}
        if isinstance(order, Stage):
            recalled = await asyncio.to_thread(self._memory.recall, order.digest, layout_of(taken.server))
        staged = await self._book.stage(order, taken.found, recalled=recalled)
        fetched = 0 if isinstance(order, StageRetained) else staged.nbytes
        return self._replies.reply(
            order.operation_id, digest=staged.after.digest, staged_bytes=staged.nbytes, fetched_bytes=fetched
        )

    async def try_out(self, operation_id: str, trials: Sequence[PromptTrial]) -> Sequence[Reply]:
        """Refuse: over HTTP nothing can be tried before it is live."""
        why = "checks.prompts: SGLang cannot try a version before it is live"
        return self._replies.refused(operation_id, UnsupportedChange(why, advice="leave checks.prompts out"))

    async def prepare(self, operation_id: str, *, overlap: bool = False) -> Sequence[Reply]:
        """See that the engine still is the start that holds the live version."""

        async def prepare() -> Reply:
            self._book.of(operation_id)
            if overlap:
                raise UnsupportedChange(REFUSED[TrafficMode.OVERLAP.value], advice="use another traffic mode")
            await self._same_start()
            await self._withdraw()
            return self._replies.reply(operation_id, digest=self._book.prepare(operation_id).after.digest)

        return await self._replies.answer(operation_id, prepare)

    async def _same_start(self) -> None:
        facts = await self._control.facts(seconds=self._settings.call_seconds)
        if self._facts is None or facts.boot_id != self._facts.boot_id:
            raise WorkerLost("SGLang was restarted", advice="the version is loaded again by itself; try again then")

    async def pause(self, operation_id: str, *, timeout: float, policy: RequestPolicy) -> Sequence[Reply]:
        """Stop the engine, once nothing runs where nothing may."""

        async def pause() -> Reply:
            began = time.monotonic()
            await self._same_start()
            self._paused = True
            self._met = await self._control.requests(seconds=self._settings.call_seconds)
            if policy is RequestPolicy.ABORT and self._requests is not None:
                self._met = self._requests.end()  # so that clients hear why, and not half an answer
            await self._control.pause(policy, seconds=timeout)
            return self._replies.reply(operation_id, seconds=time.monotonic() - began)

        return await self._replies.answer(operation_id, pause)

    async def commit(self, operation_id: str, policy: RequestPolicy) -> Sequence[Reply]:
        """Have the engine load the staged tensors over the live ones; it was paused for the same policy."""

        async def commit() -> Reply:
            staged = self._book.prepared(operation_id)
            self._require_pause()
            self._book.committed(staged)
            began = time.perf_counter()
            if await self._exchange.apply(staged.there, staged.after, boot_id=self._boot_id):
                self._book.answered_well()
            took = (time.perf_counter() - began) * 1e6
            requests = 0 if policy is RequestPolicy.NONE_RUNNING else self._met
            return self._replies.reply(operation_id, commit_microseconds=took, requests=requests, method="disk")

        return await self._replies.answer(operation_id, commit)

    def _require_pause(self) -> None:
        if not self._paused:
            raise Internal("SGLang is not paused, so no weights are exchanged in it")

    async def retire(self, operation_id: str) -> Sequence[Reply]:
        """Refuse: there is one instance."""
        return self._replies.refused(operation_id, BadRequest("SGLang has one instance, there is none to retire"))

    async def verify(self, operation_id: str, *, strict: bool) -> Sequence[Reply]:
        """Read checksums: of what was exchanged, where the engine said that all went well; with ``strict`` of all.

        The others follow in the background, as after every swap.
        """

        async def verify() -> Reply:
            loaded, target = None if strict else self._book.loaded, self._book.target
            if target is None:
                raise Internal("SGLang holds no version yet")
            live = await self._exchange.prove(target, only=loaded.touched if loaded is not None else ())
            self._book.proven, self._shown = target.digest, {} if loaded is not None else live
            return self._replies.reply(operation_id, digest=target.digest)

        return await self._replies.answer(operation_id, verify)

    async def rollback(self, operation_id: str) -> Sequence[Reply]:
        """Have the engine load the tensors that went over those that came."""

        async def rollback() -> Reply:
            self._require_pause()
            staged = self._book.undoable(operation_id)
            if staged is not None:
                self._book.proven = ""
                await self._exchange.apply(staged.back, staged.before, boot_id=self._boot_id)
                self._book.undone(staged)
            return self._replies.reply(operation_id)

        return await self._replies.answer(operation_id, rollback)

    async def resume(self, operation_id: str) -> Sequence[Reply]:
        """Let the engine go on; that it generates is seen to in the background, with a second of SGLang's own."""

        async def resume() -> Reply:
            await self._resume()
            return self._replies.reply(operation_id)

        return await self._replies.answer(operation_id, resume)

    async def _resume(self) -> None:
        if self._paused:
            await self._control.resume(seconds=self._settings.canary_seconds)
            self._paused = False
            self._canary = asyncio.create_task(self._sing())

    async def _sing(self) -> None:
        boot_id = self._boot_id
        try:
            sings = await self._client.generates(seconds=self._settings.canary_seconds)
        except ModelswapError:
            sings = False
        if not sings and not self._paused and boot_id == self._boot_id:
            self._wish.want("SGLang generates nothing after a swap", boot_id=boot_id)
            self._lost("it generates nothing after a swap", False)

    async def release(self, operation_id: str, *, previous: bool) -> Sequence[Reply]:
        """Drop what is staged for the operation; of one that was committed, what it replaced is retained."""
        self._staging.stop()

        async def release() -> Reply:
            self._book.release(operation_id, previous=previous)
            await self._remember()
            await self._book.prune()
            return self._replies.reply(operation_id)

        return await self._replies.answer(operation_id, release)

    # How.

    @property
    def _boot_id(self) -> str:
        return self._facts.boot_id if self._facts is not None else ""

    def _loaded(self) -> Taken:
        if self._taken is None:
            raise NotReady("SGLang holds no version yet", advice="wait until it has come up")
        return self._taken

    async def _remember(self) -> None:
        """Keep the checksums of what was proved last; not while requests wait."""
        shown, self._shown = self._shown, {}
        if shown and self._book.proven:
            try:
                await asyncio.to_thread(
                    self._memory.remember, self._book.proven, layout_of(self._loaded().server), shown
                )
            except OSError as error:
                log.warning("checksums cannot be kept: %s", error)

    def _linked(self) -> Path | None:
        link = self._folder / LINK
        return Path(link.readlink()) if link.is_symlink() else None
