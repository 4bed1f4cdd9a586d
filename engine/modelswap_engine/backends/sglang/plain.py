"""SGLang's half of the plain route: its HTTP routes alone, with nothing of ours in its process.

Most often it was started on the version that it must hold, and is only looked at. One that holds another version of the
same model gets what differs; one that holds another model is not touched, for it would die of it. What is live after an
exchange that SGLang calls failed is read from checksums, and a rollback is an exchange the other way.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from modelswap_engine.backends.external.control import EngineFacts, Requests
from modelswap_engine.backends.external.loading import Starting
from modelswap_engine.backends.external.plain.adopt import Found, architecture_in, look, same_model
from modelswap_engine.backends.external.plain.backend import PlainBackend
from modelswap_engine.backends.external.plain.engine import Taken, Watching
from modelswap_engine.backends.external.plain.live import Held, Staged
from modelswap_engine.backends.external.plain.memory import SumMemory
from modelswap_engine.backends.external.plain.staging import Staging
from modelswap_engine.backends.external.plain.sums import Sums
from modelswap_engine.backends.external.restart import RestartWish
from modelswap_engine.backends.external.settings import ExternalSettings
from modelswap_engine.backends.port import Load, RequestPolicy
from modelswap_engine.backends.sglang.answers import ServerInfo
from modelswap_engine.backends.sglang.client import SglangClient
from modelswap_engine.backends.sglang.control import SglangControl
from modelswap_engine.backends.sglang.exchange import Exchange
from modelswap_engine.backends.sglang.support import layout_of, refusal, sight_of
from modelswap_engine.backends.sglang.watch import Watch
from modelswap_engine.protocol.errors import ModelswapError, UnsupportedChange, WorkerLost

log: Final = logging.getLogger("modelswap.sglang")
_CANARY_SECONDS: Final = 30.0
"""In which an engine must make a token after a swap."""


class SglangPlain:
    """See the module and :class:`~modelswap_engine.backends.external.plain.engine.PlainEngine`.

    Args:
        client: its routes.
        control: its control side, over the same client.
        exchange: the calls that change weights.
        staging: writes what differs, where it holds another version than it must.
        memory: checksums that it showed before.
        restart: takes the wish that it be restarted.
        settings: bounds.
        experimental: allow engines, devices and splits that could not be run by those who wrote this, or not be proved.
    """

    name = "SGLang"
    undoes = True

    def __init__(
        self,
        client: SglangClient,
        control: SglangControl,
        *,
        exchange: Exchange,
        staging: Staging,
        memory: SumMemory,
        restart: RestartWish,
        settings: ExternalSettings,
        experimental: bool,
    ) -> None:
        self.control = control
        self._client = client
        self._exchange = exchange
        self._staging = staging
        self._memory = memory
        self._restart = restart
        self._settings = settings
        self._experimental = experimental
        self._lost: Callable[[], None] = lambda: None
        self._paused = False
        self._canary: asyncio.Task[None] | None = None

    def in_use(self) -> Path | None:
        """Return where the link leads that it was given last."""
        return self._exchange.linked()

    def watch(self, *, busy: Callable[[], bool], lost: Callable[[], None]) -> Watching:
        """Return what asks it for tokens while nobody else talks to it."""
        self._lost = lost
        return Watch(
            self.control, every=self._settings.watch, seconds=self._settings.call, busy=busy, lost=self._noticed
        )

    def _noticed(self, why: str, hangs: bool) -> None:
        log.error("SGLang is lost: %s", why)
        if hangs:
            self._restart.want(why, boot_id=self.control.boot_id)
        self._lost()

    async def take(self, order: Load, facts: EngineFacts, *, folder: Path | None) -> Taken:
        """Take it over, and load what differs."""
        call = self._settings.call
        server = await self._client.server_info(seconds=call)
        architecture = await asyncio.to_thread(architecture_in, Path(order.directory))
        self._require_support(server, architecture)
        model = await self._client.model_info(seconds=call)
        recalled = await asyncio.to_thread(self._memory.recall, order.digest, layout_of(server))
        live = await self._exchange.observe()
        found = await look(order, live, sight=sight_of(server, model), recalled=recalled)
        wrong = found.held.judge(live).wrong
        if wrong:
            same = await asyncio.to_thread(same_model, order, Path(model.model_path))
            await self._catch_up(found, wrong, same=same)
            live = await self._exchange.observe()
        elif model.weight_version != order.digest:
            await self.control.set_version(order.digest, seconds=call)
        self._exchange.require(found.held, live)
        await self.control.resume(seconds=_CANARY_SECONDS)  # whoever came before us may have paused it
        self._paused = False
        return Taken(architecture=architecture, layout=layout_of(server), found=found, live=live)

    def _require_support(self, server: ServerInfo, architecture: str) -> None:
        why = refusal(server, architecture, experimental=self._experimental)
        if why:
            raise UnsupportedChange(
                f"weights of this SGLang cannot be exchanged over its HTTP routes: {why}",
                advice="serve versions by a restart of the engine",
            )

    async def _catch_up(self, found: Found, wrong: Sequence[str], *, same: bool) -> None:
        if not same or not found.made.sources.keys() >= set(wrong):
            why = "SGLang holds another model than the version that it must serve"
            self._restart.want(why, boot_id=self.control.boot_id)
            raise WorkerLost(why, advice="it has to be started on the version; see the engine's --model-path")
        folder = await self._staging.write_differing(wrong, found.held, found)
        await self.control.halt(seconds=self._settings.call)
        await self._exchange.apply(folder, found.held)

    async def pause(self, policy: RequestPolicy, *, seconds: float) -> None:
        """Have its last request end. Nothing is stopped: while it loads, SGLang lets no request begin by itself."""
        self._paused = True
        if policy is RequestPolicy.ABORT:
            await self._sung(seconds=seconds)
            await self._client.abort_all(seconds=seconds)
        await self.control.drained(seconds=seconds)

    async def go_on(self) -> None:
        """Nothing was stopped."""

    async def resume(self) -> None:
        """Nothing was stopped; that it generates is seen to in the background, with a second of SGLang's own."""
        self._paused = False
        self._canary = asyncio.create_task(self._sing(self.control.boot_id))

    async def _sing(self, boot_id: str) -> None:
        try:
            sings = await self._client.generates(seconds=_CANARY_SECONDS)
        except ModelswapError:
            sings = False
        if not sings and not self._paused and boot_id == self.control.boot_id:
            self._noticed("it generates nothing after a swap", True)

    async def _sung(self, *, seconds: float) -> None:
        """Let our own question for a token end: ended with all others, SGLang would seem to generate nothing."""
        if self._canary is not None:
            await asyncio.wait({self._canary}, timeout=seconds)

    async def exchange(self, folder: Path, wanted: Held) -> bool:
        """Load the folder."""
        return await self._exchange.apply(folder, wanted)

    async def undo(self, staged: Staged) -> None:
        """Load the tensors that went over those that came."""
        await self._exchange.apply(staged.back, staged.before)

    async def sums(self) -> Mapping[int, Sums]:
        """Ask for all checksums."""
        return await self._exchange.observe()

    async def prove(self, wanted: Held, *, loaded: Staged | None) -> Mapping[int, Sums]:
        """Hold every checksum against the version, where that cannot wait until requests go on."""
        live = await self._exchange.observe() if loaded is None else {}
        self._exchange.require(wanted, live or wanted.sums)
        return live

    async def close(self) -> None:
        """Let go of it."""
        if self._canary is not None:
            self._canary.cancel()
            await asyncio.gather(self._canary, return_exceptions=True)
        await self.control.close()


def plain_sglang(
    client: SglangClient,
    *,
    folder: Path,
    requests: Requests,
    restart: RestartWish,
    settings: ExternalSettings | None = None,
    starting: Starting | None = None,
    experimental: bool = False,
) -> PlainBackend:
    """Return the backend; ``folder`` is seen by SGLang under the same path, the rest as above and in the backend."""
    settings, memory = settings or ExternalSettings(), SumMemory(folder / "checksums")
    staging, control = Staging(folder, experimental=experimental), SglangControl(client)
    engine = SglangPlain(
        client,
        control,
        exchange=Exchange(control, folder=folder, restart=restart, settings=settings, experimental=experimental),
        staging=staging,
        memory=memory,
        restart=restart,
        settings=settings,
        experimental=experimental,
    )
    return PlainBackend(
        engine,
        staging=staging,
        memory=memory,
        requests=requests,
        restart=restart,
        settings=settings,
        starting=starting,
    )
