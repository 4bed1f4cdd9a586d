"""The engine's model once more, without memory: what the engine's own loading is let loose on, instead of the live one.

Two things are learnt from it. Where a checkpoint tensor ends up is seen by loading tensors without memory and watching
the copies that the engine makes: so the rules are the engine's, not a second version of them. And what a tensor becomes
is made by lending memory to just the parameters that it reaches. It knows no checkpoint, no hash and no version.
"""

import contextlib
import dataclasses
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from modelswap_engine.protocol.errors import IncompatibleModel, ModelswapError

Load = Callable[[torch.nn.Module, Iterable[tuple[str, torch.Tensor]]], None]


@dataclasses.dataclass(frozen=True)
class Landing:
    """One copy of a checkpoint tensor into a parameter: the region that it fills, in elements of the parameter.

    ``whole`` means that all of the tensor went there as it is: it can be had back by looking at the region.
    """

    target: str
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    whole: bool

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the region of a tensor that lies as the parameter does."""
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)


@dataclasses.dataclass(frozen=True)
class Holder:
    """A module that has a parameter, under this key."""

    name: str
    module: torch.nn.Module
    key: str

    @property
    def path(self) -> str:
        """The parameter's name by way of this module."""
        return f"{self.name}.{self.key}" if self.name else self.key


class Skeleton:
    """A model on the meta device.

    Args:
        module: the model; nobody else may touch it.
        load: the engine's own loading into it.

    Raises:
        IncompatibleModel: it has memory.
    """

    def __init__(self, module: torch.nn.Module, load: Load) -> None:
        self.module = module
        self._load = load
        # A thread that was called off may still be at it when the next one begins.
        self._lock = threading.RLock()
        self.parameters: dict[str, torch.nn.Parameter] = dict(module.named_parameters())
        _check_without_memory(self.parameters)
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        self.holders: dict[str, list[Holder]] = {name: [] for name in self.parameters}
        for prefix, part in module.named_modules():
            for key, parameter in part._parameters.items():
                if parameter is not None:
                    self.holders[names[id(parameter)]].append(Holder(prefix, part, key))

    def trace(self, checkpoint: Mapping[str, torch.Tensor]) -> dict[str, tuple[Landing, ...]]:
        """Load tensors without memory, one at a time, and say where each went; nowhere is an answer, too.

        Raises:
            IncompatibleModel: the engine refuses one.
        """
        homes = {parameter.untyped_storage()._cdata: name for name, parameter in self.parameters.items()}
        found: dict[str, tuple[Landing, ...]] = {}
        for name, tensor in checkpoint.items():
            with self._lock, _Watch(homes, tensor) as watch:
                self.load([(name, tensor)])
            found[name] = tuple(watch.landings)
        return found

    def load(self, weights: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Run the engine's loading.

        Raises:
            IncompatibleModel: the engine refuses the tensors.
        """
        try:
            self._load(self.module, weights)
        except ModelswapError:
            raise
        except Exception as error:
            first = str(error).strip().partition("\n")[0] or type(error).__name__
            raise IncompatibleModel(
                f"the engine's own loading refuses tensor {weights[0][0]} (and {len(weights) - 1} with it): {first}",
                advice="the version is of another architecture or size; deploy it with a restart",
                details={"tensor": weights[0][0]},
            ) from error

    @contextlib.contextmanager
    def lend(self, names: Iterable[str], device: torch.device) -> Iterator[dict[str, torch.nn.Parameter]]:
        """Give memory to some parameters, and take it back; what is not loaded into it shows as NaN."""
        lent: dict[str, torch.nn.Parameter] = {}
        with self._lock:
            try:
                for name in names:
                    lent[name] = _with_memory(self.parameters[name], device)
                    self._hang(name, lent[name])
                yield lent
            finally:
                for name in lent:
                    self._hang(name, self.parameters[name])

    def _hang(self, name: str, parameter: torch.nn.Parameter) -> None:
        for holder in self.holders[name]:
            holder.module._parameters[holder.key] = parameter


def _check_without_memory(parameters: Mapping[str, torch.nn.Parameter]) -> None:
    for name, parameter in parameters.items():
        if not parameter.is_meta:
            raise IncompatibleModel(
                f"{name}: the model's class takes memory on {parameter.device} for it, also where it is told not to",
                advice="something makes tensors past torch's device context; change its weights with a restart",
                details={"tensor": name},
            )


def _with_memory(parameter: torch.nn.Parameter, device: torch.device) -> torch.nn.Parameter:
    fill = math.nan if parameter.is_floating_point() else 0
    raw = torch.full(parameter.shape, fill, dtype=parameter.dtype, device=device)
    # Engines hang their loading rules on a parameter, and have classes of parameters.
    made: torch.nn.Parameter = torch.Tensor._make_subclass(type(parameter), raw, False)
    made.__dict__.update(parameter.__dict__)
    return made


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Notes the copies into parameters that are made in this thread while it is entered."""

    def __init__(self, homes: Mapping[int, str], source: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._homes = homes
        self._source = source
        self.landings: list[Landing] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self._note(args[0], args[1])
        return func(*args, **(kwargs or {}))

    def _note(self, target: torch.Tensor, value: torch.Tensor) -> None:
        name = self._homes.get(target.untyped_storage()._cdata)
        if name is None:
            return
        source = self._source
        same = value.untyped_storage()._cdata == source.untyped_storage()._cdata
        whole = same and value.numel() == source.numel() and value.storage_offset() == 0 and value.is_contiguous()
        self.landings.append(
            Landing(
                target=name,
                offset=int(target.storage_offset()),
                size=tuple(target.shape),
                stride=target.stride(),
                whole=bool(whole and target.shape == source.shape),
            )
        )
