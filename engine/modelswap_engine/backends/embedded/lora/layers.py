"""Applies adapters to their own rows of a packed batch, behind the modules of the base.

A batch is one row of tokens, request after request. Before it runs, the loop says which tokens belong to which adapter;
each hook then adds the adapter's part to those rows of its module's output and leaves every other row as it is, bit
for bit. What a batch needs is kept per thread, because two instances of a model may run at the same time.
"""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from transformers.pytorch_utils import Conv1D

from modelswap_engine.backends.adapters import AdapterTarget
from modelswap_engine.backends.embedded.lora.content import LoadedAdapter, adapters_in

_HEAD: Final = "it is the output head"
_EMBEDDING: Final = "it is an embedding"
_FUSED: Final = "its experts are fused into one parameter"
_OTHER: Final = "it is no linear layer"
_UNSEEN: Final = "it is not computed for every token of a batch"

Rows = slice | torch.Tensor


class _Batch(threading.local):
    """What the batch that this thread runs needs: its rows by adapter, and how many tokens it has."""

    parts: Sequence[tuple[LoadedAdapter, Rows]] = ()
    tokens: int = 0


class _Hook:
    """Adds to the output of one module."""

    def __init__(self, name: str, batch: _Batch) -> None:
        self._name = name
        self._batch = batch

    def __call__(self, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        parts = self._batch.parts
        if not parts:
            return
        given = inputs[0].reshape(-1, inputs[0].shape[-1])
        made = output.view(-1, output.shape[-1])
        for adapter, rows in parts:
            pair = adapter.pairs.get(self._name)
            if pair is None:
                continue
            if isinstance(rows, slice):
                made[rows] += pair.of(given[rows])
            else:
                made.index_add_(0, rows, pair.of(given.index_select(0, rows)))

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Hook":
        return self  # a second instance of the model applies the same adapters


class _Probe:
    """Notes whether a module is computed for every token of a batch."""

    def __init__(self, name: str, batch: _Batch, seen: dict[str, bool]) -> None:
        self._name = name
        self._batch = batch
        self._seen = seen

    def __call__(self, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: object) -> None:
        whole = (
            isinstance(output, torch.Tensor)
            and inputs[0].numel() == self._batch.tokens * inputs[0].shape[-1]
            and output.numel() == self._batch.tokens * output.shape[-1]
        )
        self._seen[self._name] = self._seen.get(self._name, True) and whole


class AdapterLayers:
    """The modules of a model that adapters may change.

    Which they are is found out by watching a first batch (:meth:`probing`): a module that is left out of it, or that
    is computed for some tokens only, cannot be given rows.

    Args:
        model: on its device, in evaluation mode.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._batch = _Batch()
        self._modules: dict[str, torch.nn.Module] = {}
        self.refused: dict[str, str] = {}
        head: Any = getattr(model, "get_output_embeddings", lambda: None)()
        for name, module in model.named_modules():
            why = _why_not(module, head)
            if why:
                self.refused[name] = why
            elif why is not None:
                self._modules[name] = module

    @property
    def modules(self) -> dict[str, torch.nn.Module]:
        """The modules by name."""
        return self._modules

    def targets(self) -> tuple[AdapterTarget, ...]:
        """Return names and sizes of the modules."""
        return tuple(_target(name, module) for name, module in self._modules.items())

    @contextlib.contextmanager
    def probing(self) -> Iterator[None]:
        """Watch the batches that run meanwhile; afterwards adapters can be applied."""
        seen: dict[str, bool] = {}
        handles = [
            module.register_forward_hook(_Probe(name, self._batch, seen)) for name, module in self._modules.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        for name in [name for name in self._modules if not seen.get(name, False)]:
            del self._modules[name]
            self.refused[name] = _UNSEEN
        for name, module in self._modules.items():
            module.register_forward_hook(_Hook(name, self._batch))

    @contextlib.contextmanager
    def batch(self, carried: Sequence[tuple[int, LoadedAdapter | None]]) -> Iterator[None]:
        """Apply adapters to the one batch that this thread runs meanwhile.

        Args:
            carried: how many tokens each request of the batch has in it, in order, and which adapter it uses.
        """
        batch = self._batch
        batch.tokens = sum(rows for rows, _ in carried)
        batch.parts = [(adapter, _rows(numbers, adapter)) for adapter, numbers in adapters_in(carried)]
        try:
            yield
        finally:
            batch.parts, batch.tokens = (), 0


def _rows(numbers: list[int], adapter: LoadedAdapter) -> Rows:
    if numbers[-1] - numbers[0] + 1 == len(numbers):
        return slice(numbers[0], numbers[-1] + 1)
    device = next(iter(adapter.pairs.values())).down.device
    return torch.tensor(numbers, device=device)


def _why_not(module: torch.nn.Module, head: object) -> str | None:
    """Return why adapters cannot change a module, "" when they can, None when it has no weights of its own."""
    own = dict(module.named_parameters(recurse=False))
    if not own:
        return None
    if module is head:
        return _HEAD
    if isinstance(module, torch.nn.Linear | Conv1D):
        return ""
    if isinstance(module, torch.nn.Embedding):
        return _EMBEDDING
    return _FUSED if any(parameter.dim() > 2 for parameter in own.values()) else _OTHER


def _target(name: str, module: torch.nn.Module) -> AdapterTarget:
    rows, columns = module.get_parameter("weight").shape
    # A Conv1D holds its weight the other way round.
    inputs, outputs = (rows, columns) if isinstance(module, Conv1D) else (columns, rows)
    return AdapterTarget(name=name, inputs=inputs, outputs=outputs)
