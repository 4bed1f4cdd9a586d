"""What an engine that loads folders by itself can be asked, one implementation for each engine.

It says what has to happen in an engine, and what then is known; in which order, and what is made of a failure, is
decided by :mod:`.backend`. Calls are made one at a time. Every one may raise ``WorkerLost`` or ``NotReady``: the engine
is not there any more, or nobody knows what is live in it; then only another start of it helps.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from modelswap_engine.backends.external.control import EngineControl, EngineFacts
from modelswap_engine.backends.external.plain.adopt import Found
from modelswap_engine.backends.external.plain.live import Held, Staged
from modelswap_engine.backends.external.plain.memory import Layout
from modelswap_engine.backends.external.plain.sums import Sums
from modelswap_engine.backends.port import Load, RequestPolicy


@dataclass(frozen=True, kw_only=True)
class Taken:
    """An engine that holds a version, proved.

    Attributes:
        architecture: of the model in it.
        layout: what its checksums depend on besides the bytes.
        found: how its parameters are made, and what they must show.
        live: the checksums that it showed.
    """

    architecture: str
    layout: Layout
    found: Found
    live: Mapping[int, Sums]


class Watching(Protocol):
    """Looks after an engine; see :class:`~modelswap_engine.backends.external.watch.Watch`."""

    def start(self) -> None:
        """Begin; a second time is nothing."""

    async def expect(self, boot_id: str) -> None:
        """From now on the engine is this start; any other is a loss of it."""

    def hurry(self) -> None:
        """Look now."""

    async def stop(self) -> None:
        """End."""


class PlainEngine(Protocol):
    """See the module.

    Attributes:
        name: of the engine, for people.
        undoes: a version that was loaded can be taken back by a load of what it replaced.
    """

    name: str
    undoes: bool

    @property
    def control(self) -> EngineControl:
        """Its control side."""

    def in_use(self) -> Path | None:
        """Return the folder of ours that it may look at still, None for none. Blocks."""

    def watch(self, *, busy: Callable[[], bool], lost: Callable[[], None]) -> Watching:
        """Return what looks after it; ``busy`` says that somebody talks to it, ``lost`` is told once for each loss."""

    async def take(self, order: Load, facts: EngineFacts, *, folder: Path | None) -> Taken:
        """Have it hold a version, in this start of it, with no request and no pause in it.

        Args:
            order: the version.
            facts: what the engine is.
            folder: with the version as it was offered to whoever starts engines; None without such a one.

        Raises:
            UnsupportedChange, Unverifiable: its weights cannot be exchanged by this route, or not be proved.
            ModelswapError: the version's files cannot be read, or it holds something else.
        """

    async def pause(self, policy: RequestPolicy, *, seconds: float) -> None:
        """Have no request run in it until it is resumed, once none is left; with ABORT it ends them first.

        Raises:
            Busy, DrainTimeout: requests were left after ``seconds``.
        """

    async def go_on(self) -> None:
        """Have it answer requests within a pause; it has none, and gets only ours."""

    async def resume(self) -> None:
        """Let it go on, whether it was paused or not."""

    async def exchange(self, folder: Path, wanted: Held) -> bool:
        """Load a folder of ours over what is live, and forget what was cached; then ``wanted`` ought to be live.

        Returns whether the engine says that all went well; else it was found out that the weights did.

        Raises:
            BadRequest: ``wanted`` is not live.
        """

    async def undo(self, staged: Staged) -> None:
        """Put back what an exchange replaced."""

    async def sums(self) -> Mapping[int, Sums]:
        """Ask for the checksums of every rank."""

    async def prove(self, wanted: Held, *, loaded: Staged | None) -> Mapping[int, Sums]:
        """See that a version is live, and have the engine call its weights by its name.

        Args:
            wanted: the version.
            loaded: the exchange that brought it and went well; None where only all checksums can tell.

        Returns the checksums of all parameters where they were read, nothing otherwise.

        Raises:
            DigestMismatch: a parameter is not the version's.
            Unverifiable: nothing contradicts it, but some parameters cannot be seen.
        """

    async def close(self) -> None:
        """Let go of it. Never raises."""
