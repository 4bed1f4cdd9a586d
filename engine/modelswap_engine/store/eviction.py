"""Which blobs go when room is wanted: those that nobody holds, the longest unused first. Pure."""

from collections.abc import Collection, Mapping

import msgspec


class Blob(msgspec.Struct, frozen=True, kw_only=True):
    """A blob that is there: its size in bytes, and a number that is higher the later it was used."""

    nbytes: int
    used: int


def evict(blobs: Mapping[str, Blob], *, held: Collection[str], excess: int) -> tuple[str, ...]:
    """Return which blobs to remove so that ``excess`` bytes go, or all that nobody holds when that is not enough."""
    gone: list[str] = []
    for name in sorted(blobs.keys() - set(held), key=lambda name: blobs[name].used):
        if excess <= 0:
            break
        gone.append(name)
        excess -= blobs[name].nbytes
    return tuple(gone)
