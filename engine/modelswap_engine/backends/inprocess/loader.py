"""The loading rules of a foreign engine, learnt from its own loading.

It knows a skeleton and what the engine brings along, and decides what belongs together: everything that is made of one
parameter, and everything in a module whose weight is put into a form of the engine's own.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch

from modelswap_engine.backends.inprocess.host import Host
from modelswap_engine.backends.inprocess.skeleton import Landing, Skeleton
from modelswap_engine.backends.inprocess.state import agreed, cell_of, learn, pack
from modelswap_engine.protocol.errors import IncompatibleModel, Internal
from modelswap_engine.weights.finite import check_finite
from modelswap_engine.weights.live import LiveTable
from modelswap_engine.weights.mapping import Part
from modelswap_engine.weights.packed import Packed


class SkeletonLoader:
    """The rules of one model; see :class:`~modelswap_engine.weights.mapping.Loader`.

    Args:
        host: the engine.
        skeleton: its model without memory.
    """

    def __init__(self, host: Host, skeleton: Skeleton) -> None:
        self._host = host
        self._skeleton = skeleton
        self._modules = host.live()
        self._cells = self._find_cells()
        self._tensors = self._find_tensors()
        self._landings: dict[str, tuple[Landing, ...]] = {}
        cells = {
            cell: cell_of(host, self._live(module), attribute, skeleton.parameters[weight])
            for cell, (module, attribute, weight) in self._cells.items()
        }
        self.table = LiveTable(self._tensors, cells)
        """What versions of the live model differ in, under the names of the skeleton."""

    def _find_cells(self) -> dict[str, tuple[str, str, str]]:
        """Return cell → (module, attribute, name of the weight that it is made of)."""
        found: dict[str, tuple[str, str, str]] = {}
        for weight, holders in self._skeleton.holders.items():
            for holder in holders:
                attribute = self._host.packed_attribute(self._live(holder.name)) if holder.key == "weight" else ""
                if attribute:
                    found[f"{holder.name}.{attribute}".lstrip(".")] = (holder.name, attribute, weight)
        return found

    def _find_tensors(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for name, holders in self._skeleton.holders.items():
            packed = any(weight == name for _, _, weight in self._cells.values())
            for holder in holders:
                live = self._live(holder.name)._parameters.get(holder.key)
                if live is None:
                    raise _strange(name, "the live model has no such parameter")
                if packed and live.numel() == 0 and self._skeleton.parameters[name].numel():
                    continue  # the engine has let go of it
                if live.shape != self._skeleton.parameters[name].shape:
                    raise _strange(name, f"the live one has shape {list(live.shape)}")
                found[holder.path] = live
        return found

    def _live(self, name: str) -> torch.nn.Module:
        module = self._modules.get(name)
        if module is None:
            raise _strange(name, "the live model has no such module")
        return module

    def plan(self, checkpoint: Mapping[str, torch.Tensor]) -> Sequence[Part]:
        """Say what is made of what, as the engine's own loading of tensors without memory shows it."""
        self._landings = {name: found for name, found in self._skeleton.trace(checkpoint).items() if found}
        units = _Units()
        for name, holders in self._skeleton.holders.items():
            for holder in holders:
                units.join(name, *self._in_unit(holder.name, name))
        for found in self._landings.values():
            units.join(*(landing.target for landing in found))
        sources: dict[str, list[str]] = {}
        for name, found in self._landings.items():
            sources.setdefault(units.of(found[0].target), []).append(name)
        filled = {landing.target for found in self._landings.values() for landing in found}
        return [
            Part(sources=tuple(names), targets=self._targets(units.members(unit), filled))
            for unit, names in sources.items()
        ]

    def _in_unit(self, module: str, parameter: str) -> Iterable[str]:
        """Return what is made together with a parameter because one module of it has a packed weight."""
        if not any(owner == module for owner, _, _ in self._cells.values()):
            return ()
        names = {id(value): name for name, value in self._skeleton.parameters.items()}
        own = next(h.module for h in self._skeleton.holders[parameter] if h.name == module)
        return [names[id(value)] for value in own._parameters.values() if value is not None]

    def _targets(self, parameters: Sequence[str], filled: set[str]) -> tuple[str, ...]:
        for name in parameters:
            if name not in filled:
                raise IncompatibleModel(
                    f"the checkpoint has nothing for parameter {name}",
                    advice="the config and the tensors are not of the same model; save the checkpoint again",
                    details={"tensor": name},
                )
        cells = [cell for cell, (_, _, weight) in self._cells.items() if weight in parameters]
        return (*(name for name in parameters if name in self._tensors), *cells)

    def slice(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the whole tensor: the engine's own loading takes this rank's part of it."""
        return tensor

    def build(self, part: Part, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor | Packed]:
        """Make the runtime tensors of a part, and what the engine makes of them for its kernels."""
        names = sorted({landing.target for source in part.sources for landing in self._landings[source]})
        device = next(iter(tensors.values())).device
        made: dict[str, torch.Tensor | Packed] = {}
        with self._skeleton.lend(names, device) as lent:
            self._skeleton.load([(source, tensors[source]) for source in part.sources])
            for name, parameter in lent.items():
                _check_filled(name, parameter)
                if name in part.targets:
                    made[name] = _plain(parameter)
            for cell in part.targets:
                if cell in self._cells:
                    module, _, weight = self._cells[cell]
                    holder = next(h for h in self._skeleton.holders[weight] if h.name == module)
                    made[cell] = pack(self._host, holder.module, _plain(lent[weight]))
        return made

    def packs(self, part: Part) -> bool:
        """Say whether the engine puts something of a part into a form of its own."""
        return not self._cells.keys().isdisjoint(part.targets)

    def learn(self, part: Part, tensors: Mapping[str, torch.Tensor]) -> None:
        """Remember what the engine's own packed values of a part were made of, given the live version's tensors."""
        weights = {self._cells[cell][2]: cell for cell in part.targets if cell in self._cells}
        with self._skeleton.lend(weights, next(iter(tensors.values())).device) as lent:
            sources = [name for name in part.sources if any(at.target in weights for at in self._landings[name])]
            self._skeleton.load([(name, tensors[name]) for name in sources])
            for cell in part.targets:
                if cell in self._cells:
                    learn(self._host, self.table.cells[cell], _plain(lent[self._cells[cell][2]]))

    def export(self, part: Part, live: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Give back the checkpoint tensors that lie somewhere as a whole.

        Where the engine has a weight twice, as a tensor and in its own form, what differs comes back as NaN.
        """
        found: dict[str, torch.Tensor] = {}
        weights: dict[str, torch.Tensor] = {}
        for source in part.sources:
            landing = next((landing for landing in self._landings[source] if landing.whole), None)
            if landing is None:
                continue
            if landing.target not in weights:
                weights[landing.target] = self._weight(landing.target, live)
            if weights[landing.target].is_contiguous():
                found[source] = landing.of(weights[landing.target])
        return found

    def _weight(self, name: str, live: Mapping[str, torch.Tensor]) -> torch.Tensor:
        copies = [live[cell] for cell, (_, _, weight) in self._cells.items() if weight == name]
        if name in self._tensors:
            copies.insert(0, live[name])
        return agreed(copies)


class _Units:
    """Names that belong together."""

    def __init__(self) -> None:
        self._unit: dict[str, list[str]] = {}

    def join(self, first: str, *others: str) -> None:
        unit = self._unit.setdefault(first, [first])
        for name in others:
            theirs = self._unit.setdefault(name, [name])
            if theirs is not unit:
                unit.extend(theirs)
                self._unit.update(dict.fromkeys(theirs, unit))

    def of(self, name: str) -> str:
        return self._unit[name][0]

    def members(self, name: str) -> Sequence[str]:
        return self._unit[name]


def _plain(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.detach().as_subclass(torch.Tensor)


def _check_filled(name: str, parameter: torch.Tensor) -> None:
    try:
        check_finite(name, parameter)
    except Exception as error:
        raise Internal(
            f"the engine's own loading has left a part of parameter {name} as it was",
            advice="this is a defect of the loading rules of this architecture; change its weights with a restart",
            details={"tensor": name},
        ) from error


def _strange(name: str, why: str) -> IncompatibleModel:
    return IncompatibleModel(
        f"{name}: {why}, where a fresh instance of the model's class has one",
        advice="something changes the engine's model after it was built; change its weights with a restart",
        details={"tensor": name},
    )
