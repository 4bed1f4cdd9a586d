"""Hashes what is live in one rank, in checkpoint coordinates as far as it can be."""

import fnmatch
import time

from modelswap_engine.backends.inprocess.loader import SkeletonLoader
from modelswap_engine.backends.port import Hashes
from modelswap_engine.weights.pace import Pace
from modelswap_engine.weights.updater import WeightUpdater


def hashes(updater: WeightUpdater, loader: SkeletonLoader, pattern: str, *, still: bool, pace: Pace) -> Hashes:
    """Re-hash live tensors whose checkpoint names match a glob.

    What the engine has in a form of its own can only be worked out while the engine is ``still``; else it is among what
    cannot be seen.

    Raises:
        Cancelled: ``pace`` was cancelled.
    """
    started = time.perf_counter()
    snapshot = updater.snapshot()
    wanted = [group for group in updater.groups if any(fnmatch.fnmatchcase(name, pattern) for name in group.sources)]
    seen = [group for group in wanted if still or not any(loader.packs(part) for part in group.parts)]
    found, size = updater.hash(snapshot, seen, pace=pace)
    runtime = updater.runtime(snapshot, seen, pace=pace)
    blind = updater.unverifiable | {name for group in wanted if group not in seen for name in group.sources}
    return Hashes(
        tensors={
            name: value
            for name, value in updater.answers(found).items()
            if name not in blind and fnmatch.fnmatchcase(name, pattern)
        },
        bytes=size,
        seconds=time.perf_counter() - started,
        unverifiable=tuple(sorted(name for name in blind if fnmatch.fnmatchcase(name, pattern))),
        runtime=runtime,
    )
