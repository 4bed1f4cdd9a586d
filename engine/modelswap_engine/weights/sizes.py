"""What the versions in a process hold in bytes. Memory that several of them share is counted once, for the first."""

from dataclasses import dataclass

from modelswap_engine.weights.live import LiveTable, storages
from modelswap_engine.weights.packed import held
from modelswap_engine.weights.transfer.inbox import Inbox
from modelswap_engine.weights.version import Change, Staged, Version


@dataclass(frozen=True)
class Sizes:
    """Bytes held by the live, the staged and the retained version; shared memory is counted once."""

    live: int
    staged: int
    previous: int


def sizes_of(
    table: LiveTable,
    *,
    previous: Version | None,
    staged: Staged | None,
    prepared: Change | None,
    applied: Change | None,
    arrived: Inbox,
) -> Sizes:
    """Return the sizes.

    Args:
        table: what is live.
        previous: what is retained.
        staged: what is staged.
        prepared: the change that makes it live.
        applied: the change that was made last, as long as it can be undone.
        arrived: tensors that a trainer has sent.
    """
    live = storages(slot.tensor for slot in table.slots.values())
    live |= held(cell.live for cell in table.cells.values())
    retained = _held(previous, applied.older if applied else None)
    beside = _held(
        staged.version if staged else None,
        prepared.old if prepared else None,
        applied.staged.version if applied else None,
    )
    # A version that came back is live: what undoes its return must not be counted as if it held it once more.
    retained = {place: size for place, size in retained.items() if place not in live}
    extra = sum(size for place, size in beside.items() if place not in live and place not in retained)
    return Sizes(live=sum(live.values()), staged=extra + arrived.nbytes, previous=sum(retained.values()))


def _held(*versions: Version | None) -> dict[int, int]:
    there = [version for version in versions if version is not None]
    return storages(tensor for version in there for tensor in version.tensors.values()) | held(
        packed for version in there for packed in version.packed.values()
    )
