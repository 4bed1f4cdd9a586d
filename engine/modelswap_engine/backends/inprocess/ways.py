"""How tensors become live in an engine, and where they lie; follows from how it was started."""

from dataclasses import dataclass

import torch

from modelswap_engine.backends.inprocess.experimental import Experiment
from modelswap_engine.weights.cuda import CudaCopies
from modelswap_engine.weights.place import HOST, OnDevice, Place
from modelswap_engine.weights.version import Method


@dataclass(frozen=True, kw_only=True)
class Ways:
    """How tensors become live in an engine, and where they lie."""

    method: Method = Method.POINTER
    place: Place = HOST


def ways(*, device: torch.device, holds_addresses: bool, experiments: frozenset[Experiment]) -> Ways:
    """Return the ways of an engine that is not refused.

    Args:
        device: where its weights lie.
        holds_addresses: whether it runs captured graphs or compiled code.
        experiments: what was asked for.
    """
    copied = holds_addresses or bool(experiments & {Experiment.COPY, Experiment.GRAPHS})
    return Ways(
        method=Method.COPY if copied else Method.POINTER,
        place=HOST if device.type == "cpu" else OnDevice(CudaCopies(device)),
    )
