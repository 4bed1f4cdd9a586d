"""One loaded version: its weights, its generation loop, and what can be asked about it at any time."""

import contextlib
import copy
import fnmatch
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import msgspec
import torch
from transformers import PreTrainedModel

from modelswap_engine.backends.embedded import loading, wire
from modelswap_engine.backends.embedded.device import name_of
from modelswap_engine.backends.embedded.faults import Faults
from modelswap_engine.backends.embedded.generator import Generator
from modelswap_engine.backends.embedded.lora.adapters import Adapters
from modelswap_engine.backends.embedded.memory import allocator_bytes, resident_bytes
from modelswap_engine.backends.embedded.overlap import Overlap
from modelswap_engine.backends.embedded.settings import CommitMethod, EmbeddedSettings
from modelswap_engine.backends.embedded.team import Team
from modelswap_engine.backends.embedded.trial import check_output, check_prompt, trial_of
from modelswap_engine.backends.port import Hashes, Load, PromptTrial, Tokens
from modelswap_engine.protocol.engine_state import MemoryState
from modelswap_engine.protocol.errors import PeerFailed, UnsupportedChange
from modelswap_engine.weights.addresses import compiled
from modelswap_engine.weights.pace import Pace
from modelswap_engine.weights.place import Place
from modelswap_engine.weights.updater import WeightUpdater
from modelswap_engine.weights.version import Method, Staged


class LoadedModel:
    """A model that runs.

    Args:
        order: what to load.
        settings: of the engine.
        place: where the weights are to lie.
        faults: what a test asked to break.
        emit: takes new tokens, from any thread.
        died: called with the reason why this process cannot go on.
        pace: can call the reading off.
        team: the other ranks, of a model that is split over several.

    Raises:
        ModelswapError: the version cannot be served; nothing of it is left, on no rank.
        TeamBrokenError: the ranks lost each other.
    """

    def __init__(
        self,
        order: Load,
        settings: EmbeddedSettings,
        *,
        place: Place,
        faults: Faults,
        emit: Callable[[Tokens], None],
        died: Callable[[str], None],
        pace: Pace,
        team: Team | None = None,
    ) -> None:
        self._settings = settings
        self._faults = faults
        self._emit = emit
        self._died = died
        self._team = team
        self.overlap: Overlap | None = None
        self._place = place
        with self._together("loading", patient=True):
            faults.hit("load")
            model, slices = _build(order, pace=pace, place=place, team=team)
            # The library works in the device's own order, what comes now beside it; and it asks for more than it keeps.
            place.quiesce()
            place.trim()
            self.updater = self._updater(model, order, slices=slices)
            self.updater.prove()
        self._tokens = settings.trial_tokens
        self._model = model
        faults.flip = self._flip
        with self._together("running it once"):
            check_output(model, vocabulary=loading.vocabulary_of(model), tokens=self._tokens)
        self.generator = self._start()
        self.facts = self._facts()

    def _updater(self, model: PreTrainedModel, order: Load, *, slices: Mapping[str, str]) -> WeightUpdater:
        settings, faults = self._settings, self._faults
        return WeightUpdater(
            model,
            loading.TransformersLoader(model),
            digest=order.digest,
            checkpoint=order.tensors,
            slices=slices,
            midway=lambda: faults.hit("midway"),
            threads=settings.stage_threads,
            method=lambda: self._method(model, settings.commit_method),
            place=self._place,
        )

    def _facts(self) -> wire.ModelFacts:
        model, settings, updater = self._model, self._settings, self.updater
        context = loading.context_of(model.config)
        return wire.ModelFacts(
            architecture=loading.architecture_of(model),
            groups=tuple(group.sources for group in updater.groups),
            tied=tuple(group.tied for group in updater.groups if group.tied),
            vocabulary=loading.vocabulary_of(model),
            max_tokens=min(settings.cache_tokens, context or settings.cache_tokens),
            commit_method=self._method(model, settings.commit_method),
            adapters=self.adapters.layout(),
        )

    def _together(self, what: str, *, patient: bool = False) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if self._team is None else self._team.together(what, patient=patient)

    def verify(self, *, strict: bool, pace: Pace, unproven: bool) -> str:
        """Prove what is live, on all ranks or on none.

        A split model cannot be tried out beside its running loop, whose ranks would take what another thread sends for
        their own: it is run once here, in the pause, when what is live is ``unproven``.

        Raises:
            ModelswapError: it is not what it must be, or another rank's is not.
            TeamBrokenError: the ranks lost each other.
        """
        with self._together("verifying"):
            self._faults.hit("verify")
            digest = self.updater.verify(strict=strict, pace=pace)
        if self._team is not None and self._team.all(unproven, "verifying"):
            with self._together("running it once"):
                check_output(self._model, vocabulary=self.facts.vocabulary, tokens=self._tokens)
        return digest

    def _start(self) -> Generator:
        generator: Generator | None = None
        try:
            with self._together("starting"):
                self.adapters = Adapters(self._model, self._settings)
                # Looking for garbage takes longer than a step while there are this many objects. What stays as long as
                # the model does is left out of it; what comes and goes with a second instance is not.
                gc.collect()
                gc.freeze()
                generator = self._make()
                self._config = copy.deepcopy(self._model.config)  # before the first step writes into it
                with self.adapters.probing():
                    generator.start()
        except PeerFailed:
            if generator is not None:
                generator.stop()
            raise
        return generator

    def _method(self, model: torch.nn.Module, wanted: CommitMethod) -> Method:
        if wanted is CommitMethod.AUTO:
            return Method.COPY if compiled(model) or self.generator.captured else Method.POINTER
        return Method(wanted)

    def try_out(self, staged: Staged) -> None:
        """Run staged tensors beside the live ones.

        Raises:
            ChecksFailed: what comes out is not finite.
            InsufficientMemory: the device has no room for the run.
        """
        if staged.version.tensors and self._tokens and self._team is None:
            trial = self._trial_of(self.updater.would_be(staged.version))
            with self._place.beside():
                check_output(trial, vocabulary=self.facts.vocabulary, tokens=self._tokens)

    def try_prompts(self, staged: Staged, trials: Sequence[PromptTrial], *, pace: Pace) -> None:
        """Run prompts on staged tensors, and on the live ones where that is compared.

        Raises:
            UnsupportedChange: the model is split, and its ranks are busy with what is live.
            ChecksFailed: a prompt's output is not finite, or has changed by more than is allowed.
            InsufficientMemory: the device has no room for the run.
            Cancelled: ``pace`` was cancelled.
        """
        if self._team is not None:
            raise UnsupportedChange(
                "prompts cannot be tried on the staged weights of a model that is split over ranks",
                advice="leave checks.prompts out, or serve the model with --tensor-parallel 1",
            )
        live, trial = self._trial_of({}), self._trial_of(self.updater.would_be(staged.version))
        for number, item in enumerate(trials, start=1):
            pace.spend(0)
            with self._place.beside():
                check_prompt(trial, live, item, number=number, longest=self.facts.max_tokens)

    def _trial_of(self, tensors: Mapping[str, torch.Tensor]) -> PreTrainedModel:
        return trial_of(self._model, tensors, config=self._config)

    def _flip(self, name: str) -> None:
        """Damage one live tensor, for a test."""
        tensor = self.updater.snapshot().tensors[name]
        tensor.view(-1).view(torch.uint8)[0] ^= 1

    def _make(self) -> Generator:
        updater = self.updater
        return Generator(
            self._model,
            self._settings,
            adapters=self.adapters,
            digest=lambda: updater.digest,
            emit=self._emit,
            died=self._died,
            team=self._team,
        )

    def generators(self) -> tuple[Generator, ...]:
        """Return what generates: one instance, two while they overlap."""
        overlap = self.overlap
        both = (self.generator,) if overlap is None else (self.generator, overlap.old, overlap.new)
        return tuple(dict.fromkeys(generator for generator in both if generator is not None))

    def generator_of(self, version: str) -> Generator:
        """Return the instance that answers a request which was let in under this version."""
        overlap = self.overlap
        return overlap.old if overlap is not None and overlap.digest == version else self.generator

    def open_overlap(self, operation_id: str) -> Overlap:
        """Bring up a second instance, which has what the operation prepared; see :class:`Overlap`.

        Raises:
            ModelswapError: it cannot run; everything is as before.
        """
        overlap = Overlap(
            operation_id,
            model=self._model,
            updater=self.updater,
            running=self.generator,
            make=self._make,
            copied=lambda: self._trial_of({}),
            faults=self._faults,
        )
        overlap.open()
        self.overlap = overlap
        return overlap

    def switch_overlap(self, overlap: Overlap) -> None:
        """Make the new instance the main one."""
        if overlap.new is not None:
            self.generator, overlap.switched = overlap.new, True

    def undo_overlap(self, overlap: Overlap) -> None:
        """Take the second instance back."""
        self.generator = overlap.old
        overlap.undo()
        self.overlap = None

    def close_overlap(self, overlap: Overlap) -> int:
        """End the old instance; return how many requests were still on it."""
        left = overlap.close()
        self.overlap = None
        gc.collect()  # its cache and its loop refer to each other
        return left

    def stop(self) -> None:
        """End all generation."""
        for generator in self.generators():
            generator.stop()

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


