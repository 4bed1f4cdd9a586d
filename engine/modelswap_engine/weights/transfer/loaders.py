"""Custom weight loaders: code of the operator of this engine that turns what a trainer sends into checkpoint tensors.

A loader is named by its import path and must be on the list that the process was started with; the list is empty by
default, and nothing that arrives over the network can add to it. A loader renames, splits or converts; what it returns
is hashed, checked and staged like everything else.
"""

import importlib
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import torch

from modelswap_engine.protocol.errors import BadRequest, ChecksFailed, UnknownLoader

NamedTensors = Iterable[tuple[str, torch.Tensor]]
WeightLoader = Callable[[NamedTensors], NamedTensors]

_ADVICE: Final = "start the engine with --weight-loader PACKAGE.MODULE:FUNCTION, or send checkpoint tensors as they are"


class WeightLoaders:
    """The loaders of one process.

    Args:
        allowed: import paths, ``package.module:function``.
    """

    def __init__(self, allowed: Sequence[str] = ()) -> None:
        self._allowed = frozenset(allowed)

    def find(self, name: str) -> WeightLoader | None:
        """Return a loader; None for the empty name, which takes tensors as they are.

        Raises:
            UnknownLoader: not on the list.
            BadRequest: on the list, but not importable.
        """
        if not name:
            return None
        if name not in self._allowed:
            raise UnknownLoader(
                f"weight loader {name[:200]!r} is not allowed here", advice=_ADVICE, details={"loader": name[:200]}
            )
        module, _, function = name.partition(":")
        try:
            found: WeightLoader = getattr(importlib.import_module(module), function)
        except (ImportError, AttributeError, ValueError) as error:
            raise BadRequest(
                f"weight loader {name!r} cannot be imported: {error}",
                advice="install its package into the engine's environment, or correct --weight-loader",
                details={"loader": name},
            ) from error
        return found


def converted(loader: WeightLoader, name: str, arrived: NamedTensors) -> list[tuple[str, torch.Tensor]]:
    """Run a loader; whatever it raises is a typed refusal of what was sent.

    Raises:
        ChecksFailed: it failed.
    """
    try:
        return list(loader(arrived))
    except Exception as error:
        raise ChecksFailed(
            f"weight loader {name!r} failed: {type(error).__name__}: {error}",
            advice="send what the loader expects, or correct the loader",
            details={"loader": name},
        ) from error
