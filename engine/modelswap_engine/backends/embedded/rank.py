"""One rank's side of the swap: joins the weights core and the generation loop, one control call at a time.

It answers, it never raises: what goes wrong is in the reply. It knows no socket.
"""

import fnmatch
import gc
import threading
import time
from collections.abc import Callable
from typing import Final

import torch

from modelswap_engine.backends.embedded import loading, wire
from modelswap_engine.backends.embedded.faults import Faults
from modelswap_engine.backends.embedded.generator import Generator
from modelswap_engine.backends.embedded.lease import PauseLease
from modelswap_engine.backends.embedded.settings import EmbeddedSettings
from modelswap_engine.backends.port import (
    FinishReason,
    Generate,
    Hashes,
    Load,
    Reply,
    RequestPolicy,
    Stage,
    StageRetained,
    Tokens,
)
from modelswap_engine.protocol.errors import Cancelled, Internal, NotReady
from modelswap_engine.protocol.messages import MemoryState
from modelswap_engine.weights.pace import Pace, lower_priority
from modelswap_engine.weights.updater import WeightUpdater
from modelswap_engine.weights.version import Staged

_PAGE: Final = 4096
_RETRY: Final = 0.1


class Rank:
    """The model of one process and the operation on it.

    Args:
        number: this rank.
        boot_id: of this process.
        settings: of the engine.
        faults: what a test asked to break.
        emit: takes new tokens, from any thread.
        died: called when the generation loop broke.
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
    ) -> None:
        self.number = number
        self.boot_id = boot_id
        self._settings = settings
        self._faults = faults
        self._emit = emit
        self._died = died
        self._busy = threading.RLock()
        self._updater: WeightUpdater | None = None
        self._generator: Generator | None = None
        self._lease: PauseLease | None = None
        self._expired: str = ""
        self._unproven = False
        self._staging: tuple[str, Pace] | None = None

    # Control calls. The lock is there for the one other thread that acts: an expiring pause.

    def load(self, order: Load) -> tuple[Reply, wire.ModelFacts]:
        """Replace whatever is loaded by a whole version, proven by hash."""
        with self._busy:
            self._faults.hit("load")
            started = time.perf_counter()
            self._unload()
            model = loading.build_model(order.directory, order.tensors, pace=Pace())
            updater = WeightUpdater(
                model,
                loading.TransformersLoader(model),
                digest=order.digest,
                checkpoint=order.tensors,
                midway=lambda: self._faults.hit("midway"),
            )
            updater.prove()
            generator = Generator(
                model, self._settings, digest=lambda: updater.digest, emit=self._emit, died=self._died
            )
            generator.start()
            self._updater, self._generator = updater, generator
            context = loading.context_of(model.config)
            facts = wire.ModelFacts(
                architecture=loading.architecture_of(model),
                groups=tuple(group.sources for group in updater.groups),
                vocabulary=loading.vocabulary_of(model),
                max_tokens=min(self._settings.cache_tokens, context or self._settings.cache_tokens),
            )
            reply = self._reply(
                order.operation_id,
                seconds=time.perf_counter() - started,
                fetched_bytes=sum(item.nbytes for item in order.tensors),
                digest=order.digest,
            )
            return reply, facts

    def _unload(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()
        generator, self._generator, self._updater = self._generator, None, None
        if generator is not None:
            generator.stop()
        # The loop and its cache refer to each other; without this the old model would still be there beside the new.
        del generator
        gc.collect()

    def stage(self, order: Stage | StageRetained) -> Reply:
        """Stage in a thread of its own that gives way to decoding; :meth:`cancel_staging` stops it."""
        with self._busy:
            updater = self._loaded()
            started = time.perf_counter()
            if isinstance(order, StageRetained):
                staged = updater.stage_retained(order)
            else:
                staged = self._stage_beside(updater, order)
            return self._reply(
                order.operation_id,
                seconds=time.perf_counter() - started,
                fetched_bytes=staged.fetched_bytes,
                staged_bytes=updater.sizes().staged,
                digest=staged.version.digest,
            )

    def _stage_beside(self, updater: WeightUpdater, order: Stage) -> Staged:
        pace = Pace(bytes_per_second=self._settings.stage_bytes_per_second)
        outcome: list[Staged | BaseException] = []

        def work() -> None:
            try:
                lower_priority(self._settings.stage_niceness)
                self._faults.hit("stage")
                outcome.append(updater.stage(order, pace=pace))
            except BaseException as error:  # noqa: BLE001  # handed to the caller's thread, whatever it is
                outcome.append(error)

        self._staging = (order.operation_id, pace)
        try:
            worker = threading.Thread(target=work, name="stage")
            worker.start()
            worker.join()
        finally:
            self._staging = None
        result = outcome.pop()
        if isinstance(result, BaseException):
            raise result
        return result

    def cancel_staging(self, operation_id: str) -> None:
        """Stop a staging of this operation, if one runs; from any thread."""
        staging = self._staging
        if staging is not None and staging[0] == operation_id:
            staging[1].cancel()

    def prepare(self, operation_id: str) -> Reply:
        """Work out the commit."""
        with self._busy:
            self._faults.hit("prepare")
            updater = self._loaded()
            digest = updater.prepare(operation_id)
            return self._reply(operation_id, staged_bytes=updater.sizes().staged, digest=digest)

    def pause(self, operation_id: str, timeout: float) -> Reply:
        """Park the loop between two steps, by lease; asking again only renews it."""
        with self._busy:
            self._faults.hit("pause")
            updater, generator = self._loaded(), self._running()
            lease = self._lease
            if lease is not None and lease.held:
                if lease.operation_id != operation_id:
                    raise Cancelled(f"the engine is paused by operation {lease.operation_id}")
                lease.renew()
                return self._reply(operation_id, digest=updater.digest)
            lease = PauseLease(
                operation_id,
                generator.parking(),
                seconds=self._settings.pause_lease_seconds,
                expired=self._on_expired,
            )
            seconds = lease.acquire(timeout)
            self._lease, self._expired = lease, ""
            return self._reply(operation_id, seconds=seconds, digest=updater.digest)

    def _on_expired(self, lease: PauseLease) -> None:
        """Undo what was committed but never verified under a pause that nobody came back for."""
        # Whoever holds the lock may be waiting for this very pause to end; then there is nothing to undo.
        while not self._busy.acquire(timeout=_RETRY):
            if lease.withdrawn:
                return
        try:
            if self._lease is not lease or self._updater is None:
                return
            if self._unproven:
                self._updater.rollback(lease.operation_id)
                self._running().flush(RequestPolicy.RECOMPUTE)
                self._unproven = False
            self._lease, self._expired = None, lease.operation_id
        finally:
            self._busy.release()

    def commit(self, operation_id: str, policy: RequestPolicy) -> Reply:
        """Move the pointers and empty the KV cache; the window holds nothing else."""
        with self._busy:
            self._faults.hit("commit")
            self._paused(operation_id)
            updater, generator = self._loaded(), self._running()
            generator.check(policy)
            self._unproven = True
            started = time.perf_counter_ns()
            updater.commit(operation_id)
            requests = generator.flush(policy)
            window = (time.perf_counter_ns() - started) / 1000
            return self._reply(
                operation_id,
                seconds=window / 1e6,
                commit_microseconds=window,
                requests=requests,
                method="pointer",
                digest=updater.digest,
            )

    def verify(self, operation_id: str, *, strict: bool) -> Reply:
        """Prove what is live."""
        with self._busy:
            self._faults.hit("verify")
            started = time.perf_counter()
            digest = self._loaded().verify(strict=strict)
            self._unproven = False
            return self._reply(operation_id, seconds=time.perf_counter() - started, digest=digest)

    def rollback(self, operation_id: str) -> Reply:
        """Put the old tensors back; requests that ran on the new ones are computed again."""
        with self._busy:
            self._faults.hit("rollback")
            self._paused(operation_id)
            updater = self._loaded()
            started = time.perf_counter_ns()
            updater.rollback(operation_id)
            requests = self._running().flush(RequestPolicy.RECOMPUTE)
            window = (time.perf_counter_ns() - started) / 1000
            self._unproven = False
            return self._reply(
                operation_id,
                seconds=window / 1e6,
                commit_microseconds=window,
                requests=requests,
                method="pointer",
                digest=updater.digest,
            )

    def resume(self, operation_id: str) -> Reply:
        """Step again; without a pause of this operation nothing happens."""
        with self._busy:
            self._faults.hit("resume")
            lease = self._lease
            if lease is None or lease.operation_id != operation_id:
                return self._reply(operation_id)
            if self._unproven:
                raise Internal(
                    f"operation {operation_id} was committed and is not proven",
                    advice="verify it or roll it back; else its pause runs out and undoes it",
                )
            self._lease = None
        lease.release()
        return self._reply(operation_id, digest=self._loaded().digest)

    def release(self, operation_id: str, *, previous: bool) -> Reply:
        """Drop what is staged, and the retained version if asked to."""
        with self._busy:
            updater = self._updater
            if updater is not None:
                updater.release(operation_id, previous=previous)
            return self._reply(operation_id, digest=updater.digest if updater else "")

    def _loaded(self) -> WeightUpdater:
        if self._updater is None:
            raise NotReady("the worker has no version loaded", advice="load one")
        return self._updater

    def _running(self) -> Generator:
        if self._generator is None:
            raise NotReady("the worker has no version loaded", advice="load one")
        return self._generator

    def _paused(self, operation_id: str) -> None:
        lease = self._lease
        if lease is not None and lease.held and lease.operation_id == operation_id:
            lease.renew()
            return
        if self._expired == operation_id:
            raise Cancelled(
                f"the pause of operation {operation_id} ended by itself after "
                f"{self._settings.pause_lease_seconds:g} s; nothing of it is live",
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
            digest=digest,
        )

    # What may be asked beside a control call.

    def submit(self, request: Generate) -> None:
        """Start a generation."""
        generator = self._generator
        if generator is None:
            self._emit(
                Tokens(
                    request_id=request.request_id,
                    tokens=(),
                    digest="",
                    finish=FinishReason.ERROR,
                    error="no version is loaded",
                )
            )
            return
        generator.submit(request)

    def abort(self, request_id: str) -> None:
        """End a generation."""
        if self._generator is not None:
            self._generator.abort(request_id)

    def hashes(self, pattern: str) -> Hashes:
        """Re-hash live tensors; consistent, because pointers that move on leave the snapshot alone."""
        updater = self._loaded()
        self._faults.hit("hashes")
        started = time.perf_counter()
        snapshot = updater.snapshot()
        groups = [group for group in updater.groups if any(fnmatch.fnmatchcase(n, pattern) for n in group.sources)]
        found, size = updater.hash(snapshot, groups)
        wanted = {name: value for name, value in found.items() if fnmatch.fnmatchcase(name, pattern)}
        blind = sorted(name for name in updater.unverifiable if fnmatch.fnmatchcase(name, pattern))
        return Hashes(
            tensors={name: value for name, value in wanted.items() if name not in updater.unverifiable},
            bytes=size,
            seconds=time.perf_counter() - started,
            unverifiable=tuple(blind),
        )

    def memory(self) -> MemoryState:
        """Say where the memory is; limits are the front's business."""
        updater, generator = self._updater, self._generator
        sizes = updater.sizes() if updater is not None else None
        return MemoryState(
            model_bytes=sizes.live if sizes else 0,
            staged_bytes=sizes.staged if sizes else 0,
            previous_bytes=sizes.previous if sizes else 0,
            kv_cache_bytes=generator.kv_bytes() if generator is not None else 0,
            rss_bytes=_resident_bytes(),
        )


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * _PAGE


def set_threads(wanted: int, usable: int) -> None:
    """Size torch's thread pool."""
    torch.set_num_threads(wanted or usable)
