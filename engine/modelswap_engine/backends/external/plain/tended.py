"""An engine that loads folders by itself, looked after: taken over on the right version, lost, asked what it holds.

Nothing is exchanged here, and no engine is known by name.
"""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from modelswap_engine.backends.external import views
from modelswap_engine.backends.external.control import EngineFacts, Requests
from modelswap_engine.backends.external.loading import Starting, reached
from modelswap_engine.backends.external.plain import report
from modelswap_engine.backends.external.plain.book import Book
from modelswap_engine.backends.external.plain.engine import PlainEngine, Taken
from modelswap_engine.backends.external.plain.memory import SumMemory
from modelswap_engine.backends.external.plain.replying import Replying
from modelswap_engine.backends.external.plain.staging import Staging
from modelswap_engine.backends.external.plain.sums import Sums
from modelswap_engine.backends.external.restart import RestartWish
from modelswap_engine.backends.external.settings import ExternalSettings
from modelswap_engine.backends.external.trials import Trials
from modelswap_engine.backends.port import Bounds, Hashes, Layout, Load, Reply
from modelswap_engine.protocol.engine_state import Capabilities, MemoryState, RankState
from modelswap_engine.protocol.errors import NotReady, WorkerLost

log: Final = logging.getLogger("modelswap.external")
_LOOK_SECONDS: Final = 0.05


class Tended:
    """The half of :class:`~modelswap_engine.backends.port.Backend` that is about the engine and not about a swap.

    Args:
        engine: the engine's half.
        staging: writes folders that it sees under the same path.
        memory: remembers its checksums.
        requests: those that clients have in it.
        restart: takes the wish that it be restarted.
        settings: bounds.
        starting: tells whoever starts it on what; None where nobody listens.
    """

    def __init__(
        self,
        engine: PlainEngine,
        *,
        staging: Staging,
        memory: SumMemory,
        requests: Requests,
        restart: RestartWish,
        settings: ExternalSettings,
        starting: Starting | None,
    ) -> None:
        self._engine = engine
        self._staging = staging
        self._memory = memory
        self._requests = requests
        self._restart = restart
        self._settings = settings
        self._starting = starting
        self._book = Book(staging, in_use=engine.in_use)
        self._replies = Replying(self._book, boot_id=lambda: self._boot_id, lost=lambda _: self._lost())
        self._trials = Trials(engine.control, bounds=settings)
        self._watch = engine.watch(busy=self._replies.calls.locked, lost=self._lost)
        self._facts: EngineFacts | None = None
        self._taken: Taken | None = None
        self._alive = False
        self._stopped = False
        self._paused_for = ""
        self._ended = 0
        self._shown: Mapping[int, Sums] = {}

    # Life.

    async def start(self) -> None:
        """Begin to look after the engine, which is started by somebody else, and not before it is known on what."""
        await self._withdraw()
        self._watch.start()

    async def stop(self) -> None:
        """Let go of the engine, which goes on."""
        await self._watch.stop()
        self._lost()
        await self._engine.close()

    def suspect(self) -> None:
        """Somebody saw the engine fail: it is looked at now, and not at the next interval."""
        self._watch.hurry()

    def _lost(self) -> None:
        self._alive, self._book.proven = False, ""
        self._stopped, self._paused_for = False, ""

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
        """Wait for the engine, and have it hold a version: most often it was started on it.

        Requests in it are ended, for they run on weights that nobody vouches for.
        """
        return await self._replies.answer(order.operation_id, lambda: self._load(order))

    async def _load(self, order: Load) -> Reply:
        self._lost()
        self._book.clear()
        with self._requests.barred():
            self._requests.end()
            folder = await self._starting.offer(order) if self._starting is not None else None
            taken = await self._taken_over(order, folder)
        self._taken, self._shown, self._stopped = taken, taken.live, False
        self._book.took(taken.found.held)
        await self._tidy()
        self._alive = True
        await self._watch.expect(self._boot_id)
        return self._replies.reply(order.operation_id, digest=order.digest)

    async def _taken_over(self, order: Load, folder: Path | None) -> Taken:
        """Take over the engine; where somebody starts it on the version, the next start if this one is not right."""
        try:
            return await self._engine.take(order, await self._reached(), folder=folder)
        except WorkerLost:
            if folder is None:
                raise
            return await self._engine.take(order, await self._reached(), folder=folder)

    async def _reached(self) -> EngineFacts:
        self._facts = await reached(self._engine.control, bounds=self._settings, restart=self._restart)
        return self._facts

    async def settle(self, operation_id: str, digest: str) -> Sequence[Reply]:
        """There is one replica: nothing is left when it is lost."""
        return ()

    def _require_alive(self) -> None:
        if not self._alive:
            raise self._restarted()

    def _restarted(self) -> WorkerLost:
        return WorkerLost(
            f"{self._engine.name} ended or was restarted",
            advice="the version is loaded again by itself; try again then",
        )

    # What it is.

    def bounds(self) -> Bounds:
        """Say how long calls may take."""
        return self._settings.plain_bounds

    def capabilities(self) -> Capabilities:
        """Say what this backend can do."""
        return views.plain_capabilities(self._facts, rollback=self._engine.undoes)

    @property
    def served_name(self) -> str:
        """The engine's own name of the base model, "" while it is not known."""
        names = self._facts.served_model_names if self._facts is not None else ()
        return names[0] if names else ""

    def layout(self) -> Layout:
        """Say how parameters are made of checkpoint tensors."""
        taken = self._loaded()
        made = taken.found.made
        return Layout(architecture=taken.architecture, groups=made.groups, tied=made.tied)

    def _loaded(self) -> Taken:
        if self._taken is None:
            raise NotReady("no version is loaded", advice="wait until the engine is ready")
        return self._taken

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
        taken = self._loaded()
        await self._at_rest()
        began = time.monotonic()
        async with self._replies.calls:
            try:
                live = await self._engine.sums()
            except WorkerLost as error:
                self._lost()
                raise self._distrust(error.message) from error
        held = self._book.target or taken.found.held
        return report.hashes(held, taken.found.made, live, pattern=pattern, seconds=time.monotonic() - began)

    async def _at_rest(self) -> None:
        """Wait for a moment without requests, for a while: an engine makes no step while it hashes."""
        looks = int(self._settings.rest / _LOOK_SECONDS)
        for _ in range(looks if self._requests.running() else 0):
            await asyncio.sleep(_LOOK_SECONDS)
            if not self._requests.running():
                return

    async def _tidy(self) -> None:
        """Keep the checksums of what was proved last, and remove what nothing leads to; not while requests wait."""
        shown, self._shown = self._shown, {}
        held = self._book.target
        if shown and held is not None and self._book.proven == held.digest:
            try:
                await asyncio.to_thread(
                    self._memory.remember, held.digest, self._loaded().layout, held.confirmed(shown)
                )
            except OSError as error:
                log.warning("checksums cannot be kept: %s", error)
        await self._book.prune()
