"""The loops around the passes: the probes tell of progress, not of existence; nothing that a pass raises ends one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest

from modelswap_operator.api.labels import MODELVERSIONS
from modelswap_operator.effects.kube import ApiConflict, ApiError, ApiUnavailable
from modelswap_operator.handlers import wiring
from modelswap_operator.runtime import supervisor as supervisors
from modelswap_operator.runtime.health import SILENT_SECONDS, STUCK_SECONDS, alive, ready
from modelswap_operator.runtime.metrics import Metrics
from modelswap_operator.runtime.supervisor import Supervisor
from modelswap_operator.runtime.task import Again, ObjectTask
from modelswap_operator.runtime.tools import Tools

AWAY = ApiUnavailable(verb="get", path="/", status=0, message="connection refused")


class ApiOfNothing:
    """An API server without objects, that answers when it is told to, or not at all."""

    def __init__(self) -> None:
        self.answers = asyncio.Event()
        self.answers.set()
        self.away = 0
        self.lists = 0

    async def list(self, path: str, **_: Any) -> list[dict[str, Any]]:
        self.lists += 1
        await self.answers.wait()
        if self.away:
            self.away -= 1
            raise AWAY
        return []

    async def look(self, **_: Any) -> None:
        """A look at a slot, which asks it too."""
        await self.answers.wait()
        raise AWAY


class Clock:
    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        self.seconds += 0.0001  # time goes on by itself too, a little
        return self.seconds


class World:
    """Tools for loops, and what a test moves in them."""

    def __init__(self) -> None:
        self.api, self.clock, self.metrics = ApiOfNothing(), Clock(), Metrics()
        unused: Any = None
        api: Any = self.api
        self.tools = Tools(
            kube=api, observer=api, performer=unused, events=unused, metrics=self.metrics,
            fencing=SimpleNamespace(epoch=1),
            resync=0.01, now=lambda: datetime.now(UTC), clock=self.clock, random=lambda: 0.0,
        )  # fmt: skip

    def count(self, result: str) -> float:
        labels = {"kind": "Thing", "result": result}
        return self.metrics.registry.get_sample_value("modelswap_reconcile_total", labels) or 0

    def queue(self, name: str, kind: str = "Thing") -> float:
        return self.metrics.registry.get_sample_value(f"modelswap_workqueue_{name}", {"kind": kind}) or 0


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisors, "BEAT_SECONDS", 0.001)


@pytest.fixture
async def world() -> World:
    return World()


@asynccontextmanager
async def running(world: World) -> AsyncIterator[Supervisor]:
    supervisor = Supervisor(world.tools, namespaces=["here"])
    turning = asyncio.create_task(supervisor.run())
    yield supervisor
    turning.cancel()
    await supervisor.close()
    await asyncio.gather(turning, return_exceptions=True)


async def until(check: Callable[[], bool]) -> None:
    while not check():
        await asyncio.sleep(0)


async def test_a_first_list_that_hangs_is_neither_ready_nor_for_long_alive(world: World) -> None:
    world.api.answers.clear()
    async with running(world) as supervisor:
        await until(lambda: world.api.lists == 1)
        assert (alive(supervisor.pulse())[0], ready(supervisor.pulse())[0]) == (200, 503)
        world.clock.seconds += SILENT_SECONDS + 1
        status, text = alive(supervisor.pulse())
        assert (status, text) == (503, "the loop has been silent for 31 s")
        world.api.answers.set()
        await until(lambda: alive(supervisor.pulse())[0] == 200)
        await until(lambda: ready(supervisor.pulse())[0] == 200)


async def test_an_api_server_that_is_away_leaves_it_alive_but_not_ready(world: World) -> None:
    world.api.away = 5
    async with running(world) as supervisor:
        while world.api.away:
            world.clock.seconds += SILENT_SECONDS + 1  # an outage much longer than silence may be
            await until(lambda: alive(supervisor.pulse())[0] == 200)
            assert ready(supervisor.pulse()) == (503, "the first list is not done")
        await until(lambda: ready(supervisor.pulse())[0] == 200)


async def test_a_pass_that_hangs_is_told_however_well_the_loop_turns(world: World) -> None:
    async with running(world) as supervisor:
        await until(lambda: ready(supervisor.pulse())[0] == 200)
        world.api.answers.clear()
        supervisor.wake(MODELVERSIONS, "here", "slot")
        await until(lambda: supervisor.pulse().oldest_pass > 0)
        world.clock.seconds += STUCK_SECONDS + 1
        status, text = alive(replace(supervisor.pulse(), beat_age=0.0))
        assert (status, text) == (503, "a pass has been going on for 181 s")
        world.api.answers.set()
        await until(lambda: supervisor.pulse().oldest_pass == 0)


class Thing(ObjectTask):
    """A reconciler whose passes are scripted."""

    kind = "Thing"
    plural = "things"

    def __init__(self, world: World, *passes: Callable[[], Awaitable[Again]]) -> None:
        super().__init__(world.tools, namespace="here", name="thing")
        self.passes = list(passes)
        self.made = 0

    async def look_and_act(self) -> Again:
        self.made += 1
        return await self.passes.pop(0)() if self.passes else Again(finished=True)


def fails(error: Exception) -> Callable[[], Awaitable[Again]]:
    async def once() -> Again:
        raise error

    return once


async def works() -> Again:
    return Again()


async def test_whatever_a_pass_raises_is_counted_and_tried_again(world: World) -> None:
    conflict = ApiConflict(verb="patch", path="/", status=409, message="changed meanwhile")
    refused = ApiError(verb="patch", path="/", status=403, message="forbidden")
    thing = Thing(world, fails(AWAY), fails(refused), fails(ValueError("a defect")), fails(conflict), works)
    await asyncio.wait_for(thing.run(), 60)
    assert thing.made == 6
    assert [world.count(result) for result in ("error", "requeue", "success")] == [3, 1, 2]


async def test_many_wakes_are_one_pass_and_one_during_a_pass_is_not_lost(world: World) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def slow() -> Again:
        begun.set()
        await go_on.wait()
        return Again(finished=True)

    thing = Thing(world, slow)
    turning = asyncio.create_task(thing.run())
    await begun.wait()
    for _ in range(5):
        thing.wake()
    go_on.set()
    await asyncio.wait_for(turning, 60)
    assert thing.made == 2  # it was over for the first, had nobody woken it


async def test_a_pass_that_was_asked_for_is_counted_with_its_wait_and_its_retries(world: World) -> None:
    async def slow() -> Again:
        for _ in range(3):
            thing.wake()  # asked for in the middle of a pass: once, and it waits for the end
        world.clock.seconds += 7
        return Again()

    async def late() -> Again:
        return Again(seconds=0.0)

    conflict = ApiConflict(verb="patch", path="/", status=409, message="changed meanwhile")
    thing = Thing(world, slow, late, fails(AWAY), fails(conflict))
    assert world.queue("adds_total") == 1, "what is new wants a pass"
    await asyncio.wait_for(thing.run(), 60)
    assert (thing.made, world.queue("adds_total"), world.queue("retries_total")) == (5, 5, 2)
    assert world.queue("queue_duration_seconds_count") == 5
    assert 7 < world.queue("queue_duration_seconds_sum") < 8


async def test_what_waits_and_what_hangs_is_shown(world: World) -> None:
    def shown(name: str) -> float:
        return world.queue(name, kind="ModelVersion")

    async with running(world) as supervisor:
        await until(lambda: ready(supervisor.pulse())[0] == 200)
        world.api.answers.clear()
        supervisor.wake(MODELVERSIONS, "here", "slot")
        await until(lambda: supervisor.pulse().oldest_pass > 0)
        supervisor.wake(MODELVERSIONS, "here", "slot")
        world.clock.seconds += 50
        await until(lambda: shown("longest_running_processor_seconds") > 50)
        assert shown("depth") == 1
        world.api.answers.set()
        await until(lambda: (shown("depth"), shown("longest_running_processor_seconds")) == (0, 0))


def test_kopf_waits_for_the_api_server_without_an_end_and_at_a_bounded_pace() -> None:
    pauses = wiring.settings().networking.error_backoffs
    for _ in range(2):  # each request starts from the beginning
        first = list(islice(iter(pauses), 1000))  # type: ignore[arg-type]
        assert len(first) == 1000
        assert first[0] == 1
        assert max(first) == wiring.LAST_BACKOFF
