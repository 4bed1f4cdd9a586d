"""Having an SGLang hold a version: waiting until it is there, looking at it, and loading what differs.

Most often it was started on the version, and nothing is changed. It is never given a model that is not its own.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from modelswap_engine.backends.external.control import EngineFacts
from modelswap_engine.backends.external.plain.adopt import Found, look, same_model
from modelswap_engine.backends.external.plain.memory import SumMemory
from modelswap_engine.backends.external.plain.staging import Staging
from modelswap_engine.backends.external.plain.sums import Sums
from modelswap_engine.backends.external.restart import RestartWish
from modelswap_engine.backends.port import Load
from modelswap_engine.backends.sglang.answers import ServerInfo
from modelswap_engine.backends.sglang.client import SglangClient
from modelswap_engine.backends.sglang.control import SglangControl
from modelswap_engine.backends.sglang.exchange import Exchange
from modelswap_engine.backends.sglang.settings import PlainSettings
from modelswap_engine.backends.sglang.support import layout_of, refusal, sight_of
from modelswap_engine.checkpoint.canonical import CONFIG, architecture_of
from modelswap_engine.protocol.errors import NotReady, UnsupportedChange, WorkerLost


@dataclass(frozen=True, kw_only=True)
class Taken:
    """An engine that holds a version, proved."""

    facts: EngineFacts
    server: ServerInfo
    architecture: str
    found: Found
    live: Mapping[int, Sums]


class Takeover:
    """Takes over a start of the engine; the parameters are those of the backend."""

    def __init__(
        self,
        *,
        client: SglangClient,
        control: SglangControl,
        exchange: Exchange,
        staging: Staging,
        memory: SumMemory,
        wish: RestartWish,
        settings: PlainSettings,
    ) -> None:
        self._client = client
        self._control = control
        self._exchange = exchange
        self._staging = staging
        self._memory = memory
        self._wish = wish
        self._settings = settings

    async def take(self, order: Load) -> Taken:
        """Return when the engine holds the version and generates.

        Raises:
            WorkerLost: it is not there, or must be restarted first.
            UnsupportedChange: its weights cannot be exchanged by this route.
            DigestMismatch, Unverifiable: what it holds is not the version, or cannot be shown to be.
            ModelswapError: the version's files cannot be read.
        """
        facts = await self._up()
        server = await self._client.server_info(seconds=self._settings.call_seconds)
        architecture = await asyncio.to_thread(_architecture, Path(order.directory))
        self._require_support(server, architecture)
        model = await self._client.model_info(seconds=self._settings.call_seconds)
        recalled = await asyncio.to_thread(self._memory.recall, order.digest, layout_of(server))
        live = await self._exchange.observe()
        found = await look(order, live, sight=sight_of(server, model), recalled=recalled)
        wrong = found.held.judge(live).wrong
        if wrong:
            same = await asyncio.to_thread(same_model, order, Path(model.model_path))
            await self._catch_up(found, wrong, same=same, boot_id=facts.boot_id)
            live = await self._exchange.observe()
        elif model.weight_version != order.digest:
            await self._control.set_version(order.digest, seconds=self._settings.call_seconds)
        self._exchange.require(found.held, live)
        await self._control.resume(seconds=self._settings.canary_seconds)  # whoever came before us may have paused it
        return Taken(facts=facts, server=server, architecture=architecture, found=found, live=live)

    def _require_support(self, server: ServerInfo, architecture: str) -> None:
        why = refusal(server, architecture, experimental=self._settings.experimental)
        if why:
            raise UnsupportedChange(
                f"weights of this SGLang cannot be exchanged over its HTTP routes: {why}",
                advice="serve versions by a restart of the engine",
            )

    async def _up(self) -> EngineFacts:
        ends = time.monotonic() + self._settings.start_seconds
        while True:
            try:
                facts = await self._control.facts(seconds=self._settings.call_seconds)
                self._wish.seen(facts.boot_id)
                if not self._wish.wanted:
                    return facts
                raise WorkerLost(f"SGLang was not restarted, which is wanted: {self._wish.reason}")
            except (NotReady, WorkerLost):
                if time.monotonic() >= ends:
                    raise
            await asyncio.sleep(self._settings.poll_seconds)

    async def _catch_up(self, found: Found, wrong: Sequence[str], *, same: bool, boot_id: str) -> None:
        if not same or not found.made.sources.keys() >= set(wrong):
            why = "SGLang holds another model than the version that it must serve"
            self._wish.want(why, boot_id=boot_id)
            raise WorkerLost(why, advice="it has to be started on the version; see the engine's --model-path")
        folder = await self._staging.write_differing(wrong, found.held, found)
        await self._control.halt(seconds=self._settings.call_seconds)
        await self._exchange.apply(folder, found.held, boot_id=boot_id)


def _architecture(side_files: Path) -> str:
    path = side_files / CONFIG
    return architecture_of({CONFIG: path.read_bytes()} if path.is_file() else {})