def _build(order: Load, *, pace: Pace, place: Place, team: Team | None) -> tuple[PreTrainedModel, dict[str, str]]:
    if team is None:
        return loading.build_model(order.directory, order.tensors, pace=pace, place=place), {}
    return loading.build_part(order.directory, order.tensors, team, pace=pace)


def memory_of(model: LoadedModel | None, place: Place) -> MemoryState:
    """Say where the process's memory is; of limits only the device's, the others are the front's business."""
    used, reserved = allocator_bytes(place.device)
    room = place.room()
    process = MemoryState(
        rss_bytes=resident_bytes(),
        allocator_used_bytes=used,
        allocator_reserved_bytes=reserved,
        device=name_of(place),
        device_limit_bytes=room.limit if room else -1,
        device_available_bytes=room.available if room else -1,
    )
    if model is None:
        return process
    sizes = model.updater.sizes()
    caches = [generator.kv_sizes() for generator in model.generators()]
    return msgspec.structs.replace(
        process,
        model_bytes=sizes.live,
        staged_bytes=sizes.staged,
        previous_bytes=sizes.previous,
        kv_cache_bytes=sum(kv.total for kv in caches),
        kv_free_bytes=sum(kv.free for kv in caches),
        kv_cached_bytes=sum(kv.cached for kv in caches),
        instance_bytes=max(kv.total + kv.buffers for kv in caches),
        adapter_bytes=model.adapters.nbytes(),
    )
