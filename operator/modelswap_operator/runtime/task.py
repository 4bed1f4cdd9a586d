"""The task of one object: woken by events, by its own timer, and at the latest at the resync interval.

It knows nothing of what a pass does. Nothing but cancellation leaves it: whatever a pass raises is logged, counted and
tried again later.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from modelswap_operator.effects.kube import ApiConflict, ApiError
from modelswap_operator.planning.backoff import delay
from modelswap_operator.runtime.metrics import Metrics

PAUSE_SECONDS = 0.02
"""The least time between two passes of one object, whatever wakes it."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class Again:
    """When to look again without being woken: after ``seconds``, at the resync (None), or never (``finished``)."""

    seconds: float | None = None
    finished: bool = False


class ObjectTask(ABC):
    """One sequential reconciler."""

    def __init__(
        self,
        *,
        kind: str,
        namespace: str,
        name: str,
        resync: float,
        random: Callable[[], float],
        metrics: Metrics,
    ) -> None:
        self.kind = kind
        self.namespace = namespace
        self.name = name
        self.pass_began: float | None = None
        self._resync = resync
        self._random = random
        self._metrics = metrics
        self._woken = asyncio.Event()
        self._failures = 0

    @abstractmethod
    async def look_and_act(self) -> Again:
        """Make one pass."""

    def wake(self) -> None:
        """Ask for a pass; several wakes before it are one."""
        self._woken.set()

    @property
    def wanted(self) -> bool:
        """True when a pass has been asked for and not begun."""
        return self._woken.is_set()

    async def run(self) -> None:
        """Make passes until the object is gone for good."""
        while True:
            self._woken.clear()
            again = await self._guarded()
            if again.finished and not self.wanted:
                return
            await asyncio.sleep(PAUSE_SECONDS)
            await self._rest(again.seconds)

    async def _rest(self, seconds: float | None) -> None:
        limit = self._resync * (0.8 + 0.4 * self._random())
        try:
            async with asyncio.timeout(limit if seconds is None else min(max(seconds, 0.0), limit)):
                await self._woken.wait()
        except TimeoutError:
            return

    async def _guarded(self) -> Again:
        """Make a pass, and turn whatever it raises into a later one."""
        self.pass_began = time.monotonic()
        result = "success"
        try:
            with self._metrics.working(self.kind):
                again = await self.look_and_act()
            self._failures = 0
            result = "success" if again.seconds is None else "requeue_after"
        except ApiConflict:
            again, result = Again(seconds=0.0), "requeue"
        except ApiError as error:
            _log.warning("pass failed", kind=self.kind, namespace=self.namespace, name=self.name, error=str(error))
            again, result = self._later(), "error"
        except Exception:  # noqa: BLE001 - the loop of an object must outlive any defect in one of its passes
            _log.exception("pass failed", kind=self.kind, namespace=self.namespace, name=self.name)
            again, result = self._later(), "error"
        finally:
            began, self.pass_began = self.pass_began, None
            self._metrics.reconciled(self.kind, result, time.monotonic() - (began or 0.0))
        return again

    def _later(self) -> Again:
        self._failures += 1
        return Again(seconds=delay(self._failures, self._random()).total_seconds())
