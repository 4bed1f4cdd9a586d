"""One adapter in runtime layout, read once and never changed: a request that holds it computes with it to its end."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from modelswap_engine.backends.adapters import AdapterModule, LoadAdapter
from modelswap_engine.weights.finite import check_finite
from modelswap_engine.weights.pace import Pace
from modelswap_engine.weights.reader import read_tensor


@dataclasses.dataclass(frozen=True, eq=False)
class Pair:
    """What is added to one module: x → (x · down) · up, the scaling is in ``up``."""

    down: torch.Tensor
    up: torch.Tensor

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        """Return what is added to the module's outputs for these inputs."""
        return torch.nn.functional.linear(torch.nn.functional.linear(rows, self.down), self.up)


@dataclasses.dataclass(frozen=True, eq=False)
class LoadedAdapter:
    """An adapter as it is applied; ``pairs`` by the name of the module."""

    adapter_id: str
    digest: str
    pairs: Mapping[str, Pair]

    @property
    def nbytes(self) -> int:
        """Bytes of its matrices."""
        return sum(pair.down.nbytes + pair.up.nbytes for pair in self.pairs.values())

    def on(self, device: torch.device) -> "LoadedAdapter":
        """Return it on a device; itself when it is there."""
        if all(pair.down.device == device for pair in self.pairs.values()):
            return self
        pairs = {name: Pair(down=pair.down.to(device), up=pair.up.to(device)) for name, pair in self.pairs.items()}
        return LoadedAdapter(adapter_id=self.adapter_id, digest=self.digest, pairs=pairs)

    def __deepcopy__(self, memo: dict[int, Any]) -> "LoadedAdapter":
        # It is carried by requests, and the loop copies what a request carries when it starts it anew.
        return self


def read_adapter(order: LoadAdapter, modules: Mapping[str, torch.nn.Module], *, pace: Pace) -> LoadedAdapter:
    """Read the matrices of an adapter into host memory, each proven by hash and finite, in the dtype of its module.

    Raises:
        ModelswapError: see :mod:`modelswap_engine.weights.reader`.
    """
    pairs = {item.target: _read_pair(item, modules[item.target], pace=pace) for item in order.modules}
    return LoadedAdapter(adapter_id=order.adapter_id, digest=order.digest, pairs=pairs)


def _read_pair(item: AdapterModule, module: torch.nn.Module, *, pace: Pace) -> Pair:
    weight = module.get_parameter("weight")
    down = read_tensor(item.a, pace=pace)
    up = read_tensor(item.b, pace=pace).float() * item.scaling
    return Pair(down=_ready(item.a.name, down, weight), up=_ready(item.b.name, up, weight))


def _ready(name: str, tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    ready = tensor.to(dtype=like.dtype).contiguous()
    check_finite(name, ready)  # scaled, and in the model's dtype, it may be too large
    return ready


def adapters_in(carried: Sequence[tuple[int, LoadedAdapter | None]]) -> list[tuple[LoadedAdapter, list[int]]]:
    """Return which rows of a batch each adapter computes, given (rows, adapter) of its requests in order."""
    found: dict[int, tuple[LoadedAdapter, list[int]]] = {}
    begin = 0
    for rows, adapter in carried:
        if adapter is not None:
            found.setdefault(id(adapter), (adapter, []))[1].extend(range(begin, begin + rows))
        begin += rows
    return list(found.values())
