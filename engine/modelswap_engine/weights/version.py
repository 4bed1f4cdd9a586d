"""The values a swap is made of: sets of runtime tensors that stand for a version, and the change between two.

Plain values; they hold memory but move no pointer.
"""

import dataclasses
from collections.abc import Mapping

import torch

from modelswap_engine.weights.live import LiveTable, pointers_of


@dataclasses.dataclass(frozen=True, eq=False)
class Version:
    """The tensors by which a version differs from the live one, by slot, and their checkpoint hashes by name.

    ``slices`` are the hashes of what this process holds of tensors that are split over several.
    """

    digest: str
    tensors: Mapping[str, torch.Tensor]
    hashes: Mapping[str, str]
    slices: Mapping[str, str] = dataclasses.field(default_factory=dict)


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

    ``forward`` and ``backward`` pair every tensor object that must move with the tensor it moves to; ``old`` is the
    version that comes back, ``older`` what was retained before and comes back as retained.
    """

    staged: Staged
    forward: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    backward: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    before: Mapping[str, tuple[int, ...]]
    after: Mapping[str, tuple[int, ...]]
    old: Version
    older: Version | None


def plan_change(
    table: LiveTable,
    staged: Staged,
    *,
    digest: str,
    hashes: Mapping[str, str],
    slices: Mapping[str, str],
    older: Version | None,
) -> Change:
    """Work out the pointer assignments from the live version (``digest``, ``hashes``, ``slices``) to the staged one."""
    forward: list[tuple[torch.Tensor, torch.Tensor]] = []
    backward: list[tuple[torch.Tensor, torch.Tensor]] = []
    old: dict[str, torch.Tensor] = {}
    before: dict[str, tuple[int, ...]] = {}
    after: dict[str, tuple[int, ...]] = {}
    for name, tensor in staged.version.tensors.items():
        slot = table.slot_of(name)
        old[name] = slot.tensor
        before[name] = pointers_of(slot)
        after[name] = (tensor.data_ptr(),) * len(slot.holders)
        forward += [(holder, tensor) for holder in slot.holders]
        backward += [(holder, old[name]) for holder in slot.holders]
    replaced = {name: hashes[name] for name in staged.version.hashes}
    cut = {name: slices[name] for name in staged.version.slices}
    return Change(
        staged=staged,
        forward=tuple(forward),
        backward=tuple(backward),
        before=before,
        after=after,
        old=Version(digest=digest, tensors=old, hashes=replaced, slices=cut),
        older=older,
    )
