"""The live tensors of one moment as the checkpoint tensors that they were made of.

Of a model that is split over ranks each has parts only; where they belong is asked of the rule that cut them.
"""

import dataclasses
from collections.abc import Mapping
from typing import Protocol

import torch

from modelswap_engine.protocol.errors import IncompatibleModel
from modelswap_engine.weights.hashing import restore_dtype
from modelswap_engine.weights.mapping import Group, Loader, Part
from modelswap_engine.weights.place import Place


class Whole(Protocol):
    """Whatever gives whole checkpoint tensors."""

    @property
    def place(self) -> Place:
        """Where they lie."""

    def tensor(self, name: str) -> torch.Tensor:
        """Return one checkpoint tensor.

        Raises:
            IncompatibleModel: it cannot be had back.
        """


@dataclasses.dataclass(frozen=True, eq=False)
class Extract:
    """What one process holds of a tensor: the ``positions`` along ``dim``; all of it where ``dim`` is None."""

    tensor: torch.Tensor
    dim: int | None
    positions: torch.Tensor


class CheckpointView:
    """Gives checkpoint tensors back one at a time; driven by one thread.

    Args:
        loader: the engine's rules.
        home: the fusion group of every checkpoint name.
        shapes: every checkpoint tensor, on the meta device.
        live: every runtime name's tensor.
        hashes: what every whole checkpoint tensor must hash to.
        digest: of the version.
        place: where they lie.
    """

    def __init__(
        self,
        loader: Loader,
        home: Mapping[str, Group],
        shapes: Mapping[str, torch.Tensor],
        live: Mapping[str, torch.Tensor],
        *,
        hashes: Mapping[str, str],
        digest: str,
        place: Place,
    ) -> None:
        self.place = place
        self.hashes = hashes
        self.digest = digest
        self._loader = loader
        self._home = home
        self._shapes = shapes
        self._live = live
        self._kept: dict[Part, dict[str, torch.Tensor]] = {}

    def tensor(self, name: str) -> torch.Tensor:
        """Return one checkpoint tensor; what was fused with it is kept until it is asked for, too.

        Raises:
            IncompatibleModel: the engine does not hold it as it is in the checkpoint, or this process only a part.
        """
        found = self.held(name)
        if found.shape != self._shapes[name].shape:
            raise _not_had(name)
        return found

    def held(self, name: str) -> torch.Tensor:
        """Return what this process holds of one checkpoint tensor: all of it, or the slice of one rank.

        Raises:
            IncompatibleModel: the engine does not hold it as it is in the checkpoint.
        """
        wanted = self._shapes.get(name)
        with self.place.beside():
            found = self._exported(name)
            original = restore_dtype(found, wanted.dtype) if found is not None and wanted is not None else None
        if original is None:
            raise _not_had(name)
        return original

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a whole checkpoint tensor."""
        return tuple(self._shapes[name].shape)

    def extract(self, name: str) -> Extract:
        """Return what this process holds of one checkpoint tensor, and where in the whole it belongs.

        Raises:
            IncompatibleModel: it cannot be had back, or is cut in a way that cannot be undone.
        """
        part, shape = self.held(name), self.shape(name)
        cut = [dim for dim, extent in enumerate(shape) if part.shape[dim] != extent]
        if not cut:
            return Extract(part, None, torch.empty(0, dtype=torch.int64))
        if len(cut) > 1:
            raise _not_had(name)
        # The rule itself says which positions these are: it is given their numbers to cut.
        numbers = torch.arange(shape[cut[0]]).reshape([-1 if dim == cut[0] else 1 for dim in range(len(shape))])
        return Extract(part, cut[0], self._loader.slice(name, numbers).reshape(-1))

    def _exported(self, name: str) -> torch.Tensor | None:
        if name not in self._home:
            return None
        part = next(part for part in self._home[name].parts if name in part.sources)
        kept = self._kept.pop(part, None)
        if kept is None or name not in kept:
            kept = self._loader.export(part, {target: self._live[target] for target in part.targets})
        found = kept.pop(name, None)
        if kept:
            self._kept[part] = kept
        return found


def _not_had(name: str) -> IncompatibleModel:
    return IncompatibleModel(
        f"tensor {name[:200]!r} cannot be had back from the engine's memory",
        advice="take it from the checkpoint",
        details={"tensor": name[:200]},
    )
