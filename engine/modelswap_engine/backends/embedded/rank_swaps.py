"""One rank's side of the swap: control calls on the model of its process, one at a time.

What goes wrong is raised as an error with a meaning, and told by whoever calls. It knows no socket and no front.
"""

import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from modelswap_engine.backends.embedded import wire
from modelswap_engine.backends.embedded.commits import Commits
from modelswap_engine.backends.embedded.lease import PauseLease, Pauses
from modelswap_engine.backends.embedded.model import LoadedModel
from modelswap_engine.backends.embedded.rank import Rank
from modelswap_engine.backends.embedded.staging import Staging
from modelswap_engine.backends.port import Load, PromptTrial, Reply, RequestPolicy, Stage, StageRetained
from modelswap_engine.protocol.errors import Busy, Internal
from modelswap_engine.weights.pace import Pace
from modelswap_engine.weights.version import Method, Staged

_RETRY: Final = 0.1


class RankSwaps:
    """The operation on a rank's model. The lock is for the one other thread that acts: a pause that runs out.

    Args:
        rank: whose model it is.
    """

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._busy = threading.RLock()
        self._pauses = Pauses(seconds=rank.settings.pause_lease_seconds, expired=self._on_expired)
        self._commits = Commits(faults=rank.faults, quiesce=self._quiesce)
        self._staging = Staging(new_pace=rank.background, niceness=rank.settings.stage_niceness)

    def _quiesce(self) -> None:
        self._rank.place().quiesce()

    def load(self, order: Load, *, pace: Pace) -> tuple[Reply, wire.ModelFacts]:
        """Replace whatever is loaded by a whole version, proven by hash, unless ``pace`` is cancelled first."""
        with self._busy:
            started = time.perf_counter()
            place = self._rank.place()
            lease = self._pauses.take_out()
            self._commits.unproven = False
            if lease is not None:
                lease.release()
            self._rank.unload()
            place.trim()
            model = self._rank.load(order, pace=pace)
            reply = self._rank.reply(
                order.operation_id,
                seconds=time.perf_counter() - started,
                fetched_bytes=sum(item.nbytes for item in order.tensors),
                digest=order.digest,
            )
            return reply, model.facts

    def stage(self, order: Stage | StageRetained) -> Reply:
        """Stage in a thread of its own that gives way to decoding; :meth:`cancel_staging` stops it."""
        with self._busy:
            model = self._rank.loaded()
            updater = model.updater
            if model.overlap is not None:
                raise Busy(
                    f"operation {model.overlap.operation_id} has left a second instance behind",
                    advice="retire it, or roll that operation back",
                )
            if self._commits.unproven:
                raise Busy(
                    "a version was committed and is not proven; staging would give up the means to undo it",
                    advice="verify it or roll it back first",
                )
            started = time.perf_counter()
            if isinstance(order, StageRetained):
                staged = updater.stage_retained(order)
            else:
                staged = updater.stage(order, functools.partial(self._read, order.operation_id))
            return self._rank.reply(
                order.operation_id,
                seconds=time.perf_counter() - started,
                fetched_bytes=staged.fetched_bytes,
                staged_bytes=updater.sizes().staged,
                digest=staged.version.digest,
            )

    def _read(self, operation_id: str, work: Callable[[Pace], Staged]) -> Staged:
        def body(pace: Pace) -> Staged:
            self._rank.faults.hit("stage")
            staged = work(pace)
            self._rank.loaded().try_out(staged)
            return staged

        return self._staging.run(operation_id, body)

    def try_out(self, operation_id: str, trials: Sequence[PromptTrial]) -> Reply:
        """Run prompts on what is staged, in a thread that gives way to decoding; :meth:`cancel_staging` stops it."""
        with self._busy:
            self._rank.faults.hit("try")
            model = self._rank.loaded()
            staged = model.updater.staged(operation_id)
            started = time.perf_counter()

            def body(pace: Pace) -> Staged:
                model.try_prompts(staged, trials, pace=pace)
                return staged

            self._staging.run(operation_id, body)
            return self._rank.reply(operation_id, seconds=time.perf_counter() - started, digest=staged.version.digest)

    def cancel_staging(self, operation_id: str) -> None:
        """Stop a staging of this operation that runs or waits for its turn; from any thread."""
        self._staging.cancel(operation_id)

    def prepare(self, operation_id: str, *, overlap: bool) -> Reply:
        """Work out the commit; with ``overlap`` also bring up the second instance, warm."""
        with self._busy:
            self._rank.faults.hit("prepare")
            started = time.perf_counter()
            model = self._rank.loaded()
            # The old instance is on the same memory: nothing may be written into it.
            digest = model.updater.prepare(operation_id, method=Method.POINTER if overlap else None)
            staged = model.updater.sizes().staged
            still = model.open_overlap(operation_id).still_seconds if overlap else 0.0
            return self._rank.reply(
                operation_id,
                seconds=time.perf_counter() - started,
                staged_bytes=staged,
                commit_microseconds=still * 1e6,
                digest=digest,
            )

    def pause(self, operation_id: str, timeout: float) -> Reply:
        """Park the loop between two steps, by lease; asking again only renews it."""
        with self._busy:
            self._rank.faults.hit("pause")
            model = self._rank.loaded()
            # Once it is parked, nothing of the steps before may still read the weights that are about to go.
            seconds = self._pauses.begin(operation_id, model.generator.parking, timeout=timeout, parked=self._quiesce)
            return self._rank.reply(operation_id, seconds=seconds, digest=model.updater.digest)

    def _on_expired(self, lease: PauseLease) -> None:
        """Undo what was committed but never verified under a pause that nobody came back for."""
        # Whoever holds the lock may be waiting for this very pause to end; then there is nothing to undo.
        while not self._busy.acquire(timeout=_RETRY):
            if lease.withdrawn:
                return
        try:
            if self._pauses.lease is not lease or self._rank.model is None:
                return
            if self._commits.unproven:
                self._undo_or_die(self._rank.model, lease.operation_id)
            self._pauses.lapse(lease)
        finally:
            self._busy.release()

    def _undo_or_die(self, model: LoadedModel, operation_id: str) -> None:
        try:
            self._commits.undo(model, operation_id)
        except BaseException as error:
            # The pause ends with this call, and no step may be made on weights that nobody proved.
            self._rank.give_up(f"operation {operation_id} was abandoned and could not be undone: {error}")
            raise

    def commit(self, operation_id: str, policy: RequestPolicy) -> Reply:
        """Make what is prepared the live version: in the pause of the operation, or by switching instances."""
        with self._busy:
            self._rank.faults.hit("commit")
            model = self._rank.loaded()
            if policy is RequestPolicy.OVERLAP:
                return self._switch(model, operation_id)
            self._pauses.require(operation_id)
            done = self._commits.commit(model, operation_id, policy)
            return self._rank.reply(
                operation_id,
                seconds=done.microseconds / 1e6,
                commit_microseconds=done.microseconds,
                requests=done.requests,
                method=done.method,
                digest=model.updater.digest,
            )

    def _switch(self, model: LoadedModel, operation_id: str) -> Reply:
        overlap = model.overlap
        if overlap is None or overlap.operation_id != operation_id:
            raise Internal(f"operation {operation_id} has brought up no second instance", advice="prepare it with one")
        self._commits.switch(model, overlap)
        return self._rank.reply(
            operation_id,
            commit_microseconds=overlap.still_seconds * 1e6,
            method="instance",
            digest=model.updater.digest,
        )

    def retire(self, operation_id: str) -> Reply:
        """End the instance that an overlapping commit left behind; one that is gone already is nothing to do."""
        with self._busy:
            model = self._rank.loaded()
            overlap = model.overlap
            left = 0
            if overlap is not None and overlap.operation_id == operation_id:
                if not overlap.switched or self._commits.unproven:
                    raise Internal(f"operation {operation_id} is not committed and proven; its old instance serves")
                try:
                    left = model.close_overlap(overlap)
                except Exception as error:
                    # It holds its memory and maybe a core: only a new process gets rid of it.
                    self._rank.give_up(f"the old instance of operation {operation_id} did not end: {error}")
                    raise
            return self._rank.reply(operation_id, requests=left, digest=model.updater.digest)

    def verify(self, operation_id: str, *, strict: bool, pace: Pace) -> Reply:
        """Prove what is live; a proof by hash can be called off by ``pace``."""
        with self._busy:
            started = time.perf_counter()
            digest = self._rank.loaded().verify(strict=strict, pace=pace, unproven=self._commits.unproven)
            self._commits.unproven = False
            return self._rank.reply(operation_id, seconds=time.perf_counter() - started, digest=digest)

    def rollback(self, operation_id: str) -> Reply:
        """Put the old tensors back; requests that ran on the new ones are computed again."""
        with self._busy:
            model = self._rank.loaded()
            overlap = model.overlap
            if overlap is None or overlap.operation_id != operation_id:
                self._pauses.require(operation_id)
                overlap = None
            started, requests = time.perf_counter_ns(), 0
            if overlap is None:
                requests = self._commits.undo(model, operation_id)
            else:
                self._commits.give_up(model, overlap)
            window = (time.perf_counter_ns() - started) / 1000
            return self._rank.reply(
                operation_id,
                seconds=window / 1e6,
                commit_microseconds=window,
                requests=requests,
                digest=model.updater.digest,
            )

    def flush_cache(self, policy: RequestPolicy) -> int:
        """Forget cached keys and values between two steps, without a change of weights."""
        with self._busy:
            generator = self._rank.loaded().generator
            with generator.parking():
                generator.check(policy)
                return generator.flush(policy)

    def resume(self, operation_id: str) -> Reply:
        """Step again; without a pause of this operation nothing happens."""
        with self._busy:
            self._rank.faults.hit("resume")
            lease = self._pauses.lease
            if lease is None or lease.operation_id != operation_id:
                if lease is None and self._rank.model is not None:
                    self._rank.model.generator.let_go()
                return self._rank.reply(operation_id)
            if self._commits.unproven:
                raise Internal(
                    f"operation {operation_id} was committed and is not proven",
                    advice="verify it or roll it back; else its pause runs out and undoes it",
                )
            self._pauses.take_out()
        lease.release()
        return self._rank.reply(operation_id, digest=self._rank.loaded().updater.digest)

    def settle(self, operation_id: str) -> Reply:
        """Come to rest on what is proven: for a rank that lives while others do not.

        What was committed without a proof is undone, what is staged or retained is dropped, a pause ends.
        """
        with self._busy:
            self._rank.faults.hit("settle")
            model, lease = self._rank.loaded(), self._pauses.lease
            overlap = model.overlap
            if overlap is not None and not (overlap.switched and not self._commits.unproven):
                self._commits.give_up(model, overlap)
            elif self._commits.unproven and lease is not None:
                self._commits.undo(model, lease.operation_id)
            model.updater.clear()
            digest = model.updater.verify(strict=False)
            self._pauses.take_out()
            self._staging.forget(operation_id)
        if lease is not None:
            lease.release()
        else:
            model.generator.let_go()
        return self._rank.reply(operation_id, digest=digest)

    def release(self, operation_id: str, *, previous: bool) -> Reply:
        """Drop what is staged, and the retained version if asked to."""
        with self._busy:
            self._staging.forget(operation_id)
            if self._rank.model is None:
                return self._rank.reply(operation_id)
            overlap = self._rank.model.overlap
            if overlap is not None and overlap.operation_id == operation_id:
                if overlap.switched:
                    raise Internal(f"operation {operation_id} has left its old instance behind", advice="retire it")
                self._commits.give_up(self._rank.model, overlap)
            self._rank.model.updater.release(operation_id, previous=previous)
            self._rank.faults.hit("release")
            return self._rank.reply(operation_id, digest=self._rank.model.updater.digest)
