"""The live tensors of one moment as the checkpoint tensors that they were made of."""

from collections.abc import Mapping

import torch

from modelswap_engine.protocol.errors import IncompatibleModel
from modelswap_engine.weights.hashing import restore_dtype
from modelswap_engine.weights.mapping import Group, Loader, Part
from modelswap_engine.weights.place import Place


class CheckpointView:
    """Gives checkpoint tensors back one at a time; driven by one thread.

    Args:
        loader: the engine's rules.
        home: the fusion group of every checkpoint name.
        shapes: every checkpoint tensor, on the meta device.
        live: every runtime name's tensor.
        place: where they lie.
    """

    def __init__(
        self,
        loader: Loader,
        home: Mapping[str, Group],
        shapes: Mapping[str, torch.Tensor],
        live: Mapping[str, torch.Tensor],
        *,
        place: Place,
    ) -> None:
        self.place = place
        self._loader = loader
        self._home = home
        self._shapes = shapes
        self._live = live
        self._kept: dict[Part, dict[str, torch.Tensor]] = {}

    def tensor(self, name: str) -> torch.Tensor:
        """Return one checkpoint tensor; what was fused with it is kept until it is asked for, too.

        Raises:
            IncompatibleModel: the engine does not hold it as it is in the checkpoint.
        """
        wanted = self._shapes.get(name)
        with self.place.beside():
            found = self._exported(name)
            original = restore_dtype(found, wanted.dtype) if found is not None and wanted is not None else None
        # One of another shape is the slice that one rank of several has.
        if original is None or wanted is None or original.shape != wanted.shape:
            raise IncompatibleModel(
                f"tensor {name[:200]!r} cannot be had back from the engine's memory",
                advice="take it from the checkpoint; an engine that splits its model over ranks gives none back",
                details={"tensor": name[:200]},
            )
        return original

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
