"""What is measured before engines of others. Seconds and bytes where nothing else is said."""

from __future__ import annotations

from typing import Final

import msgspec

FULL: Final = "full load"
RESTART: Final = "restart"
IN_PROCESS: Final = "in-process"
PLAIN: Final = "plain"
TENTH: Final = "a tenth"
ALL: Final = "all"


class FirstTokenRow(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Seconds to the first token with so many streams at a time; medians over all requests of all turns."""

    streams: int
    requests: int
    direct: float
    through: float

    @property
    def added(self) -> float:
        """What the proxy adds, in seconds."""
        return self.through - self.direct


class DoorRow(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One stream of tokens out of a real engine, straight and through the sidecar; ``kept`` is the median over turns.

    ``rss`` is the memory of the sidecar's process in bytes, after it.
    """

    engine: str
    model: str
    turns: int
    direct: float
    through: float
    kept: float
    rss: int


class RouteRow(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One change by one route; medians, seconds.

    Attributes:
        closed: how long no request was let in.
        commit_microseconds: within it, until the new tensors were live; 0 where the route cannot tell.
        total: from the order to the new version's first request.
    """

    engine: str
    model: str
    nbytes: int
    route: str
    change: str
    changed_bytes: int
    swaps: int
    closed: float
    total: float
    commit_microseconds: float = 0.0


class BesideRow(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Tokens per second of some clients, alone and while the whole model is staged in the engine again and again."""

    engine: str
    model: str
    turns: int
    alone: float
    beside: float
    kept: float
