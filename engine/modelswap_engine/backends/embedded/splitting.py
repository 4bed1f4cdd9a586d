"""Checkpoint tensors as one rank of a split model sees them: read whole, proven, and cut before the next is read.

It knows the shape of what transformers asks for when it loads, and nothing of how a model is split.
"""

from typing import Any

import torch

from modelswap_engine.backends.port import TensorRange
from modelswap_engine.weights.mapping import Loader
from modelswap_engine.weights.pace import Pace
from modelswap_engine.weights.reader import read_tensor
from modelswap_engine.weights.stage import held_of


class OnDemand:
    """A checkpoint tensor that is read and proven when transformers asks for this rank's part of it.

    So no rank ever holds the whole model. What is cut out is cut twice, by transformers for the model and by the rules
    of every later swap for its hash: when the two differ, the proof that follows each load says so.

    Args:
        item: the tensor.
        rules: cut it.
        hashes: take the hash of the slice, where it is one.
        pace: can call the reading off.
    """

    def __init__(self, item: TensorRange, rules: Loader, hashes: dict[str, str], *, pace: Pace) -> None:
        self._item = item
        self._rules = rules
        self._hashes = hashes
        self._pace = pace

    def get_shape(self) -> list[int]:
        """Return the shape, as a safetensors slice does."""
        return list(self._item.shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Read the whole; return a part of it, in memory of its own."""
        whole = read_tensor(self._item, pace=self._pace)
        self._hashes.update(held_of({self._item.name: whole}, self._rules)[1])
        part: torch.Tensor = whole[index]
        return whole if part.shape == whole.shape else part.clone(memory_format=torch.contiguous_format)
