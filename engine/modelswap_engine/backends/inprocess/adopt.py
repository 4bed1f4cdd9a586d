"""Proves that an engine which has loaded a version by itself holds just that version.

What can be had back from the live tensors is hashed against the manifest. What cannot (cut for one rank of several,
converted with a loss) is made once more from the version's own files and compared. Nothing live is changed.
"""

from collections.abc import Mapping

import torch

from modelswap_engine.backends.inprocess.loader import SkeletonLoader
from modelswap_engine.backends.inprocess.ways import Ways
from modelswap_engine.backends.port import Load, Stage, TensorRange
from modelswap_engine.protocol.errors import ManifestMismatch
from modelswap_engine.weights.mapping import Group
from modelswap_engine.weights.pace import Pace
from modelswap_engine.weights.packed import Packed
from modelswap_engine.weights.reader import read_tensor
from modelswap_engine.weights.stage import same_bytes
from modelswap_engine.weights.updater import WeightUpdater


def adopt(order: Load, loader: SkeletonLoader, *, ways: Ways, pace: Pace) -> WeightUpdater:
    """Return the versions of the live model, the order's being the live one; only while the engine computes nothing.

    Raises:
        ManifestMismatch: the engine holds something else.
        ModelswapError: the version is damaged, or not one of this model.
    """
    updater = WeightUpdater(
        loader.table,
        loader,
        digest=order.digest,
        checkpoint=order.tensors,
        method=lambda: ways.method,
        place=ways.place,
    )
    files = {item.name: item for item in order.tensors}
    for group in updater.groups:
        for part in group.parts:
            if loader.packs(part):
                read = {name: read_tensor(files[name], pace=pace, place=ways.place) for name in part.sources}
                loader.learn(part, read)
    updater.prove()
    blind = updater.unverifiable
    for group in updater.groups:
        if not blind.isdisjoint(group.sources):
            _compare(updater, group, files, order.digest, pace=pace)
    return updater


def _compare(
    updater: WeightUpdater, group: Group, files: Mapping[str, TensorRange], digest: str, *, pace: Pace
) -> None:
    again = Stage(
        operation_id="adopt", digest=digest, directory="", tensors=tuple(files[name] for name in group.sources)
    )
    made = updater.begin(again)(pace).version
    live = updater.snapshot().tensors
    values: dict[str, torch.Tensor | Packed] = {**made.tensors, **made.packed}
    for name, value in values.items():
        if not _same(live[name], value):
            raise ManifestMismatch(
                f"live parameter {name} is not what version {digest} makes of {', '.join(group.sources)}",
                advice="the engine was started on another version; restart it on this one",
                details={"tensor": name},
            )


def _same(live: torch.Tensor, made: torch.Tensor | Packed) -> bool:
    return same_bytes(live.contiguous(), made.read() if isinstance(made, Packed) else made)
