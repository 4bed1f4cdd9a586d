"""One rank's side of the swap: joins the weights core and the generation loop, one control call at a time.

It answers, it never raises: what goes wrong is in the reply. It knows no socket.
"""

import functools
import gc
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from modelswap_engine.backends.adapters import LoadAdapter
from modelswap_engine.backends.embedded import wire
from modelswap_engine.backends.embedded.device import place_of
from modelswap_engine.backends.embedded.faults import Faults
from modelswap_engine.backends.embedded.lease import PauseLease
from modelswap_engine.backends.embedded.model import LoadedModel, memory_of
from modelswap_engine.backends.embedded.overlap import Overlap
from modelswap_engine.backends.embedded.rank_transfers import RankTransfers
from modelswap_engine.backends.embedded.settings import EmbeddedSettings
from modelswap_engine.backends.embedded.staging import Staging
from modelswap_engine.backends.embedded.team import Team
from modelswap_engine.backends.port import (
    FinishReason,
    Generate,
    Hashes,
    Load,
    PromptTrial,
    Reply,
    RequestPolicy,
    Stage,
    StageRetained,
    Tokens,
)
from modelswap_engine.protocol.engine_state import MemoryState
from modelswap_engine.protocol.errors import Busy, Cancelled, DeviceUnavailable, Internal, NotReady
from modelswap_engine.weights.pace import Pace
from modelswap_engine.weights.place import HOST, Place
from modelswap_engine.weights.version import Method, Staged

_RETRY: Final = 0.1


