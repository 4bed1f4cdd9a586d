"""The values a swap is made of: sets of runtime tensors that stand for a version, and the change between two.

Plain values; they hold memory, and know how a change is carried out, but not when.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum

import torch

from modelswap_engine.weights.live import LiveTable, pointers_of
from modelswap_engine.weights.packed import Packed
from modelswap_engine.weights.proof import Known


class Method(StrEnum):
    """How tensors become live.

    ``POINTER`` moves the parameters to the new memory: microseconds, whatever the size. ``COPY`` writes the new values
    into the memory that is there: the only way where captured graphs or compiled code hold its addresses.
    """

    POINTER = "pointer"
    COPY = "copy"


Assignment = Callable[[], object]
"""Changes one tensor, or one packed value, into what it becomes."""


@dataclasses.dataclass(frozen=True, eq=False)
class Version:
    """The tensors by which a version differs from the live one, by slot, and what is known of their hashes.

    ``packed`` is what the engine computes with in place of tensors, by cell.
    """

    digest: str
    tensors: Mapping[str, torch.Tensor]
    known: Known
    packed: Mapping[str, Packed] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, eq=False)
class Staged:
    """A version in runtime layout beside the live one. ``retained`` means that nothing had to be read for it."""

    operation_id: str
    version: Version
    keep_previous: bool
    fetched_bytes: int = 0
    retained: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Change:
    """A commit and its exact inverse, worked out before the pause.

    ``forward`` and ``backward`` are all that must be assigned; ``old`` is the version that comes back, ``older`` what
    was retained before and comes back as retained. With ``COPY`` the values of ``old`` have been saved beside the live
    ones.
    """

    staged: Staged
    method: Method
    forward: tuple[Assignment, ...]
    backward: tuple[Assignment, ...]
    before: Mapping[str, tuple[int, ...]]
    after: Mapping[str, tuple[int, ...]]
    old: Version
    older: Version | None

    def apply(self, assignments: Iterable[Assignment], midway: Callable[[], None] = lambda: None) -> None:
        """Assign; ``midway`` is called after the first one."""
        for number, assign in enumerate(assignments):
            assign()
            if number == 0:
                midway()


def plan_change(
    table: LiveTable,
    staged: Staged,
    *,
    method: Method,
    digest: str,
    known: Known,
    older: Version | None,
) -> Change:
    """Work out the assignments from the live version to the staged one.

    Of the live one ``digest`` is the identity, and ``known`` what the tensors hash to that are replaced.
    """
    forward: list[Assignment] = []
    backward: list[Assignment] = []
    old: dict[str, torch.Tensor] = {}
    before: dict[str, tuple[int, ...]] = {}
    after: dict[str, tuple[int, ...]] = {}
    for name, tensor in staged.version.tensors.items():
        slot = table.slot_of(name)
        before[name] = after[name] = pointers_of(slot)
        if method is Method.COPY:
            old[name] = slot.tensor.clone()
            forward.append(functools.partial(slot.tensor.copy_, tensor))
            backward.append(functools.partial(slot.tensor.copy_, old[name]))
            continue
        old[name] = slot.tensor
        after[name] = (tensor.data_ptr(),) * len(slot.holders)
        forward += [functools.partial(setattr, holder, "data", tensor) for holder in slot.holders]
        backward += [functools.partial(setattr, holder, "data", old[name]) for holder in slot.holders]
    cells = {name: table.cells[name] for name in staged.version.packed}
    forward += [functools.partial(cell.assign, staged.version.packed[name]) for name, cell in cells.items()]
    backward += [functools.partial(cell.assign, cell.live) for cell in cells.values()]
    return Change(
        staged=staged,
        method=method,
        forward=tuple(forward),
        backward=tuple(backward),
        before=before,
        after=after,
        old=Version(digest=digest, tensors=old, known=known, packed={name: cell.live for name, cell in cells.items()}),
        older=older,
    )
