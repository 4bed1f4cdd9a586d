"""What an engine brings along so that its weights can be exchanged inside its process, one implementation for each.

It is asked in the thread in which the engine computes, unless it says otherwise, and knows neither versions nor calls.
"""

from collections.abc import Iterable, Mapping
from typing import Protocol

import torch

from modelswap_engine.backends.inprocess.ways import Ways


class Host(Protocol):
    """One rank's engine."""

    @property
    def rank(self) -> int:
        """This rank, from 0."""

    @property
    def ranks(self) -> int:
        """How many hold one model together."""

    @property
    def software(self) -> str:
        """Name and version of the engine."""

    @property
    def architecture(self) -> str:
        """The model's class, as the checkpoint's config names it."""

    def refusal(self) -> str:
        """Say why weights of this model cannot be exchanged here; "" when they can."""

    def ways(self) -> Ways:
        """Say how tensors become live here, and where they lie; asked only where weights can be exchanged."""

    def adapter_modules(self) -> tuple[str, ...]:
        """Name the modules that LoRA adapters can change, as a checkpoint does; without adapters there are none."""

    def live(self) -> Mapping[str, torch.nn.Module]:
        """Return the modules that the engine computes with, named as in a model without adapters."""

    def skeleton(self) -> torch.nn.Module:
        """Build the model once more, on the meta device, with no effect on the live one."""

    def load(self, skeleton: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Run the engine's own loading of checkpoint tensors into a skeleton; from any thread."""

    def packed_attribute(self, module: torch.nn.Module) -> str:
        """Name the attribute in which a live module has its weight in a form of its own; "" for none."""

    def pack(self, module: torch.nn.Module) -> object:
        """Put the weight of a skeleton's module into that form and return it; from any thread.

        Afterwards the module is in no particular state.
        """

    def unpack(self, packed: object, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Work out the weight that a packed form was made of; only while the engine computes nothing."""

    def wipe(self) -> None:
        """Leave nothing that is not a number among cached keys and values; only while no request holds any.

        A version whose output overflows fills them with that, and where an engine multiplies the unused ends of blocks
        by zero, the next version answers with it.
        """

    def forget(self) -> bool | None:
        """Drop all cached keys and values; False while a request holds any, None where only the engine's routes can."""

    def called(self, digest: str) -> None:
        """What is live was proved to be this version; where this process labels answers, they name it from now on."""

    def settled(self) -> None:
        """All that exchanges need is there and will stay; called once for each version that is taken over."""
