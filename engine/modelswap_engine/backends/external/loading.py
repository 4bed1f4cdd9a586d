"""How a whole version becomes the proven one of an engine that runs already: taken over, or loaded by that engine.

Whoever starts the engine starts it on the version that it must serve, so taking over is the rule: hashes say whether it
is true. What cannot be trusted is told by ``WorkerLost``, and never repaired here.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from modelswap_engine.backends.external import views
from modelswap_engine.backends.external.control import EngineControl, EngineFacts
from modelswap_engine.backends.external.ranks import Ranks
from modelswap_engine.backends.external.restart import RestartWish, log
from modelswap_engine.backends.external.settings import ExternalSettings
from modelswap_engine.backends.inprocess import wire
from modelswap_engine.backends.port import Layout, Load, Reply
from modelswap_engine.protocol.errors import Busy, Internal, ManifestMismatch, NotReady, UnsupportedChange, WorkerLost

POLL_SECONDS: Final = 0.02


class Starting(Protocol):
    """What an engine starts on; see :class:`~modelswap_engine.backends.external.start_point.StartPoint`."""

    async def offer(self, order: Load) -> Path:
        """Have engines start on this version from now on; returns its folder."""

    async def withdraw(self) -> None:
        """Have engines wait: what is to be served is about to be another version."""


@dataclass(frozen=True)
class Loaded:
    """What came of it; ``layout`` is None where the replies say why the version is not live."""

    replies: Sequence[Reply]
    layout: Layout | None = None


class Loading:
    """Loads whole versions.

    Args:
        control: of the engine.
        ranks: our half in it.
        bounds: of every wait.
        starting: tells whoever starts the engine on what; None where nobody listens.
    """

    def __init__(
        self,
        control: EngineControl,
        ranks: Ranks,
        *,
        bounds: ExternalSettings,
        starting: Starting | None,
    ) -> None:
        self._control = control
        self._ranks = ranks
        self._bounds = bounds
        self._starting = starting

    async def offer(self, order: Load) -> Path | None:
        """Have the engine start on this version, should it start; returns the version's folder where it has one."""
        return await self._starting.offer(order) if self._starting is not None else None

    async def withdraw(self) -> None:
        """Have an engine that starts wait until it is known what on."""
        if self._starting is not None:
            await self._starting.withdraw()

    async def load(self, order: Load, facts: EngineFacts, *, folder: Path | None) -> Loaded:
        """Have the version live and proven in an engine that nobody has a request in.

        An engine that holds another one loads it from its folder, by its own rules.

        Raises:
            UnsupportedChange: our half is not in the engine.
            IncompatibleModel, BadRequest: it is, and cannot exchange this model's weights.
            Busy: the engine did not come to rest.
            WorkerLost: it holds something else, or nobody knows what.
        """
        if not facts.agent:
            raise UnsupportedChange(
                f"{facts.engine} {facts.version} was started without modelswap's half in its processes",
                advice="start it with the options in the guide for this engine",
            )
        await self._ranks.greet(facts.ranks)
        if await self._control.paused(seconds=self._bounds.call):
            await self._control.resume(seconds=self._bounds.call)
        await emptied(self._control, seconds=self._bounds.call)
        replies = await self._adopt(order)
        if _mismatch(replies):
            await self._load_anew(order, replies, folder=folder)
            replies = await self._adopt(order)
            if _mismatch(replies):
                raise WorkerLost(f"the engine loaded {order.digest} and holds other weights")
        if any(reply.error is not None for reply in replies):
            return Loaded(replies)
        layout = await self._layout()
        await self._control.set_version(order.digest, seconds=self._bounds.call)
        return Loaded(replies, layout)

    async def _adopt(self, order: Load) -> Sequence[Reply]:
        answers = await self._ranks.work(lambda work: wire.AdoptCall(work, order), seconds=self._bounds.load)
        return views.replies(answers)

    async def _load_anew(self, order: Load, replies: Sequence[Reply], *, folder: Path | None) -> None:
        if folder is None:
            error = next(reply.error for reply in replies if reply.error is not None)
            raise WorkerLost(f"the engine holds other weights than {order.digest}: {error.message}")
        await self._control.load_full(str(folder), order.digest, seconds=self._bounds.load)
        if not await forgets(self._control, within=self._bounds.forget, seconds=self._bounds.call):
            raise WorkerLost("the engine did not forget cached keys and values of the weights before")

    async def _layout(self) -> Layout:
        answers = await self._ranks.ask(wire.LayoutCall())
        layouts = [answer.layout for answer in answers if answer.layout is not None]
        if len(layouts) != len(answers) or any(layout != layouts[0] for layout in layouts):
            raise Internal(
                "the ranks do not agree on how parameters are made", advice="report it with the engine's log"
            )
        return layouts[0]


def _mismatch(replies: Sequence[Reply]) -> bool:
    return any(reply.error is not None and reply.error.code == ManifestMismatch.code for reply in replies)


async def reached(control: EngineControl, *, bounds: ExternalSettings, restart: RestartWish) -> EngineFacts:
    """Wait for an engine that answers and is not the start that is to end.

    Raises:
        NotReady: there is none within its bound.
    """
    deadline, said = time.monotonic() + bounds.reach, ""
    while True:
        try:
            facts = await control.facts(seconds=bounds.call)
            restart.seen(facts.boot_id)
            if not restart.wanted:
                return facts
            why = f"a restart is wanted: {restart.reason}"
        except (NotReady, WorkerLost) as error:
            why = error.message
        if time.monotonic() >= deadline:
            raise NotReady(f"no usable engine for {bounds.reach:g} s: {why}", advice="look at the engine's container")
        if why != said:
            said = why
            log.warning("no usable engine yet, waiting for at most %g s: %s", bounds.reach, why)
        await asyncio.sleep(bounds.watch)


async def emptied(control: EngineControl, *, seconds: float) -> None:
    """Wait until the engine has let go of its last request, which is when it can forget all that was cached.

    Raises:
        Busy: it did not within that time.
    """
    if not await forgets(control, within=seconds, seconds=seconds):
        raise Busy(
            f"the engine still runs requests that nobody waits for, after {seconds:g} s",
            advice="try again; look at the engine's log if it happens again",
        )


async def forgets(control: EngineControl, *, within: float, seconds: float) -> bool:
    """Have the engine forget all that it cached, asking again for a while; ``seconds`` bounds one question."""
    deadline = time.monotonic() + within
    while not await control.flush(seconds=seconds):
        if time.monotonic() >= deadline:
            return False
        await asyncio.sleep(POLL_SECONDS)
    return True
