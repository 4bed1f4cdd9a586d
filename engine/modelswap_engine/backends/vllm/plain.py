"""vLLM's half of the plain route: its HTTP routes alone, with nothing of ours in its processes.

A commit has the paused engine load a folder over the live tensors and forget what it cached; the label of its weights
is no version's until that is proved. vLLM cannot be trusted after a load that went wrong in any way: it is then
restarted, on the version before, and never asked again. On a processor it hides the weights of linear layers: what it
holds there follows from proven files that it said it loaded, and from nothing that can be read back, so versions are
served only where that was allowed.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from modelswap_engine.backends.external.control import EngineFacts, Requests
from modelswap_engine.backends.external.loading import Starting, emptied
from modelswap_engine.backends.external.plain.adopt import Found, Sight, architecture_in, look, started_on
from modelswap_engine.backends.external.plain.backend import PlainBackend
from modelswap_engine.backends.external.plain.engine import Taken, Watching
from modelswap_engine.backends.external.plain.live import Held, Staged
from modelswap_engine.backends.external.plain.memory import SumMemory
from modelswap_engine.backends.external.plain.staging import Staging
from modelswap_engine.backends.external.plain.sums import DIGITS, Sums
from modelswap_engine.backends.external.restart import RestartWish
from modelswap_engine.backends.external.settings import ExternalSettings
from modelswap_engine.backends.external.watch import Watch
from modelswap_engine.backends.port import Load, RequestPolicy
from modelswap_engine.backends.vllm.control import VllmControl
from modelswap_engine.backends.vllm.plain_facts import Started
from modelswap_engine.protocol.errors import UnsupportedChange, Unverifiable, WorkerLost

_UNPROVED: Final = "unproved"
"""What the engine calls its weights from before a load until they are proved."""

_AT_START: Final = "default"
"""What vLLM calls its weights until it is told another name."""

_COLD: Final = "serve versions by a restart of the engine"


class VllmPlain:
    """See the module and :class:`~modelswap_engine.backends.external.plain.engine.PlainEngine`.

    Args:
        control: the engine's control side.
        memory: checksums that it showed before.
        restart: takes the wish that the engine be restarted.
        settings: bounds.
        started_on: the digest that the launcher started the engine on, "" where that is not known; may block.
        launched: names the start that the launcher speaks of, "" without one; may block.
        unverifiable: serve versions of which the engine does not show every tensor.
    """

    name = "vLLM"
    undoes = False

    def __init__(
        self,
        control: VllmControl,
        *,
        memory: SumMemory,
        restart: RestartWish,
        settings: ExternalSettings,
        started_on: Callable[[], str],
        launched: Callable[[], str],
        unverifiable: bool,
    ) -> None:
        self.control = control
        self._memory = memory
        self._restart = restart
        self._settings = settings
        self._started_on = started_on
        self._launched = launched
        self._unverifiable = unverifiable

    def in_use(self) -> Path | None:
        """None: it remembers the path of its last load, and does not go there by itself."""
        return None

    def watch(self, *, busy: Callable[[], bool], lost: Callable[[], None]) -> Watching:
        """Return what asks for its health, also while somebody talks to it."""
        return Watch(
            self.control,
            seconds=self._settings.watch,
            answer_seconds=self._settings.answer,
            misses=self._settings.misses,
            lost=lost,
            launched=self._launched,
        )

    def _distrust(self, why: str) -> WorkerLost:
        """Nobody knows what is live: only another start of the engine helps."""
        return self._restart.distrust(why, boot_id=self.control.boot_id)

    async def take(self, order: Load, facts: EngineFacts, *, folder: Path | None) -> Taken:
        """Take over what the engine was started on; one that holds anything else must be started again."""
        call = self._settings.call
        started = Started(await self.control.config(seconds=call), version=facts.version)
        architecture = await asyncio.to_thread(architecture_in, Path(order.directory))
        why = started.refusal(architecture)
        if why:
            raise UnsupportedChange(
                f"weights of this vLLM cannot be exchanged over its HTTP routes: {why}", advice=_COLD
            )
        if await self.control.paused(seconds=call):
            await self.control.resume(seconds=call)
        await emptied(self.control, seconds=call)
        live = await self._seen()
        loaded_from = await self._loaded_from(order, folder, Path(started.loaded_from))
        sight = Sight(exact=started.whole, dtype=started.dtype, digits=DIGITS, loaded_from=loaded_from)
        recalled = await asyncio.to_thread(self._memory.recall, order.digest, started.layout)
        found = await look(order, live, sight=sight, recalled=recalled)
        said = facts.weight_version == order.digest or (facts.weight_version == _AT_START and loaded_from is not None)
        self._require_right(found, live, said="" if said else facts.weight_version)
        await self.control.set_version(order.digest, seconds=call)
        return Taken(architecture=architecture, layout=started.layout, found=found, live=live)

    async def _loaded_from(self, order: Load, folder: Path | None, named: Path) -> Path | None:
        """Return the folder with the version that the engine was started on, None if it was started on anything else.

        A launcher is asked, since the path that it gives to an engine leads elsewhere later.
        """
        if folder is not None:
            return folder if await asyncio.to_thread(self._started_on) == order.digest else None
        return named if await asyncio.to_thread(started_on, order, named) else None

    def _require_right(self, found: Found, live: Mapping[int, Sums], *, said: str) -> None:
        """Hold what it shows, and says of the rest (``said`` where that is another name), against the version."""
        if found.made.tied:
            raise UnsupportedChange(
                "the head is tied to the embedding, which vLLM does not load right a second time on a processor",
                advice=_COLD,
            )
        verdict = found.held.judge(live)
        if verdict.wrong or (verdict.unseen and said):
            named = f"parameter {verdict.wrong[0]} differs" if verdict.wrong else f"it calls them {said!r}"
            raise self._distrust(f"it holds other weights than {found.held.digest}: {named}")
        self._require_seen(verdict.unseen, found.held.digest)

    def _require_seen(self, unseen: Sequence[str], digest: str) -> None:
        if unseen and not self._unverifiable:
            raise Unverifiable(
                f"parameter {unseen[0]} (and {len(unseen) - 1} more) of vLLM cannot be seen to be that of {digest}",
                advice="use the in-process route, or pass --allow-unverifiable",
                details={"tensor": unseen[0]},
            )

    async def pause(self, policy: RequestPolicy, *, seconds: float) -> None:
        """Stop it once it has let go of its last request; of those that are to end, clients have gone already.

        Of vLLM's own pauses one waits for requests without an end, and one keeps them.
        """
        await emptied(self.control, seconds=seconds)
        await self.control.pause(RequestPolicy.NONE_RUNNING, seconds=self._settings.call)

    async def go_on(self) -> None:
        """Let it step again; no client's request can reach it."""
        await self.control.resume(seconds=self._settings.call)

    async def resume(self) -> None:
        """Let it step again."""
        await self.control.resume(seconds=self._settings.call)

    async def exchange(self, folder: Path, wanted: Held) -> bool:
        """Load the folder; whatever goes wrong, this start of the engine is not trusted any more."""
        try:
            await self.control.set_version(_UNPROVED, seconds=self._settings.call)
            await self.control.reload(str(folder), seconds=self._settings.load)
            forgotten = await self.control.flush(seconds=self._settings.call)
        except WorkerLost as error:
            raise self._distrust(f"commit: {error.message}") from error
        if not forgotten:
            raise self._distrust("it did not forget cached keys and values of the weights before")
        return True

    async def undo(self, staged: Staged) -> None:
        """Have it started on the version before: it keeps no weights, and a second load is one too many."""
        raise self._distrust(f"operation {staged.operation_id} is taken back, and vLLM keeps no weights from before")

    async def sums(self) -> Mapping[int, Sums]:
        """Ask for all checksums: there is no asking for some."""
        return await self.control.checksums(seconds=self._settings.hash)

    async def prove(self, wanted: Held, *, loaded: Staged | None) -> Mapping[int, Sums]:
        """Hold every checksum that it shows against the version, where that cannot wait until requests go on."""
        live: Mapping[int, Sums] = {}
        if loaded is None:
            live = await self._seen()
            wrong = wanted.judge(live).wrong
            if wrong:
                raise self._distrust(f"verify: parameter {wrong[0]} is not that of {wanted.digest}")
        self._require_seen(wanted.unknown, wanted.digest)
        await self.control.set_version(wanted.digest, seconds=self._settings.call)
        return live

    async def _seen(self) -> Mapping[int, Sums]:
        try:
            return await self.sums()
        except WorkerLost as error:
            raise self._distrust(error.message) from error

    async def close(self) -> None:
        """Let go of it."""
        await self.control.close()


def plain_vllm(
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
) -> PlainBackend:
    """Return the backend; ``folder`` is seen by vLLM under the same path, the rest as above and in the backend."""
    settings, memory = settings or ExternalSettings(), SumMemory(folder / "checksums")
    engine = VllmPlain(
        control,
        memory=memory,
        restart=restart,
        settings=settings,
        started_on=started_on,
        launched=launched,
        unverifiable=unverifiable,
    )
    return PlainBackend(
        engine,
        staging=Staging(folder, experimental=unverifiable),
        memory=memory,
        requests=requests,
        restart=restart,
        settings=settings,
        starting=starting,
    )
