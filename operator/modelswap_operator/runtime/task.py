"""The task of one object: woken by events, by its own timer, and at the latest at the resync interval.

It knows nothing of what a pass does. Nothing but cancellation leaves it: whatever a pass raises is logged, counted and
tried again later.
"""

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

import msgspec
import structlog

from modelswap_operator.effects.kube import ApiConflict, ApiError, ApiNotFound
from modelswap_operator.effects.status import apply_status
from modelswap_operator.planning.backoff import delay
from modelswap_operator.runtime.tools import Tools

PAUSE_SECONDS = 0.02
"""The least time between two passes of one object, whatever wakes it."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class Again:
    """When to look again without being woken: after ``seconds``, at the resync (None), or never (``finished``)."""

    seconds: float | None = None
    finished: bool = False


class ObjectTask(ABC):
    """One sequential reconciler.

    Attributes:
        standings: what the objects that it speaks for were at the last look: by kind, in one word for the metrics.
    """

    kind: ClassVar[str]
    plural: ClassVar[str]

    def __init__(self, tools: Tools, *, namespace: str, name: str) -> None:
        self.namespace = namespace
        self.name = name
        self.pass_began: float | None = None
        self.standings: Counter[tuple[str, str]] = Counter()
        self._tools = tools
        self._woken = asyncio.Event()
        self._asked_at = 0.0
        self._failures = 0
        self.wake()

    @abstractmethod
    async def look_and_act(self) -> Again:
        """Make one pass."""

    async def close(self) -> None:  # noqa: B027 - most have nothing to end
        """End what the task started beside its passes."""

    async def show(self, status: msgspec.Struct, *, resource_version: str) -> bool:
        """Write the object's status; False when the object was deleted meanwhile.

        Raises:
            ApiConflict: the object has changed since it was read in this version.
        """
        try:
            await apply_status(
                self._tools.kube,
                kind=self.kind,
                plural=self.plural,
                namespace=self.namespace,
                name=self.name,
                resource_version=resource_version,
                status=status,
            )
        except ApiNotFound:
            return False
        self._tools.metrics.status_written(self.kind)
        return True

    def wake(self) -> None:
        """Ask for a pass; several wakes before it are one."""
        if not self.wanted:
            self._woken.set()
            self._asked_at = self._tools.clock()
            self._tools.metrics.asked(self.kind)

    @property
    def wanted(self) -> bool:
        """True when a pass has been asked for and not begun."""
        return self._woken.is_set()

    async def run(self) -> None:
        """Make passes until the object is gone for good."""
        while True:
            self._tools.metrics.begun(self.kind, self._tools.clock() - self._asked_at)
            self._woken.clear()
            again = await self._guarded()
            if again.finished and not self.wanted:
                return
            await asyncio.sleep(PAUSE_SECONDS)
            await self._rest(again.seconds)

    async def _rest(self, seconds: float | None) -> None:
        limit = self._tools.resync * (0.8 + 0.4 * self._tools.random())
        try:
            async with asyncio.timeout(limit if seconds is None else min(max(seconds, 0.0), limit)):
                await self._woken.wait()
        except TimeoutError:
            self.wake()  # it is time

    async def _guarded(self) -> Again:
        """Make a pass, and turn whatever it raises into a later one."""
        self.pass_began = self._tools.clock()
        result = "success"
        try:
            with self._tools.metrics.working(self.kind):
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
            self._tools.metrics.reconciled(self.kind, result, self._tools.clock() - (began or 0.0))
        return again

    def _later(self) -> Again:
        self._failures += 1
        return Again(seconds=delay(self._failures, self._tools.random()).total_seconds())
