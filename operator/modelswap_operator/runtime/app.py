"""The operator put together: becomes the decider, then runs kopf's watches and the tasks of the objects."""

import asyncio
import random
import time
from contextlib import AsyncExitStack
from dataclasses import replace

import kopf
import structlog
from kopf._core.engines.peering import Identity

from modelswap_operator.effects.engine_client import EngineClient
from modelswap_operator.effects.events import EventWriter
from modelswap_operator.effects.kube import Kube, load_configuration
from modelswap_operator.effects.observe import Observer
from modelswap_operator.effects.perform import Performer
from modelswap_operator.effects.tokens import NoTokens, ServiceAccountTokens, Tokens
from modelswap_operator.effects.trust import Trust
from modelswap_operator.handlers import wiring
from modelswap_operator.planning.changes import ChangePolicy
from modelswap_operator.runtime import health
from modelswap_operator.runtime.changes import ChangeWatch
from modelswap_operator.runtime.clock import SteadyClock, system_time
from modelswap_operator.runtime.election import claim_epoch, election
from modelswap_operator.runtime.lease import FencedLease
from modelswap_operator.runtime.metrics import Metrics
from modelswap_operator.runtime.settings import Settings
from modelswap_operator.runtime.supervisor import Supervisor
from modelswap_operator.runtime.tools import Tools

EXIT_OK, EXIT_FAILED, EXIT_LEASE_LOST = 0, 1, 3
STOP_SECONDS = 10.0

_log = structlog.get_logger(__name__)


