"""One loaded version: its weights, its generation loop, and what can be asked about it at any time."""

import fnmatch
import time
from collections.abc import Callable
from typing import Final

from modelswap_engine.backends.embedded import loading, wire
from modelswap_engine.backends.embedded.faults import Faults
from modelswap_engine.backends.embedded.generator import Generator
from modelswap_engine.backends.embedded.settings import EmbeddedSettings
from modelswap_engine.backends.port import Hashes, Load, Tokens
from modelswap_engine.protocol.engine_state import MemoryState
from modelswap_engine.weights.pace import Pace
from modelswap_engine.weights.updater import WeightUpdater

_PAGE: Final = 4096


class LoadedModel:
    """A model that runs.

    Args:
        order: what to load.
        settings: of the engine.
        faults: what a test asked to break.
        emit: takes new tokens, from any thread.
        died: called when the generation loop broke.

    Raises:
        ModelswapError: the version cannot be served; nothing of it is left.
    """

    def __init__(
        self,
        order: Load,
        settings: EmbeddedSettings,
        *,
        faults: Faults,
        emit: Callable[[Tokens], None],
        died: Callable[[str], None],
    ) -> None:
        model = loading.build_model(order.directory, order.tensors, pace=Pace())
        self.updater = updater = WeightUpdater(
            model,
            loading.TransformersLoader(model),
            digest=order.digest,
            checkpoint=order.tensors,
            midway=lambda: faults.hit("midway"),
        )
        updater.prove()
        self.generator = Generator(model, settings, digest=lambda: updater.digest, emit=emit, died=died)
        self.generator.start()
        context = loading.context_of(model.config)
        self.facts = wire.ModelFacts(
            architecture=loading.architecture_of(model),
            groups=tuple(group.sources for group in updater.groups),
            vocabulary=loading.vocabulary_of(model),
            max_tokens=min(settings.cache_tokens, context or settings.cache_tokens),
        )

    def hashes(self, pattern: str, *, pace: Pace) -> Hashes:
        """Re-hash live tensors; consistent, because pointers that move on leave the snapshot alone."""
        updater = self.updater
        started = time.perf_counter()
        snapshot = updater.snapshot()
        groups = [group for group in updater.groups if any(fnmatch.fnmatchcase(n, pattern) for n in group.sources)]
        found, size = updater.hash(snapshot, groups, pace=pace)
        blind = updater.unverifiable
        return Hashes(
            tensors={
                n: value
                for n, value in updater.answers(found).items()
                if n not in blind and fnmatch.fnmatchcase(n, pattern)
            },
            bytes=size,
            seconds=time.perf_counter() - started,
            unverifiable=tuple(sorted(name for name in blind if fnmatch.fnmatchcase(name, pattern))),
        )


def memory_of(model: LoadedModel | None) -> MemoryState:
    """Say where the process's memory is; limits are the front's business."""
    if model is None:
        return MemoryState(rss_bytes=_resident_bytes())
    sizes = model.updater.sizes()
    kv = model.generator.kv_sizes()
    return MemoryState(
        model_bytes=sizes.live,
        staged_bytes=sizes.staged,
        previous_bytes=sizes.previous,
        kv_cache_bytes=kv.total,
        kv_free_bytes=kv.free,
        kv_cached_bytes=kv.cached,
        rss_bytes=_resident_bytes(),
    )


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * _PAGE
