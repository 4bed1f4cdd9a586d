"""The map of tasks: one for each slot that has an object, an adapter, or an assignment that outlived its object.

Watches only make things fast. Every ``resync`` the kinds and the assignments are listed again, so that an event lost
in an outage costs time and nothing else.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Final

import structlog

from modelswap_operator.api.labels import LORAADAPTERS, MODELVERSIONS, SLOT_LABEL
from modelswap_operator.effects import assignment, paths
from modelswap_operator.effects.kube import ApiError
from modelswap_operator.effects.objects import slot_of
from modelswap_operator.runtime.health import Pulse
from modelswap_operator.runtime.slot_task import SlotTask
from modelswap_operator.runtime.task import ObjectTask
from modelswap_operator.runtime.tools import Tools

Key = tuple[str, str, str]
BEAT_SECONDS = 2.0
_KINDS: Final[dict[str, type[ObjectTask]]] = {SlotTask.plural: SlotTask}

_log = structlog.get_logger(__name__)


class Supervisor:
    """Owns the tasks of all objects."""

    def __init__(self, tools: Tools, *, namespaces: Sequence[str]) -> None:
        self._tools = tools
        self._namespaces: tuple[str | None, ...] = tuple(namespaces) or (None,)
        self._tasks: dict[Key, tuple[ObjectTask, asyncio.Task[None]]] = {}
        self._listed = False
        self._beat = tools.clock()
        for kind in _KINDS.values():
            tools.metrics.queue(
                kind.kind,
                depth=partial(lambda of: sum(item.wanted for item in self._of(of)), kind),
                longest=partial(lambda of: self._oldest(self._of(of)), kind),
            )

    def wake(self, plural: str, namespace: str, name: str) -> None:
        """Have an object looked at soon; its task is made when there is none."""
        key = (plural, namespace, name)
        known = self._tasks.get(key)
        if known is not None and not known[1].done():
            known[0].wake()
            return
        task = _KINDS[plural](self._tools, namespace=namespace, name=name)
        self._tasks[key] = (task, asyncio.create_task(task.run(), name=f"{plural} {namespace}/{name}"))

    def wake_all(self) -> None:
        """Have every object looked at soon."""
        for item, _ in self._tasks.values():
            item.wake()

    async def run(self) -> None:
        """List everything now and every resync; beat in between, so that liveness means that this loop turns."""
        while True:
            await self._list_all()
            ends = self._tools.clock() + (self._tools.resync if self._listed else BEAT_SECONDS)
            while self._tools.clock() < ends:
                self._beat = self._tools.clock()
                self._sweep()
                await asyncio.sleep(BEAT_SECONDS)

    async def close(self) -> None:
        """End all tasks; operations that run in pods go on there."""
        running = list(self._tasks.values())
        self._tasks.clear()
        for _, task in running:
            task.cancel()
        await asyncio.gather(*(task for _, task in running), return_exceptions=True)
        for item, _ in running:
            await item.close()

    def pulse(self) -> Pulse:
        """Return how the loops are, for the probes."""
        now = self._tools.clock()
        return Pulse(
            leading=True,
            listed=self._listed,
            beat_age=now - self._beat,
            oldest_pass=self._oldest(item for item, _ in self._tasks.values()),
        )

    async def _list_all(self) -> None:
        try:
            for namespace in self._namespaces:
                for key in await self._existing(namespace):
                    self.wake(*key)
            self._listed = True
        except ApiError as error:
            _log.warning("listing failed, trying again", error=str(error))

    async def _existing(self, namespace: str | None) -> list[Key]:
        """Return the objects of a namespace, and slots that only an adapter or a left assignment speaks of."""
        kube = self._tools.kube
        found: set[Key] = set()
        for plural in _KINDS:
            for item in await kube.list(paths.custom(plural, namespace)):
                found.add((plural, item["metadata"]["namespace"], item["metadata"]["name"]))
            self._beat = self._tools.clock()
        for item in await kube.list(paths.custom(LORAADAPTERS, namespace)):
            if slot := slot_of(item):
                found.add((MODELVERSIONS, item["metadata"]["namespace"], slot))
        for item in await kube.list(paths.core("configmaps", namespace), label_selector=SLOT_LABEL):
            current, _ = assignment.parse(item)
            if current is not None and not current.released:
                found.add((MODELVERSIONS, item["metadata"]["namespace"], item["metadata"]["labels"][SLOT_LABEL]))
        self._beat = self._tools.clock()
        return sorted(found)

    def _sweep(self) -> None:
        for key in [key for key, (_, task) in self._tasks.items() if task.done()]:
            del self._tasks[key]
        self._tools.metrics.standing(sum((item.standings for item, _ in self._tasks.values()), Counter()))

    def _of(self, kind: type[ObjectTask]) -> list[ObjectTask]:
        return [item for item, _ in self._tasks.values() if isinstance(item, kind)]

    def _oldest(self, items: Iterable[ObjectTask]) -> float:
        """Return for how many seconds the oldest pass has been going on, 0 where there is none."""
        now = self._tools.clock()
        return now - min((item.pass_began for item in items if item.pass_began is not None), default=now)