class Rank:
    """The model of one process and the operation on it.

    Args:
        number: this rank.
        boot_id: of this process.
        settings: of the engine.
        faults: what a test asked to break.
        emit: takes new tokens, from any thread.
        died: called with the reason why this process cannot go on; does not return.
        team: the other ranks, of a model that is split over several.
    """

    def __init__(
        self,
        *,
        number: int,
        boot_id: str,
        settings: EmbeddedSettings,
        faults: Faults,
        emit: Callable[[Tokens], None],
        died: Callable[[str], None],
        team: Team | None = None,
    ) -> None:
        self.number = number
        self.boot_id = boot_id
        self._settings = settings
        self._faults = faults
        self._emit = emit
        self._died = died
        self._team = team
        self._busy = threading.RLock()
        self._model: LoadedModel | None = None
        self._lease: PauseLease | None = None
        self._expired: str = ""
        self._unproven = False
        self._policy = RequestPolicy.NONE_RUNNING
        self._staging = Staging(new_pace=self.background, niceness=settings.stage_niceness)
        self.transfers = RankTransfers(
            number=number,
            ranks=settings.ranks,
            team=team,
            boot_id=boot_id,
            get_updater=lambda: self._loaded().updater,
            loaders=settings.weight_loaders,
            flush=self._flush_cache,
        )

    # Control calls. The lock is there for the one other thread that acts: an expiring pause.

    def load(self, order: Load, *, pace: Pace) -> tuple[Reply, wire.ModelFacts]:
        """Replace whatever is loaded by a whole version, proven by hash, unless ``pace`` is cancelled first."""
        with self._busy:
            started = time.perf_counter()
            place = self._place()
            self._unload()
            place.trim()
            self._model = model = LoadedModel(
                order,
                self._settings,
                place=place,
                faults=self._faults,
                emit=self._emit,
                died=self._died,
                pace=pace,
                team=self._team,
            )
            reply = self._reply(
                order.operation_id,
                seconds=time.perf_counter() - started,
                fetched_bytes=sum(item.nbytes for item in order.tensors),
                digest=order.digest,
            )
            return reply, model.facts

    def _place(self) -> Place:
        return place_of(self._settings.device, rank=self.number)

    def _unload(self) -> None:
        lease, self._lease = self._lease, None
        self._unproven = False
        if lease is not None:
            lease.release()
        if self._model is not None:
            self._model.stop()
            self._model = None
        # The loop and its cache refer to each other; without this the old model would still be there beside the new.
        gc.unfreeze()
        gc.collect()

    def stage(self, order: Stage | StageRetained) -> Reply:
        """Stage in a thread of its own that gives way to decoding; :meth:`cancel_staging` stops it."""
        with self._busy:
            model = self._loaded()
            updater = model.updater
            if model.overlap is not None:
                raise Busy(
                    f"operation {model.overlap.operation_id} has left a second instance behind",
                    advice="retire it, or roll that operation back",
                )
            if self._unproven:
                raise Busy(
                    "a version was committed and is not proven; staging would give up the means to undo it",
                    advice="verify it or roll it back first",
                )
            started = time.perf_counter()
            if isinstance(order, StageRetained):
                staged = updater.stage_retained(order)
            else:
                staged = updater.stage(order, functools.partial(self._read, order.operation_id))
            return self._reply(
                order.operation_id,
                seconds=time.perf_counter() - started,
                fetched_bytes=staged.fetched_bytes,
                staged_bytes=updater.sizes().staged,
                digest=staged.version.digest,
            )

    def _read(self, operation_id: str, work: Callable[[Pace], Staged]) -> Staged:
        def body(pace: Pace) -> Staged:
            self._faults.hit("stage")
            staged = work(pace)
            self._loaded().try_out(staged)
            return staged

        return self._staging.run(operation_id, body)

    def try_out(self, operation_id: str, trials: Sequence[PromptTrial]) -> Reply:
        """Run prompts on what is staged, in a thread that gives way to decoding; :meth:`cancel_staging` stops it."""
        with self._busy:
            self._faults.hit("try")
            model = self._loaded()
            staged = model.updater.staged(operation_id)
            started = time.perf_counter()

            def body(pace: Pace) -> Staged:
                model.try_prompts(staged, trials, pace=pace)
                return staged

            self._staging.run(operation_id, body)
            return self._reply(operation_id, seconds=time.perf_counter() - started, digest=staged.version.digest)

    def cancel_staging(self, operation_id: str) -> None:
        """Stop a staging of this operation that runs or waits for its turn; from any thread."""
        self._staging.cancel(operation_id)

    def prepare(self, operation_id: str, *, overlap: bool) -> Reply:
        """Work out the commit; with ``overlap`` also bring up the second instance, warm."""
        with self._busy:
            self._faults.hit("prepare")
            started = time.perf_counter()
            model = self._loaded()
            # The old instance is on the same memory: nothing may be written into it.
            digest = model.updater.prepare(operation_id, method=Method.POINTER if overlap else None)
            staged = model.updater.sizes().staged
            still = model.open_overlap(operation_id).still_seconds if overlap else 0.0
            return self._reply(
                operation_id,
                seconds=time.perf_counter() - started,
                staged_bytes=staged,
                commit_microseconds=still * 1e6,
                digest=digest,
            )

    def pause(self, operation_id: str, timeout: float) -> Reply:
        """Park the loop between two steps, by lease; asking again only renews it."""
        with self._busy:
            self._faults.hit("pause")
            model = self._loaded()
            lease = self._lease
            if lease is not None and lease.held:
                if lease.operation_id != operation_id:
                    raise Cancelled(f"the engine is paused by operation {lease.operation_id}")
                lease.renew()
                return self._reply(operation_id, digest=model.updater.digest)
            lease = PauseLease(
                operation_id,
                model.generator.parking(),
                seconds=self._settings.pause_lease_seconds,
                expired=self._on_expired,
            )
            seconds = lease.acquire(timeout)
            # Of the steps before nothing may still read the weights that are about to go.
            self._place().quiesce()
            self._lease, self._expired = lease, ""
            return self._reply(operation_id, seconds=seconds, digest=model.updater.digest)

    def _on_expired(self, lease: PauseLease) -> None:
        """Undo what was committed but never verified under a pause that nobody came back for."""
        # Whoever holds the lock may be waiting for this very pause to end; then there is nothing to undo.
        while not self._busy.acquire(timeout=_RETRY):
            if lease.withdrawn:
                return
        try:
            if self._lease is not lease or self._model is None:
                return
            if self._unproven:
                self._undo_or_die(self._model, lease.operation_id)
            self._lease, self._expired = None, lease.operation_id
        finally:
            self._busy.release()

    def _undo_or_die(self, model: LoadedModel, operation_id: str) -> None:
        try:
            self._undo(model, operation_id)
        except BaseException as error:
            # The pause ends with this call, and no step may be made on weights that nobody proved.
            self._died(f"operation {operation_id} was abandoned and could not be undone: {error}")
            raise

    def commit(self, operation_id: str, policy: RequestPolicy) -> Reply:
        """Move the pointers and let no old keys and values be found; the window holds nothing else."""
        with self._busy:
            self._faults.hit("commit")
            model = self._loaded()
            if policy is RequestPolicy.OVERLAP:
                return self._switch(model, operation_id)
            self._paused(operation_id)
            model.generator.check(policy)
            self._unproven, self._policy = True, policy
            started = time.perf_counter_ns()
            method = model.updater.commit(operation_id)
            requests = model.generator.flush(policy)
            self._place().quiesce()
            window = (time.perf_counter_ns() - started) / 1000
            return self._reply(
                operation_id,
                seconds=window / 1e6,
                commit_microseconds=window,
                requests=requests,
                method=method,
                digest=model.updater.digest,
            )

    def _switch(self, model: LoadedModel, operation_id: str) -> Reply:
        overlap = model.overlap
        if overlap is None or overlap.operation_id != operation_id:
            raise Internal(f"operation {operation_id} has brought up no second instance", advice="prepare it with one")
        self._unproven = True
        model.switch_overlap(overlap)
        return self._reply(
            operation_id,
            commit_microseconds=overlap.still_seconds * 1e6,
            method="instance",
            digest=model.updater.digest,
        )

    def retire(self, operation_id: str) -> Reply:
        """End the instance that an overlapping commit left behind; one that is gone already is nothing to do."""
        with self._busy:
            model = self._loaded()
            overlap = model.overlap
            left = 0
            if overlap is not None and overlap.operation_id == operation_id:
                if not overlap.switched or self._unproven:
                    raise Internal(f"operation {operation_id} is not committed and proven; its old instance serves")
                try:
                    left = model.close_overlap(overlap)
                except Exception as error:
                    # It holds its memory and maybe a core: only a new process gets rid of it.
                    self._died(f"the old instance of operation {operation_id} did not end: {error}")
                    raise
            return self._reply(operation_id, requests=left, digest=model.updater.digest)

    def verify(self, operation_id: str, *, strict: bool, pace: Pace) -> Reply:
        """Prove what is live; a proof by hash can be called off by ``pace``."""
        with self._busy:
            started = time.perf_counter()
            digest = self._loaded().verify(strict=strict, pace=pace, unproven=self._unproven)
            self._unproven = False
            return self._reply(operation_id, seconds=time.perf_counter() - started, digest=digest)

    def rollback(self, operation_id: str) -> Reply:
        """Put the old tensors back; requests that ran on the new ones are computed again."""
        with self._busy:
            model = self._loaded()
            overlap = model.overlap
            if overlap is None or overlap.operation_id != operation_id:
                self._paused(operation_id)
                overlap = None
            started = time.perf_counter_ns()
            requests = self._undo(model, operation_id) if overlap is None else self._give_up(model, overlap)
            window = (time.perf_counter_ns() - started) / 1000
            return self._reply(
                operation_id,
                seconds=window / 1e6,
                commit_microseconds=window,
                requests=requests,
                digest=model.updater.digest,
            )

    def _give_up(self, model: LoadedModel, overlap: Overlap) -> int:
        self._faults.hit("rollback")
        model.undo_overlap(overlap)
        self._unproven = False
        return 0

    def _undo(self, model: LoadedModel, operation_id: str) -> int:
        self._faults.hit("rollback")
        # Frozen requests made no step on the new weights: what they kept is what the old ones made, and right again.
        policy = RequestPolicy.FREEZE if self._policy is RequestPolicy.FREEZE else RequestPolicy.RECOMPUTE
        model.generator.check(policy)
        model.updater.rollback(operation_id)
        requests = model.generator.flush(policy)
        self._place().quiesce()
        self._unproven = False
        return requests

    def _flush_cache(self, policy: RequestPolicy) -> int:
        """Forget cached keys and values between two steps, without a change of weights."""
        with self._busy:
            generator = self._loaded().generator
            with generator.parking():
                generator.check(policy)
                return generator.flush(policy)

    def resume(self, operation_id: str) -> Reply:
        """Step again; without a pause of this operation nothing happens."""
        with self._busy:
            self._faults.hit("resume")
            lease = self._lease
            if lease is None or lease.operation_id != operation_id:
                if lease is None and self._model is not None:
                    self._model.generator.let_go()
                return self._reply(operation_id)
            if self._unproven:
                raise Internal(
                    f"operation {operation_id} was committed and is not proven",
                    advice="verify it or roll it back; else its pause runs out and undoes it",
                )
            self._lease = None
        lease.release()
        return self._reply(operation_id, digest=self._loaded().updater.digest)

    def settle(self, operation_id: str) -> Reply:
        """Come to rest on what is proven: for a rank that lives while others do not.

        What was committed without a proof is undone, what is staged or retained is dropped, a pause ends.
        """
        with self._busy:
            self._faults.hit("settle")
            model, lease, overlap = self._loaded(), self._lease, self._loaded().overlap
            if overlap is not None and not (overlap.switched and not self._unproven):
                self._give_up(model, overlap)
            elif self._unproven and lease is not None:
                self._undo(model, lease.operation_id)
            model.updater.clear()
            digest = model.updater.verify(strict=False)
            self._lease = None
            self._staging.forget(operation_id)
        if lease is not None:
            lease.release()
        else:
            model.generator.let_go()
        return self._reply(operation_id, digest=digest)

    def release(self, operation_id: str, *, previous: bool) -> Reply:
        """Drop what is staged, and the retained version if asked to."""
        with self._busy:
            self._staging.forget(operation_id)
            if self._model is None:
                return self._reply(operation_id)
            overlap = self._model.overlap
            if overlap is not None and overlap.operation_id == operation_id:
                if overlap.switched:
                    raise Internal(f"operation {operation_id} has left its old instance behind", advice="retire it")
                self._give_up(self._model, overlap)
            self._model.updater.release(operation_id, previous=previous)
            self._faults.hit("release")
            return self._reply(operation_id, digest=self._model.updater.digest)

    def _loaded(self) -> LoadedModel:
        if self._model is None:
            raise NotReady("the worker has no version loaded", advice="load one")
        return self._model

    def _paused(self, operation_id: str) -> None:
        lease = self._lease
        if lease is not None and lease.held and lease.operation_id == operation_id:
            lease.renew()
            return
        if self._expired == operation_id:
            raise Cancelled(
                f"the pause of operation {operation_id} ended by itself after "
                f"{self._settings.pause_lease_seconds:g} s; what was not proven by then was undone",
                advice="pause again",
            )
        raise Internal(f"operation {operation_id} does not hold a pause")

    def _reply(
        self,
        operation_id: str,
        *,
        seconds: float = 0.0,
        fetched_bytes: int = 0,
        staged_bytes: int = 0,
        commit_microseconds: float = 0.0,
        requests: int = 0,
        method: str = "",
        digest: str = "",
    ) -> Reply:
        return Reply(
            operation_id=operation_id,
            rank=self.number,
            boot_id=self.boot_id,
            seconds=seconds,
            fetched_bytes=fetched_bytes,
            staged_bytes=staged_bytes,
            commit_microseconds=commit_microseconds,
            requests=requests,
            method=method,
            digest=self._faults.told(digest),
        )

    # Adapters, beside control calls: bringing one in waits for no swap, and no swap for it.

    def load_adapter(self, order: LoadAdapter, *, pace: Pace) -> Reply:
        """Read an adapter into memory, until ``pace`` is cancelled."""
        started = time.perf_counter()
        self._faults.hit("adapter")
        fetched = self._loaded().adapters.store.load(order, pace=pace)
        return self._reply(order.operation_id, seconds=time.perf_counter() - started, fetched_bytes=fetched)

    def place_adapter(self, adapter_id: str, slot: int) -> Reply:
        """Put an adapter into a slot."""
        self._loaded().adapters.store.place(adapter_id, slot)
        return self._reply("")

    def clear_slot(self, slot: int) -> Reply:
        """Empty a slot."""
        self._loaded().adapters.store.clear(slot)
        return self._reply("")

    def drop_adapter(self, adapter_id: str) -> Reply:
        """Forget an adapter."""
        self._loaded().adapters.store.drop(adapter_id)
        return self._reply("")

    def give_up(self, why: str) -> None:
        """This process cannot go on: its peers are gone, or do not answer."""
        self._died(why)

    # What may be asked beside a control call.

    def submit(self, request: Generate) -> None:
        """Start a generation."""
        model = self._model
        if model is not None:
            model.generator_of(request.version).submit(request)
            return
        self._emit(
            Tokens(
                request_id=request.request_id,
                tokens=(),
                digest="",
                finish=FinishReason.ERROR,
                error="no version is loaded",
            )
        )

    def wake(self) -> None:
        """The first rank has got a request."""
        if self._model is not None:
            self._model.generator.wake()

    def abort(self, request_id: str) -> None:
        """End a generation."""
        model = self._model
        if model is not None:
            for generator in model.generators():
                generator.abort(request_id)

    def background(self) -> Pace:
        """Return how fast tensors are brought beside the live ones: as fast as it goes, but for what decoding needs."""
        settings = self._settings
        return Pace(bytes_per_second=settings.stage_bytes_per_second, share=settings.stage_share, busy=self._decoding)

    def _decoding(self) -> bool:
        model = self._model
        return model is not None and any(generator.busy for generator in model.generators())

    def pace(self, bytes_per_second: int) -> Pace:
        """Return how fast live tensors are hashed again: as fast as it goes, or beside decoding and slower."""
        niceness = self._settings.stage_niceness if bytes_per_second else 0
        return Pace(bytes_per_second=bytes_per_second, niceness=niceness)

    def hashes(self, pattern: str, *, pace: Pace) -> Hashes:
        """Re-hash live tensors, while requests run and beside a commit, until ``pace`` is cancelled."""
        model = self._loaded()
        pace.spend(0)
        self._faults.hit("hashes")
        return model.hashes(pattern, pace=pace)

    def memory(self) -> MemoryState:
        """Say where the memory is."""
        try:
            place = self._place()
        except DeviceUnavailable:
            place = HOST  # nothing can be loaded, which the load will say
        return memory_of(self._model, place)
