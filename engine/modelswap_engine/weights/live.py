"""The live tensors of a module: which names share memory, and how their pointers are changed.

One slot is one piece of memory. Tied weights are one slot with several names; where a module keeps several tensor
objects over the same memory, all of them are moved together. Built once, before any pause, so that the commit window
holds nothing but assignments.
"""

import dataclasses
from collections.abc import Iterable, Mapping

import torch

from modelswap_engine.protocol.errors import IncompatibleModel
from modelswap_engine.weights.packed import Cell


@dataclasses.dataclass(frozen=True, eq=False)
class Slot:
    """One piece of live memory. ``holders`` are the distinct tensor objects over it, ``names`` all their names."""

    name: str
    names: tuple[str, ...]
    holders: tuple[torch.Tensor, ...]

    @property
    def tensor(self) -> torch.Tensor:
        """The live tensor, detached from its parameter: it stays what it is when the pointer moves."""
        return self.holders[0].detach()


class LiveTable:
    """All parameters and persistent buffers of a module, by memory.

    Args:
        module: the module, or those of its tensors by name that versions differ in.
        cells: where the engine looks for packed values, by a name for each.
    """

    def __init__(
        self, module: torch.nn.Module | Mapping[str, torch.Tensor], cells: Mapping[str, Cell] | None = None
    ) -> None:
        self.cells = dict(cells or {})
        found: dict[object, dict[str, torch.Tensor]] = {}
        for name, tensor in (_state(module) if isinstance(module, torch.nn.Module) else module).items():
            found.setdefault(_memory(name, tensor), {})[name] = tensor
        self.slots: dict[str, Slot] = {}
        self._by_name: dict[str, Slot] = {}
        for members in found.values():
            distinct = {id(tensor): tensor for tensor in members.values()}
            slot = Slot(name=next(iter(members)), names=tuple(members), holders=tuple(distinct.values()))
            self.slots[slot.name] = slot
            self._by_name.update(dict.fromkeys(members, slot))

    def slot_of(self, name: str) -> Slot:
        """Return the slot behind any of its names.

        Raises:
            IncompatibleModel: the model has no such parameter or buffer.
        """
        try:
            return self._by_name[name]
        except KeyError:
            raise IncompatibleModel(
                f"the model has no parameter {name}",
                advice="the checkpoint is of another architecture; deploy it with a restart",
                details={"tensor": name},
            ) from None

    def home_of(self, name: str) -> str:
        """Return the name under which a parameter, a buffer or a packed value is changed.

        Raises:
            IncompatibleModel: the model has none of this name.
        """
        return name if name in self.cells else self.slot_of(name).name

    @property
    def homes(self) -> frozenset[str]:
        """All of these names."""
        return frozenset(self.slots) | frozenset(self.cells)

    def check(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a runtime tensor as it can be put into the slot ``name``: same shape, dtype and device, contiguous.

        Raises:
            IncompatibleModel: the shape differs.
        """
        live = self.slot_of(name).holders[0]
        if tensor.shape != live.shape:
            raise IncompatibleModel(
                f"parameter {name} has shape {list(live.shape)}, the checkpoint gives {list(tensor.shape)}",
                advice="the version is of another size or architecture; deploy it with a restart",
                details={"tensor": name, "expected": str(list(live.shape)), "actual": str(list(tensor.shape))},
            )
        return tensor.to(device=live.device, dtype=live.dtype).contiguous()

    def pointers(self) -> dict[str, tuple[int, ...]]:
        """Return where every holder of every slot points: the identity that verification compares."""
        return {name: pointers_of(slot) for name, slot in self.slots.items()}


def pointers_of(slot: Slot) -> tuple[int, ...]:
    """Return where the holders of a slot point now."""
    return tuple(holder.data_ptr() for holder in slot.holders)


def storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Return address → bytes of the memory that tensors keep alive; views of one storage are one."""
    return {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in tensors
        if tensor.device.type != "meta"
    }


def _state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    persistent = module.state_dict(keep_vars=True)
    return {name: _own(tensor) for name, tensor in persistent.items() if isinstance(tensor, torch.Tensor)}


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that a process computes with: of one that is split over several, the part inside it."""
    inside: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return inside


def _memory(name: str, tensor: torch.Tensor) -> object:
    # Empty and meta tensors have no address; then only the same object is the same memory.
    if tensor.data_ptr() == 0:
        return id(tensor)
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
