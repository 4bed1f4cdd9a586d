"""One loaded version: its weights, its generation loop, and what can be asked about it at any time."""

import fnmatch
import time
from collections.abc import Callable

import msgspec
import torch

from modelswap_engine.backends.embedded import loading, wire
from modelswap_engine.backends.embedded.faults import Faults
from modelswap_engine.backends.embedded.generator import Generator
from modelswap_engine.backends.embedded.lora.adapters import Adapters
from modelswap_engine.backends.embedded.memory import allocator_bytes, resident_bytes
from modelswap_engine.backends.embedded.settings import CommitMethod, EmbeddedSettings
from modelswap_engine.backends.embedded.trial import check_output, trial_of
from modelswap_engine.backends.port import Hashes, Load, Tokens
from modelswap_engine.protocol.engine_state import MemoryState
from modelswap_engine.weights.addresses import compiled
from modelswap_engine.weights.pace import Pace
from modelswap_engine.weights.updater import WeightUpdater
from modelswap_engine.weights.version import Method, Staged


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
            threads=settings.stage_threads,
            method=lambda: self._method(model, settings.commit_method),
        )
        updater.prove()
        check_output(model, vocabulary=loading.vocabulary_of(model))
        self._model = model
        faults.flip = self._flip
        self.adapters = Adapters(model, settings)
        self.generator = Generator(
            model, settings, adapters=self.adapters, digest=lambda: updater.digest, emit=emit, died=died
        )
        with self.adapters.probing():
            self.generator.start()
        context = loading.context_of(model.config)
        self.facts = wire.ModelFacts(
            architecture=loading.architecture_of(model),
            groups=tuple(group.sources for group in updater.groups),
            tied=tuple(group.tied for group in updater.groups if group.tied),
            vocabulary=loading.vocabulary_of(model),
            max_tokens=min(settings.cache_tokens, context or settings.cache_tokens),
            commit_method=self._method(model, settings.commit_method),
            adapters=self.adapters.layout(),
        )

    def _method(self, model: torch.nn.Module, wanted: CommitMethod) -> Method:
        if wanted is CommitMethod.AUTO:
            return Method.COPY if compiled(model) or self.generator.captured else Method.POINTER
        return Method(wanted)

    def try_out(self, staged: Staged) -> None:
        """Run staged tensors beside the live ones.

        Raises:
            ChecksFailed: what comes out is not finite.
        """
        if staged.version.tensors:
            trial = trial_of(self._model, self.updater.would_be(staged.version))
            check_output(trial, vocabulary=self.facts.vocabulary)

    def _flip(self, name: str) -> None:
        """Damage one live tensor, for a test."""
        tensor = self.updater.snapshot().tensors[name]
        tensor.view(-1).view(torch.uint8)[0] ^= 1

    def hashes(self, pattern: str, *, pace: Pace) -> Hashes:
        """Re-hash live tensors; consistent, because pointers that move on leave the snapshot alone."""
        updater = self.updater
        started = time.perf_counter()
        snapshot = updater.snapshot()
        groups = [group for group in updater.groups if any(fnmatch.fnmatchcase(n, pattern) for n in group.sources)]
        found, size = updater.hash(snapshot, groups, pace=pace)
        runtime = updater.runtime(snapshot, groups, pace=pace)
        blind = updater.unverifiable
        return Hashes(
            tensors={
                n: value
                for n, value in updater.answers(found).items()
                if n not in blind and fnmatch.fnmatchcase(n, pattern)
            },
            bytes=size + sum(snapshot.tensors[item.name].nbytes for item in runtime),
            seconds=time.perf_counter() - started,
            unverifiable=tuple(sorted(name for name in blind if fnmatch.fnmatchcase(name, pattern))),
            runtime=runtime,
        )


def memory_of(model: LoadedModel | None) -> MemoryState:
    """Say where the process's memory is; limits are the front's business."""
    used, reserved = allocator_bytes()
    process = MemoryState(rss_bytes=resident_bytes(), allocator_used_bytes=used, allocator_reserved_bytes=reserved)
    if model is None:
        return process
    sizes = model.updater.sizes()
    kv = model.generator.kv_sizes()
    return msgspec.structs.replace(
        process,
        model_bytes=sizes.live,
        staged_bytes=sizes.staged,
        previous_bytes=sizes.previous,
        kv_cache_bytes=kv.total,
        kv_free_bytes=kv.free,
        kv_cached_bytes=kv.cached,
        adapter_bytes=model.adapters.nbytes(),
    )
