"""The port of what lives on the base and changes with it: LoRA adapters.

A swap asks before it touches anything whether they go along, and a whole load brings them back. The other side of the
port is :class:`Base`: what companions may know of the engine. Neither knows the other's inside.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from modelswap_engine.protocol.adapters import AdapterChange, AdapterRegistry
from modelswap_engine.protocol.assignment import Assignment
from modelswap_engine.protocol.errors import Refused
from modelswap_engine.protocol.messages import VersionRef
from modelswap_engine.swap.records import Assigned, Record, Registered


class Base(Protocol):
    """The base that companions live on."""

    stopping: bool

    def live_ref(self) -> VersionRef | None:
        """Return the version that serves, None when none does."""

    @property
    def etag(self) -> str:
        """The entity tag of the state, quotes included."""

    @property
    def epoch(self) -> int:
        """The highest lease epoch of a leader that was obeyed here."""

    @property
    def registrations(self) -> Mapping[str, Registered]:
        """What the journal remembers of adapters, by name."""

    @property
    def assigned(self) -> Assigned | None:
        """The assignment of adapters that the journal remembers."""

    async def assignment(self) -> Assignment | None:
        """Read the assignment file; None where there is none.

        Raises:
            BadRequest: it cannot be read.
        """

    def touch(self) -> None:
        """Something visible changed."""

    async def record_owed(self, *records: Record) -> None:
        """Write what has happened to the journal, now or before anything else is written."""


@dataclass(frozen=True, kw_only=True)
class Effect:
    """What a change of the base would do to what lives on it, in lines for people, and why it would be refused."""

    refusals: tuple[Refused, ...] = ()
    changes: tuple[str, ...] = ()


NO_EFFECT: Final = Effect()


class Companion(Protocol):
    """Whatever lives on the base.

    A swap calls ``assess``, ``stage`` and ``seal`` while the old base serves, and ``settle`` at its end whatever became
    of it. ``seal`` and ``activate`` are instant.
    """

    def attach(self, base: Base) -> None:
        """Learn which base this is; called once, before anything else."""

    def view(self) -> AdapterRegistry | None:
        """Return what is published of it."""

    async def restore(self, base: VersionRef) -> None:
        """A whole base was loaded and nothing else is in the engine: bring back what belongs to this one.

        Never fails: what cannot be brought back says so in its own state.
        """

    async def assess(self, change: AdapterChange, *, target: VersionRef) -> Effect:
        """Say what a change of the base to ``target`` would do; nothing is touched.

        Raises:
            BadRequest, Unavailable: it cannot be said.
        """

    async def adopt(self, change: AdapterChange, *, target: VersionRef) -> None:
        """No base is live: what is asked for is to be restored with the one that is about to be loaded.

        Raises:
            SignatureInvalid: its policy and the base's leave nobody who could vouch for it.
        """

    async def stage(self, operation_id: str, change: AdapterChange, *, target: VersionRef) -> None:
        """Bring what belongs to the new base beside what serves.

        Raises:
            ModelswapError: it cannot be had.
        """

    def seal(self) -> None:
        """The base is about to change: the last moment to refuse.

        Raises:
            Refused: something lives here that cannot live on the new base.
        """

    def activate(self, digest: str) -> None:
        """This base serves from now on: what was staged for it, or again what was there before. Never fails."""

    async def settle(self) -> None:
        """The swap has ended: keep what serves, give the rest back. Never fails."""

    async def stop(self) -> None:
        """End what goes on in the background."""


class Alone:
    """Nothing lives on the base."""

    def attach(self, base: Base) -> None:
        """Nothing to do."""

    def view(self) -> AdapterRegistry | None:
        """Nothing to show."""
        return None

    async def restore(self, base: VersionRef) -> None:
        """Nothing to bring back."""

    async def assess(self, change: AdapterChange, *, target: VersionRef) -> Effect:
        """Nothing is affected."""
        return NO_EFFECT

    async def adopt(self, change: AdapterChange, *, target: VersionRef) -> None:
        """Nothing to restore."""

    async def stage(self, operation_id: str, change: AdapterChange, *, target: VersionRef) -> None:
        """Nothing to stage."""

    def seal(self) -> None:
        """Nothing to refuse."""

    def activate(self, digest: str) -> None:
        """Nothing to switch."""

    async def settle(self) -> None:
        """Nothing to give back."""

    async def stop(self) -> None:
        """Nothing to end."""
