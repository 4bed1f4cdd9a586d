"""Adapters on replicas of which one goes and comes back, with replicas in memory."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from modelswap_engine.backends.adapters import LoadAdapter
from modelswap_engine.backends.embedded import wire
from modelswap_engine.backends.embedded.lora.replicas import ReplicatedAdapters
from modelswap_engine.backends.port import Reply
from modelswap_engine.protocol.errors import ModelswapError, NotFound, SourceNotFound, WorkerLost


class Replica:
    """One replica: what the front knows of it, and what it really holds."""

    def __init__(self, replica: int) -> None:
        self.replica = replica
        self.serving = self.alive = True
        self.adapters: set[str] = set()
        self.slots: dict[int, str] = {}
        self.held: dict[int, str] = {}
        self.refuses: set[str] = set()
        self.hanging: asyncio.Event | None = None

    def lose(self) -> None:
        self.serving = self.alive = False
        self.adapters, self.slots, self.held = set(), {}, {}

    async def act(self, order: Any) -> Reply:
        if self.hanging is not None:
            await self.hanging.wait()
        if not self.alive:
            raise WorkerLost("it is gone")
        error: ModelswapError | None = None
        match order:
            case wire.LoadAdapterCall(order=load):
                error = SourceNotFound("gone") if load.adapter_id in self.refuses else None
            case wire.PlaceAdapterCall(adapter_id=adapter_id, slot=slot):
                if adapter_id in self.adapters:
                    self.held[slot] = adapter_id
                else:
                    error = NotFound(adapter_id)
            case wire.ClearSlotCall(slot=slot):
                self.held.pop(slot, None)
            case wire.DropAdapterCall(adapter_id=adapter_id):
                self.held = {slot: held for slot, held in self.held.items() if held != adapter_id}
        return Reply(operation_id="", rank=self.replica, boot_id="b", error=error.body() if error else None)


class Engine:
    def __init__(self) -> None:
        self.replicas = [Replica(0), Replica(1)]
        groups: Any = self.replicas
        self.adapters = ReplicatedAdapters(groups, ask=self._ask, load_seconds=10)

    async def _ask(self, build: Any, what: str, *, groups: Any = None, **bounds: Any) -> list[Reply]:
        return [await group.act(build(1)) for group in groups]

    async def load(self, name: str) -> list[str]:
        order = LoadAdapter(operation_id="op", adapter_id=name, digest=name, config="{}", modules=())
        return errors(await self.adapters.load(order))

    async def come_back(self, replica: Replica) -> None:
        replica.alive = True
        group: Any = replica
        await self.adapters.catch_up(group)
        replica.serving = True


def errors(replies: Sequence[Reply]) -> list[str]:
    return [reply.error.code for reply in replies if reply.error is not None]


@pytest.fixture
def engine() -> Engine:
    return Engine()


async def test_a_replica_that_comes_back_gets_what_the_other_has(engine: Engine) -> None:
    stays, goes = engine.replicas
    assert await engine.load("a") == []
    assert errors(await engine.adapters.place("a", 0)) == []
    goes.lose()
    # While it is away adapters come, are placed and go as if there were no other replica.
    assert await engine.load("b") == []
    assert errors(await engine.adapters.place("b", 1)) == []
    assert await engine.load("c") == []
    assert errors(await engine.adapters.drop("c")) == []
    assert (stays.adapters, stays.held) == ({"a", "b"}, {0: "a", 1: "b"})
    await engine.come_back(goes)
    assert (goes.adapters, goes.slots, goes.held) == (stays.adapters, stays.slots, stays.held)


async def test_what_comes_and_goes_while_it_is_caught_up_is_not_missed(engine: Engine) -> None:
    stays, goes = engine.replicas
    await engine.load("a")
    await engine.adapters.place("a", 0)
    goes.lose()
    goes.hanging = asyncio.Event()
    coming = asyncio.ensure_future(engine.come_back(goes))
    await asyncio.sleep(0)
    assert await engine.load("b") == []
    assert errors(await engine.adapters.place("b", 0)) == []
    assert errors(await engine.adapters.drop("a")) == []
    goes.hanging.set()
    await coming
    assert goes.adapters == stays.adapters == {"b"}
    assert goes.held == stays.held == {0: "b"}


async def test_one_whose_source_is_gone_stays_with_the_replica_that_has_it(engine: Engine) -> None:
    stays, goes = engine.replicas
    await engine.load("a")
    await engine.load("b")
    await engine.adapters.place("b", 0)
    goes.lose()
    goes.refuses.add("a")
    await engine.come_back(goes)
    assert (goes.adapters, goes.held) == ({"b"}, {0: "b"})
    # In its slot nobody is left of those who were there before.
    assert errors(await engine.adapters.place("a", 0)) == []
    assert (stays.held, goes.held) == ({0: "a"}, {})
    assert errors(await engine.adapters.clear_slot(0)) == []


async def test_one_that_a_replica_refuses_is_on_none(engine: Engine) -> None:
    engine.replicas[1].refuses.add("a")
    assert await engine.load("a") == ["SourceNotFound"]
    assert [replica.adapters for replica in engine.replicas] == [set(), set()]
    assert errors(await engine.adapters.place("a", 0)) == ["NotFound", "NotFound"]
    engine.replicas[1].lose()
    await engine.come_back(engine.replicas[1])
    assert engine.replicas[1].held == {}


async def test_without_any_replica_the_loss_is_told(engine: Engine) -> None:
    for replica in engine.replicas:
        replica.lose()
    with pytest.raises(WorkerLost):
        await engine.load("a")
    await engine.come_back(engine.replicas[0])
    assert engine.replicas[0].adapters == set()
