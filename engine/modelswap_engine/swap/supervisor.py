"""The task that keeps the right version live: it loads at start, again after a worker died, and goes on trying.

It also repairs live tensors that changed by themselves, looks for such from time to time, and lets retained tensors go.

It never puts anything else in the place of what must be served: where that cannot be loaded, nobody is served.
"""

from modelswap_engine.protocol.engine_state import LoadFailure
from modelswap_engine.protocol.errors import WorkerLost
from modelswap_engine.protocol.messages import VersionRef
from modelswap_engine.swap import loader, recovery, retention
from modelswap_engine.swap.audit import audit, due
from modelswap_engine.swap.backoff import Backoff
from modelswap_engine.swap.clock import within
from modelswap_engine.swap.core import Core, log
from modelswap_engine.swap.records import Outcome, Record, Served, Template
from modelswap_engine.swap.repair import repair
from modelswap_engine.swap.startup import Choice, choose, interrupted


class Supervisor:
    """Keeps a version live.

    Args:
        core: the shared state.
        template: what to serve where nothing was ever assigned.
    """

    def __init__(self, core: Core, *, template: VersionRef) -> None:
        self._core = core
        self._template = template
        self._tried = VersionRef()
        self._attempts = 0
        shortest, longest = core.settings.retry_seconds
        self._backoff = Backoff(shortest=shortest, longest=longest)

    async def run(self) -> None:
        """Watch, until cancelled."""
        core = self._core
        shortest, longest = core.settings.retry_seconds
        delay = shortest
        while True:
            wrong = core.live is None or bool(core.drift.names)
            await self._pause(delay if wrong and not core.quarantined else core.settings.poll_seconds)
            await core.record_owed()
            if core.quarantined or core.stopping:
                continue
            if core.live is None:
                delay = shortest if await self.attempt() else min(longest, delay * 2)
            elif not core.engine.healthy:
                await self._revive()
            elif core.drift.names:
                delay = shortest if await repair(core) else min(longest, delay * 2)
            else:
                await self._keep_house()

    async def _keep_house(self) -> None:
        core = self._core
        if due(core):
            audit(core)
        if retention.expired(core):
            await recovery.guarded(lambda: retention.expire(core))

    async def attempt(self) -> bool:
        """Try once to load what must be served; says whether something is live."""
        core = self._core
        async with core.mutex:
            if core.live is not None or core.quarantined:
                return core.live is not None
            self._attempts += 1
            failure = await recovery.guarded(self._load)
            core.load_failure = LoadFailure(target=self._tried, error=failure.body()) if failure is not None else None
            if failure is not None:
                log.warning("the version that must be served cannot be loaded: %s", failure.message)
                core.unpublish("LoadFailed", failure.body())
                return False
            core.healthy()
            core.accept()
            return True

    async def _load(self) -> None:
        core = self._core
        self._tried = VersionRef()  # where even that cannot be told
        choice = await self._choice()
        self._tried = choice.target
        version = await loader.reload(
            core, choice.target, operation_id=f"load-{core.settings.boot_id}-{self._attempts}"
        )
        # A crash may keep only the first of them, so each must be true without those after it: what is served, how an
        # interrupted swap ended, and only then what makes a template or a file old news.
        records: list[Record] = [Served(version=version.ref)]
        ended = interrupted(core.journal.state, live=version.digest, at=core.clock.timestamp())
        records += [Outcome(status=ended)] if ended is not None else []
        records += [Template(uri=self._template.uri)]
        records += [choice.adopted] if choice.adopted is not None else []
        await core.record_owed(*records)

    async def _choice(self) -> Choice:
        core = self._core
        return choose(
            journal=core.journal.state,
            assignment=await core.assignment(),
            template=self._template,
            pod_uid=core.settings.pod_uid,
        )

    async def _revive(self) -> None:
        """A worker died: the swap in progress gives up and revives it, or this does."""
        core = self._core
        operation = core.operations.current
        if operation is not None and operation.reversible:
            operation.interrupt(WorkerLost("a worker died", advice="it is restarted; try again"))
        await self._calm_down()
        core.preempt()
        async with core.mutex:
            if core.live is not None and not core.engine.healthy:
                revived = await recovery.revive(
                    core, core.live, operation_id=f"revive-{core.settings.boot_id}-{core.restarts}"
                )
                self._backoff.tried(succeeded=revived)

    async def _calm_down(self) -> None:
        """Wait before workers are started that die again and again."""
        core = self._core
        pause = self._backoff.pause(up=core.clock.monotonic() - core.loaded_at)
        if not pause:
            return
        log.warning("a worker died soon after its start; it is started again in %g s", pause)
        if not core.engine.able and not core.reason:
            core.troubled("Recovering", f"a worker keeps dying; it is started again within {pause:g} s")
        await core.clock.sleep(pause)

    async def _pause(self, seconds: float) -> None:
        try:
            await within(self._core.clock, seconds, self._poked())
        except TimeoutError:
            return

    async def _poked(self) -> None:
        await self._core.poked.wait()
        self._core.poked.clear()
