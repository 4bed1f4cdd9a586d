"""How runtime parameters are made of checkpoint tensors: the part an engine brings along.

An engine knows how to turn checkpoint tensors into its own parameters (rename, fuse, split, transpose). The core only
needs to know which of them belong together, so that it never updates half of a fused parameter.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch

from modelswap_engine.protocol.errors import IncompatibleModel
from modelswap_engine.weights.live import LiveTable
from modelswap_engine.weights.packed import Packed


@dataclasses.dataclass(frozen=True)
class Part:
    """Checkpoint tensors (``sources``) that the engine turns into runtime tensors (``targets``) in one go.

    A target can be something packed, too.
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]


class Loader(Protocol):
    """An engine's own loading rules."""

    def plan(self, checkpoint: Mapping[str, torch.Tensor]) -> Sequence[Part]:
        """Say what is made of what, given shapes and dtypes as tensors on the meta device.

        Checkpoint tensors that the engine does not read are in no part.
        """

    def slice(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return what this process holds of a checkpoint tensor: itself, or a slice in memory of its own.

        A model can be split over several processes. Everything else here is in terms of what this returned.
        """

    def build(self, part: Part, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor | Packed]:
        """Make the runtime tensors of ``part``; must not touch the live ones."""

    def export(self, part: Part, live: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Give checkpoint tensors back; the names that cannot be had back are missing in the answer."""


@dataclasses.dataclass(frozen=True)
class Group:
    """A fusion group: parts that share runtime memory (tied weights), the unit of every update.

    ``slots`` are the canonical names of the live memory it fills.
    """

    sources: tuple[str, ...]
    parts: tuple[Part, ...]
    slots: tuple[str, ...]

    @property
    def tied(self) -> tuple[str, ...]:
        """The sources that each fill the whole group by themselves, when there are several: they must be equal."""
        alone = all(len(part.sources) == len(part.targets) == 1 for part in self.parts)
        return self.sources if alone and len(self.parts) > 1 and len(self.slots) == 1 else ()


def fuse(parts: Iterable[Part], table: LiveTable) -> tuple[Group, ...]:
    """Join parts that fill the same memory, and check that every slot is filled.

    Raises:
        IncompatibleModel: a part fills memory that the model does not have, or memory is filled by no part.
    """
    joined: list[tuple[list[Part], set[str]]] = []
    home: dict[str, int] = {}
    for part in parts:
        slots = {table.home_of(target) for target in part.targets}
        mine: tuple[list[Part], set[str]] = ([part], slots)
        for index in {home[slot] for slot in slots if slot in home}:
            mine[0].extend(joined[index][0])
            mine[1].update(joined[index][1])
            joined[index] = ([], set())
        joined.append(mine)
        home.update(dict.fromkeys(mine[1], len(joined) - 1))
    missing = sorted(table.homes - home.keys())
    if missing:
        raise IncompatibleModel(
            f"the checkpoint has nothing for parameter {missing[0]} (and {len(missing) - 1} more)",
            advice="the config and the tensors are not of the same model; save the checkpoint again",
            details={"tensor": missing[0], "missing": str(len(missing))},
        )
    groups = (
        Group(
            sources=tuple(sorted(name for part in members for name in part.sources)),
            parts=tuple(sorted(members, key=lambda part: part.sources)),
            slots=tuple(sorted(slots)),
        )
        for members, slots in joined
        if members
    )
    return tuple(sorted(groups, key=lambda group: group.sources))


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Layout:
    """How the tensors of a checkpoint lie in a live module.

    Attributes:
        table: the module's memory.
        loader: the engine's rules.
        shapes: of the checkpoint's tensors, on the meta device.
        groups: what is exchanged together.
        home: the group of each checkpoint tensor.
    """

    table: LiveTable
    loader: Loader
    shapes: Mapping[str, torch.Tensor]
    groups: tuple[Group, ...]
    home: Mapping[str, Group]

    @classmethod
    def of(cls, table: LiveTable, loader: Loader, shapes: Mapping[str, torch.Tensor]) -> "Layout":
        """Work it out.

        Raises:
            IncompatibleModel: see :func:`fuse`.
        """
        groups = fuse(loader.plan(shapes), table)
        home = {name: group for group in groups for name in group.sources}
        return cls(table=table, loader=loader, shapes=shapes, groups=groups, home=home)
