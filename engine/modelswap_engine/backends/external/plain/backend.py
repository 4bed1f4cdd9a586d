"""An engine behind the backend port that loads folders by itself, with nothing of ours in its processes.

An exchange is prepared as folders of whole fusion groups, written by us from proven bytes while requests run: one with
what changes, one with what goes. A commit has the engine, which has no request, load the first. What is live is what
the files were proved to hold, once the engine has answered that it loaded them; its own checksums are read before
requests go on where that is asked for or its answer is not enough, and otherwise right after. No engine is known here
by name.
"""

import asyncio
import time
from collections.abc import Sequence

from modelswap_engine.backends.external import views
from modelswap_engine.backends.external.plain.live import Held
from modelswap_engine.backends.external.plain.tended import Tended
from modelswap_engine.backends.port import PromptTrial, Reply, RequestPolicy, Stage, StageRetained
from modelswap_engine.protocol.errors import Internal, SourceChanged, UnsupportedChange, WorkerLost


class PlainBackend(Tended):
    """See the module and :class:`modelswap_engine.backends.port.Backend`."""

    async def stage(self, order: Stage | StageRetained) -> Sequence[Reply]:
        """Write the folders of the exchange; the engine is not asked anything."""

        async def stage() -> Reply:
            taken, recalled = self._loaded(), dict[int, dict[str, str]]()
            if isinstance(order, Stage):
                recalled = await asyncio.to_thread(self._memory.recall, order.digest, taken.layout)
            staged = await self._book.stage(order, taken.found, recalled=recalled)
            fetched = 0 if isinstance(order, StageRetained) else staged.nbytes
            return self._replies.reply(
                order.operation_id, digest=staged.after.digest, staged_bytes=staged.nbytes, fetched_bytes=fetched
            )

        return await self._replies.answer(order.operation_id, stage)

    async def try_out(self, operation_id: str, trials: Sequence[PromptTrial]) -> Sequence[Reply]:
        """Run prompts on what is live: before the pause the version from before, after the commit the wanted one."""

        async def try_out() -> Reply:
            if self._paused_for != operation_id:
                await self._trials.rehearse(operation_id, trials)
                return self._replies.reply(operation_id)
            try:
                await self._engine.go_on()
                await self._trials.carry_out(operation_id, trials)
            except WorkerLost as error:
                raise self._distrust(error.message) from error
            return self._replies.reply(operation_id)

        return await self._replies.answer(operation_id, try_out)

    async def prepare(self, operation_id: str, *, overlap: bool = False) -> Sequence[Reply]:
        """See that the engine still is the start that holds the live version, and have no other begin on it."""

        async def prepare() -> Reply:
            self._book.of(operation_id)
            if overlap:
                raise UnsupportedChange(views.NO_OVERLAP, advice="use traffic mode Drain")
            facts = await self._engine.control.facts(seconds=self._settings.call)
            if facts.boot_id != self._boot_id:
                raise self._restarted()
            self._require_alive()
            await self._withdraw()
            return self._replies.reply(operation_id, digest=self._book.prepare(operation_id).after.digest)

        return await self._replies.answer(operation_id, prepare)

    async def pause(self, operation_id: str, *, timeout: float, policy: RequestPolicy) -> Sequence[Reply]:
        """Stop the engine once it has let go of its last request."""

        async def pause() -> Reply:
            began = time.monotonic()
            self._require_alive()
            if policy not in {RequestPolicy.NONE_RUNNING, RequestPolicy.ABORT}:
                raise UnsupportedChange(views.NO_MIXTURE, advice="use traffic mode Drain or Abort")
            self._stopped = True
            if policy is RequestPolicy.ABORT:
                self._ended = self._requests.end()  # so that clients hear why, and not half an answer
            await self._engine.pause(policy, seconds=timeout)
            self._paused_for = operation_id
            return self._replies.reply(operation_id, seconds=time.monotonic() - began)

        return await self._replies.answer(operation_id, pause)

    async def commit(self, operation_id: str, policy: RequestPolicy) -> Sequence[Reply]:
        """Have the engine load what is staged over what is live, and forget what it cached."""

        async def commit() -> Reply:
            staged = self._book.prepared(operation_id)
            self._require_pause(operation_id)
            await staged.require_untouched()
            self._book.committed(staged)
            began = time.perf_counter()
            if await self._engine.exchange(staged.there, staged.after):
                try:
                    await staged.require_untouched()
                except SourceChanged as error:
                    raise self._distrust(f"commit: {error.message}") from error
                self._book.answered_well()
            took = (time.perf_counter() - began) * 1e6
            return self._replies.reply(
                operation_id, commit_microseconds=took, requests=self._ended, method=views.BY_DISK
            )

        return await self._replies.answer(operation_id, commit)

    def _require_pause(self, operation_id: str) -> None:
        if self._paused_for != operation_id:
            raise Internal(f"operation {operation_id} has not paused the engine, so no weights are exchanged in it")

    async def retire(self, operation_id: str) -> Sequence[Reply]:
        """There is never a second instance."""
        return self._replies.every(self._replies.reply(operation_id))

    async def verify(self, operation_id: str, *, strict: bool) -> Sequence[Reply]:
        """Have what is live proved, by no more than it takes; then the engine calls its weights by their name."""

        async def verify() -> Reply:
            target = self._target()
            self._shown = await self._engine.prove(target, loaded=None if strict else self._book.loaded)
            self._book.proven = target.digest
            return self._replies.reply(operation_id, digest=target.digest)

        return await self._replies.answer(operation_id, verify)

    def _target(self) -> Held:
        self._require_alive()
        if self._book.target is None:
            raise Internal(f"{self._engine.name} holds no version that is known")
        return self._book.target

    async def rollback(self, operation_id: str) -> Sequence[Reply]:
        """Take back what this operation has exchanged, where it has."""

        async def rollback() -> Reply:
            self._require_pause(operation_id)
            staged = self._book.undoable(operation_id)
            if staged is not None:
                self._book.proven = ""
                await self._engine.undo(staged)
                self._book.undone(staged)
            return self._replies.reply(operation_id)

        return await self._replies.answer(operation_id, rollback)

    async def resume(self, operation_id: str) -> Sequence[Reply]:
        """Let the engine step again."""

        async def resume() -> Reply:
            self._ended = 0
            if self._stopped:
                await self._engine.resume()
                self._stopped, self._paused_for = False, ""
            return self._replies.reply(operation_id)

        return await self._replies.answer(operation_id, resume)

    async def release(self, operation_id: str, *, previous: bool) -> Sequence[Reply]:
        """Drop what is staged for the operation; of one that was committed, what it replaced is retained."""
        self._staging.stop()

        async def release() -> Reply:
            self._book.release(operation_id, previous=previous)
            await self._tidy()
            return self._replies.reply(operation_id)

        return await self._replies.answer(operation_id, release)
