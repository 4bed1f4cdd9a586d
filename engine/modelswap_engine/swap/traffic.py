"""The time in which no request enters: how it begins by traffic mode, and that it always ends.

It knows the gate and the lock, not what happens to the weights meanwhile.
"""

import asyncio
from contextlib import suppress
from typing import Final

from modelswap_engine.backends.port import RequestPolicy
from modelswap_engine.protocol.errors import DrainTimeout
from modelswap_engine.protocol.policy import OnTimeout, Traffic, TrafficMode
from modelswap_engine.swap.clock import within
from modelswap_engine.swap.core import Core
from modelswap_engine.swap.lock import Scope
from modelswap_engine.swap.operations import Operation
from modelswap_engine.swap.plan import FALLBACKS, POLICIES

_SLACK_SECONDS: Final = 30.0
_POLL_SECONDS: Final = 0.01


class Window:
    """The closed time of one operation."""

    def __init__(self, core: Core, operation: Operation, traffic: Traffic) -> None:
        self._core = core
        self._operation = operation
        self._traffic = traffic
        self._hold = f"swap {operation.id}"
        self._claimed = False
        self._closed_at = 0.0
        self.inside = 0

    @property
    def seconds(self) -> float:
        """How long it has been closed."""
        return self._core.clock.monotonic() - self._closed_at

    async def leave_endpoints(self) -> None:
        """For a Drain with other ready pods: let new requests go there before anything waits here.

        Returns when no endpoint should route here any more: some time after the readiness probe was answered with it.
        """
        core, interrupted = self._core, self._operation.interrupted
        if self._traffic.mode is not TrafficMode.DRAIN or self._traffic.peers_ready <= 0:
            return
        core.probed.clear()
        core.closing = True
        core.troubled("Draining", f"waits for its requests to end before {self._operation.id}")
        with suppress(TimeoutError):  # nobody probes here, so no probe decides who routes here
            await within(core.clock, core.settings.probe_seconds, _event(core.probed), unless=interrupted)
        travel = core.clock.sleep(core.settings.propagation_seconds)
        await within(core.clock, core.settings.propagation_seconds + _SLACK_SECONDS, travel, unless=interrupted)

    async def shut(self, *, continuable: bool) -> RequestPolicy:
        """Close the gate and wait as the mode says; returns what the engine must do with requests still running.

        Raises:
            DrainTimeout: requests outlasted the time and the old version is to be kept.
            ModelswapError: the operation was interrupted.
        """
        core, traffic = self._core, self._traffic
        self._closed_at = core.clock.monotonic()
        core.gate.close(self._hold, allowance=traffic.timeout_seconds + _SLACK_SECONDS)
        core.lock.claim(self._operation.id)
        self._claimed = True
        self.inside = core.lock.inside
        policy = POLICIES[traffic.mode]
        if traffic.mode is TrafficMode.DRAIN:
            if await self._idle(Scope.ALL, traffic.timeout_seconds):
                return await self._emptied()
            policy = self._out_of_time(continuable=continuable)
        if not await self._idle(Scope.ADMITTING, core.settings.admit_seconds):
            raise DrainTimeout(
                f"requests did not get from admission into the engine within {core.settings.admit_seconds:g} s",
                advice="try again; look for a tokenizer that hangs if it happens again",
            )
        return policy

    def reopen(self) -> float | None:
        """Let requests in again; returns how long it was closed, None when it was not."""
        if not self._claimed:
            return None
        self._claimed = False
        self._core.lock.release()
        self._core.gate.open(self._hold)
        return self.seconds

    async def _idle(self, scope: Scope, seconds: float) -> bool:
        try:
            await within(self._core.clock, seconds, self._core.lock.idle(scope), unless=self._operation.interrupted)
        except TimeoutError:
            return False
        return True

    async def _emptied(self) -> RequestPolicy:
        """Wait until the engine has noticed that its last request is over.

        What still runs after that has no client any more (it went away), so ending it harms nobody.
        """
        try:
            await within(self._core.clock, self._core.settings.admit_seconds, self._quiet())
        except TimeoutError:
            return RequestPolicy.ABORT
        return RequestPolicy.NONE_RUNNING

    async def _quiet(self) -> None:
        while self._core.engine.running:
            await self._core.clock.sleep(_POLL_SECONDS)

    def _out_of_time(self, *, continuable: bool) -> RequestPolicy:
        waited = f"{self._core.lock.inside} requests did not end within {self._traffic.timeout_seconds:g} s"
        if self._traffic.on_timeout is OnTimeout.CANCEL_SWAP:
            raise DrainTimeout(
                f"{waited}; the old version is kept",
                advice="try again, raise traffic.timeoutSeconds, or set traffic.onTimeout",
            )
        fallback = FALLBACKS[self._traffic.on_timeout]
        if fallback is TrafficMode.RECOMPUTE and not continuable:
            raise DrainTimeout(
                f"{waited}, and they cannot be continued because tokenizer, template, end of text or adapters "
                "change, or prompts have to be tried",
                advice="try again, raise traffic.timeoutSeconds, or set traffic.onTimeout: AbortRequests",
            )
        return POLICIES[fallback]


async def _event(event: asyncio.Event) -> None:
    await event.wait()