class Operator:
    """One process."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._clock = SteadyClock()
        self.metrics = Metrics(clock_ahead=lambda: self._clock.ahead().total_seconds())
        self.http_port = 0
        self._supervisor: Supervisor | None = None

    def pulse(self) -> health.Pulse:
        """Return how the process is, for the probes."""
        return self._supervisor.pulse() if self._supervisor is not None else health.Pulse(leading=False)

    async def run(self, stop: asyncio.Event) -> int:
        """Run until ``stop`` is set, the lease is lost or something fails; returns the exit code."""
        settings = self._settings
        async with AsyncExitStack() as stack:
            configuration = await load_configuration(settings.kubeconfig)
            kube = await stack.enter_async_context(Kube(configuration, observe=self.metrics.requested))
            self.http_port = await stack.enter_async_context(
                health.served(
                    host=settings.http_host,
                    port=settings.http_port,
                    pulse=self.pulse,
                    registry=self.metrics.registry,
                )
            )
            lock = FencedLease(
                kube,
                namespace=settings.pod_namespace,
                name=settings.lease_name,
                pod=settings.pod_name,
                now=system_time,
            )
            elected = asyncio.Event()
            holding = asyncio.create_task(self._hold(lock, elected), name="lease")
            stopping = asyncio.create_task(stop.wait(), name="stop")
            try:
                return await self._lead_when(kube, lock, elected=elected, holding=holding, stopping=stopping)
            finally:
                holding.cancel()
                stopping.cancel()
                await asyncio.gather(holding, stopping, return_exceptions=True)
                if elected.is_set() and settings.leader_elect:
                    await lock.release()

    async def _hold(self, lock: FencedLease, elected: asyncio.Event) -> None:
        """Get the lease and, with leader election, keep it; ends when it is lost."""
        if self._settings.leader_elect:
            await election(lock, self._settings, elected=elected).run()
            return
        await claim_epoch(lock, self._settings, now=system_time)
        elected.set()
        await asyncio.Event().wait()

    async def _lead_when(
        self,
        kube: Kube,
        lock: FencedLease,
        *,
        elected: asyncio.Event,
        holding: asyncio.Task[None],
        stopping: asyncio.Task[bool],
    ) -> int:
        waiting = asyncio.create_task(elected.wait(), name="elected")
        await asyncio.wait({waiting, holding, stopping}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if stopping.done() or not elected.is_set():
            return _code(stopping=stopping, holding=holding)
        leading = asyncio.create_task(self._lead(kube, lock), name="lead")
        await asyncio.wait({leading, holding, stopping}, return_when=asyncio.FIRST_COMPLETED)
        ended_by_itself = leading.done()
        leading.cancel()
        ended = (await asyncio.gather(leading, return_exceptions=True))[0]
        if isinstance(ended, Exception):
            _log.error("the operator failed", exc_info=ended)
            return EXIT_FAILED
        return EXIT_OK if ended_by_itself else _code(stopping=stopping, holding=holding)

    async def _lead(self, kube: Kube, lock: FencedLease) -> None:
        """Watch and reconcile until cancelled, or until kopf ends (a signal, or a fatal error)."""
        settings = self._settings
        self.metrics.leading(lock.epoch)
        _log.info("leading", epoch=lock.epoch, namespaces=settings.namespaces or "all")
        trust = Trust(
            mode=settings.control_tls,
            ca_file=settings.control_ca_file,
            server_name=settings.control_server_name,
            clock=time.monotonic,
            expires=self.metrics.authorities_expire,
        )
        await trust.load()
        async with EngineClient(self._tokens(kube), trust=trust) as engines:
            changes = ChangeWatch(kube, namespace=settings.pod_namespace, changed=self._wake_all)
            supervisor = Supervisor(self._tools(kube, engines, lock, changes), namespaces=settings.namespaces)
            self._supervisor = supervisor
            await changes.look()
            reading = asyncio.create_task(changes.run(), name="changes")
            stop_watching = asyncio.Event()
            watching = asyncio.create_task(self._watch(supervisor, stop_watching), name="kopf")
            turning = asyncio.create_task(supervisor.run(), name="supervisor")
            try:
                await asyncio.wait({watching, turning, reading}, return_when=asyncio.FIRST_COMPLETED)
                for task in (watching, turning, reading):
                    if task.done():
                        task.result()
            finally:
                reading.cancel()
                turning.cancel()
                await supervisor.close()
                stop_watching.set()
                await asyncio.wait({watching}, timeout=STOP_SECONDS)
                watching.cancel()
                await asyncio.gather(watching, turning, reading, return_exceptions=True)

    def _wake_all(self) -> None:
        if self._supervisor is not None:
            self._supervisor.wake_all()

    async def _watch(self, supervisor: Supervisor, stop: asyncio.Event) -> None:
        await kopf.operator(
            registry=wiring.registry(wake=supervisor.wake, seen=self.metrics.seen),
            settings=wiring.settings(),
            standalone=True,
            # kopf would ask for the name of the user, and a container's user has none.
            identity=Identity(self._settings.pod_name),
            clusterwide=not self._settings.namespaces,
            namespaces=self._settings.namespaces,
            stop_flag=stop,
        )

    def _tokens(self, kube: Kube) -> Tokens:
        settings = self._settings
        if not settings.service_account:
            _log.warning("SERVICE_ACCOUNT is not set: sidecars are called without a token")
            return NoTokens()
        return ServiceAccountTokens(
            kube, namespace=settings.pod_namespace, account=settings.service_account, now=self._clock.now
        )

    def _tools(self, kube: Kube, engines: EngineClient, lock: FencedLease, changes: ChangeWatch) -> Tools:
        draw, now = random.SystemRandom().random, self._clock.now

        def policy() -> ChangePolicy:
            return replace(changes.policy(), ahead=self._clock.ahead())

        return Tools(
            kube=kube,
            observer=Observer(
                kube=kube,
                engines=engines,
                now=now,
                random=draw,
                default_port=self._settings.control_port,
                operator=self._settings.identity,
            ),
            performer=Performer(kube=kube, engines=engines),
            events=EventWriter(kube, instance=self._settings.pod_name, now=system_time),
            metrics=self.metrics,
            fencing=lock,
            resync=self._settings.resync,
            changes=policy,
            now=now,
            clock=time.monotonic,
            random=draw,
        )


def _code(*, stopping: asyncio.Task[bool], holding: asyncio.Task[None]) -> int:
    if stopping.done():
        return EXIT_OK
    failure = holding.exception() if holding.done() and not holding.cancelled() else None
    if failure is None:
        return EXIT_LEASE_LOST
    _log.error("the lease could not be kept", exc_info=failure)
    return EXIT_FAILED
