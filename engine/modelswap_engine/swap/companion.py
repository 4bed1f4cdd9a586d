"""The port of what lives on the base and changes with it: LoRA adapters.

A swap asks before it touches anything whether they go along, and a whole load brings them back. The other side of the
port is :class:`Base`: what companions may know of the engine. Neither knows the other's inside.
"""

from collections.abc import Mapping
from typing import Protocol

from modelswap_engine.protocol.adapters import AdapterRegistry
from modelswap_engine.protocol.messages import VersionRef
from modelswap_engine.swap.records import Record, Registered


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

    def touch(self) -> None:
        """Something visible changed."""

    async def record_owed(self, *records: Record) -> None:
        """Write what has happened to the journal, now or before anything else is written."""


class Companion(Protocol):
    """Whatever lives on the base."""

    def attach(self, base: Base) -> None:
        """Learn which base this is; called once, before anything else."""

    def view(self) -> AdapterRegistry | None:
        """Return what is published of it."""

    async def restore(self, digest: str) -> None:
        """A whole base was loaded and nothing else is in the engine: bring back what belongs to this one.

        Never fails: what cannot be brought back says so in its own state.
        """

    async def stop(self) -> None:
        """End what goes on in the background."""


class Alone:
    """Nothing lives on the base."""

    def attach(self, base: Base) -> None:
        """Nothing to do."""

    def view(self) -> AdapterRegistry | None:
        """Nothing to show."""
        return None

    async def restore(self, digest: str) -> None:
        """Nothing to bring back."""

    async def stop(self) -> None:
        """Nothing to end."""
