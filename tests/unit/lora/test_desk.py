"""Adapters loaded, used, replaced, evicted and unloaded, with an engine in memory and time by hand."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from modelswap_engine.lora.desk import AdapterDesk
from modelswap_engine.lora.settings import LoraSettings
from modelswap_engine.protocol.adapter_calls import LoadAdapterRequest, ResolveAdaptersRequest, UnloadAdapterRequest
from modelswap_engine.protocol.adapters import AdapterSource, AdapterState, AdapterStatus
from modelswap_engine.protocol.errors import (
    AdapterLimit,
    AdapterNotFound,
    BadRequest,
    DigestMismatch,
    ForeignOwner,
    IncompatibleAdapter,
    InsufficientMemory,
    Internal,
    ModelswapError,
    NotReady,
    SlotsBusy,
    SourceNotFound,
    StaleRevision,
    StateMoved,
    Unavailable,
    WorkerLost,
    WrongPod,
)
from modelswap_engine.protocol.looking import LookRequest, SourceLook
from modelswap_engine.protocol.messages import Fence, VersionRef
from tests.support.clock import ManualClock
from tests.support.fake_adapters import FakeBase, FakeHost, FakeOpener

SIZE = 2 * (4 + 6) * 4
"""Bytes of an adapter of rank 2 on the layout of the tests."""


class World:
    def __init__(self, *, slots: int = 2, **bounds: Any) -> None:
        self.clock = ManualClock()
        self.host = FakeHost(slots=slots)
        self.opener = FakeOpener()
        self.base = FakeBase()
        self.settings = LoraSettings(slots=slots, served_model_name="base", pod_uid="pod", **bounds)
        self.start()

    def start(self) -> None:
        self.desk = AdapterDesk(host=self.host, opener=self.opener, clock=self.clock, settings=self.settings)
        self.desk.attach(self.base)

    async def load(self, name: str, content: str = "one", **options: Any) -> AdapterStatus:
        uri = self.opener.put(f"file:///adapters/{name}/{content}", content, rank=options.pop("rank", 2))
        return await self.clock.run(self.desk.load(self.request(name, uri, **options)))

    def request(
        self,
        name: str,
        uri: str,
        *,
        revision: int = 1,
        epoch: int = 1,
        owner: str = "owner",
        drain: float = 60,
        **more: Any,
    ) -> LoadAdapterRequest:
        return LoadAdapterRequest(
            fence=Fence(pod_uid="pod", owner_uid=owner, epoch=epoch, revision=revision),
            source=AdapterSource(name=name, uri=uri, **more),
            drain_timeout_seconds=drain,
        )

    async def unload(self, name: str, *, seconds: float = 60, revision: int = 2, **fence: Any) -> AdapterStatus:
        given = Fence(**({"pod_uid": "pod", "owner_uid": "owner", "epoch": 1, "revision": revision} | fence))
        request = UnloadAdapterRequest(fence=given, drain_timeout_seconds=seconds)
        return await self.clock.run(self.desk.unload(name, request))

    def states(self) -> dict[str, AdapterState]:
        return {status.id.partition("@")[0]: status.state for status in self.desk.contents()}

    def agrees(self) -> None:
        """The engine has exactly what the registry says."""
        view = self.desk.view()
        assert self.host.held == {status.id for status in view.adapters if status.state is not AdapterState.FAILED}
        assert self.host.slots == {status.slot: status.id for status in view.adapters if status.slot >= 0}


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    yield made
    await made.desk.stop()


async def test_a_loaded_adapter_serves_under_its_name_until_it_is_unloaded(world: World) -> None:
    status = await world.load("a")
    assert (status.state, status.slot, status.bytes, status.rank) == (AdapterState.READY, 0, SIZE, 2)
    assert status.id == f"a@{status.digest.removeprefix('sha256:')[:12]}"
    async with world.desk.use("a") as entry:
        assert entry.id == status.id
        assert world.desk.status("a").references == 1
    assert world.desk.status("a").references == 0
    gone = await world.unload("a")
    assert (gone.state, world.desk.contents()) == (AdapterState.UNLOADED, ())
    world.agrees()
    with pytest.raises(AdapterNotFound):
        async with world.desk.use("a"):
            pass
    with pytest.raises(AdapterNotFound):
        await world.unload("a", revision=3)


async def test_the_same_content_again_is_nothing_new(world: World) -> None:
    first = await world.load("a")
    loads = world.host.calls.count(f"load {first.id}")
    again = await world.load("a", revision=2, pinned=True)
    assert (again.id, again.pinned) == (first.id, True)
    assert world.host.calls.count(f"load {first.id}") == loads == 1


async def test_other_content_takes_the_name_over_and_the_old_one_drains(world: World) -> None:
    old = await world.load("a", "one")
    using = world.desk.use("a")
    before = await using.__aenter__()
    new = await world.load("a", "two", revision=2)
    assert new.id != old.id
    async with world.desk.use("a") as now:
        assert (before.id, now.id) == (old.id, new.id)  # each request keeps what it began with
    assert {status.id: status.state for status in world.desk.contents()} == {
        new.id: AdapterState.READY,
        old.id: AdapterState.DRAINING,
    }
    await using.__aexit__(None, None, None)
    await world.clock.settle()
    assert [status.id for status in world.desk.contents()] == [new.id]
    world.agrees()


async def test_unloading_gives_up_waiting_in_time_and_the_last_request_takes_it_away(world: World) -> None:
    await world.load("a")
    using = world.desk.use("a")
    await using.__aenter__()
    status = await world.unload("a", seconds=5)
    assert (status.state, status.references) == (AdapterState.TOMBSTONE, 1)
    with pytest.raises(AdapterNotFound):
        async with world.desk.use("a"):
            pass
    await using.__aexit__(None, None, None)
    await world.clock.settle()
    assert world.desk.contents() == ()
    world.agrees()


async def test_a_tombstone_lives_again_only_by_a_new_registration(world: World) -> None:
    first = await world.load("a")
    using = world.desk.use("a")
    await using.__aenter__()
    await world.unload("a", seconds=5)
    again = await world.load("a", revision=3)
    assert (again.id, again.state, again.references) == (first.id, AdapterState.READY, 1)
    await using.__aexit__(None, None, None)
    await world.clock.settle()
    assert world.states() == {"a": AdapterState.READY}
    world.agrees()


async def test_the_longest_unused_leaves_its_slot_and_comes_back_when_asked_for(world: World) -> None:
    for name in ("a", "b"):
        await world.load(name)
    async with world.desk.use("a"):
        pass
    await world.load("c")
    assert world.states() == {"a": AdapterState.READY, "b": AdapterState.EVICTED, "c": AdapterState.READY}
    world.agrees()
    loads = len([call for call in world.host.calls if call.startswith("load")])
    async with world.desk.use("b"):
        assert world.states()["b"] is AdapterState.READY
        world.agrees()
    assert len([call for call in world.host.calls if call.startswith("load")]) == loads  # from memory
    assert world.desk.view().evictions == 2


async def test_pinned_adapters_stay_and_there_may_be_so_many(world: World) -> None:
    await world.load("a", pinned=True)
    with pytest.raises(AdapterLimit, match="pinned"):
        await world.load("b", pinned=True)
    for name in ("b", "c", "d"):
        await world.load(name)
    assert world.states()["a"] is AdapterState.READY
    await world.load("a", revision=2, pinned=False)
    await world.load("b", revision=2, pinned=True)


async def test_a_request_waits_for_a_slot_that_requests_hold(world: World) -> None:
    for name in ("a", "b", "c"):
        await world.load(name)
    held = [world.desk.use(name) for name in ("b", "c")]
    for using in held:
        await using.__aenter__()

    async def use_a() -> str:
        async with world.desk.use("a") as entry:
            return entry.id

    waiting = asyncio.ensure_future(use_a())
    await world.clock.settle()
    assert not waiting.done()
    await held[0].__aexit__(None, None, None)
    assert await world.clock.run(waiting) == world.desk.status("a").id
    # And is told so when none becomes free; others are not held up by it.
    again = [world.desk.use(name) for name in ("a",)]
    await again[0].__aenter__()
    with pytest.raises(SlotsBusy):
        await world.clock.run(world.desk.use("b").__aenter__())
    assert world.desk.status("b").references == 0
    for using in (held[1], again[0]):
        await using.__aexit__(None, None, None)
    world.agrees()


async def test_loading_waits_neither_for_long_requests_nor_for_a_source_that_hangs(world: World) -> None:
    await world.load("a")
    using = world.desk.use("a")
    await using.__aenter__()
    await world.load("a", "two", revision=2, drain=3600)  # the old one drains for an hour
    also = world.desk.use("a")
    await also.__aenter__()
    world.opener.hanging["file:///slow"] = asyncio.Event()
    slow = asyncio.ensure_future(world.desk.load(world.request("slow", "file:///slow")))
    await world.clock.settle()
    now = world.clock.now
    assert (await world.load("b")).state is AdapterState.EVICTED  # both slots are taken, and it does not wait for one
    async with world.desk.use("a"):
        pass
    assert (await world.load("a", "three", revision=3)).id == world.desk.status("a").id
    assert world.clock.now == now
    with pytest.raises(Unavailable, match="was not read within"):
        await world.clock.run(slow)
    for each in (using, also):
        await each.__aexit__(None, None, None)


async def test_bytes_bound_what_is_held_and_what_is_in_slots() -> None:
    world = World(slots=4, host_bytes=3 * SIZE, slot_bytes=2 * SIZE)
    for name in ("a", "b", "c"):
        await world.load(name)
    assert list(world.states().values()).count(AdapterState.READY) == 2
    with pytest.raises(InsufficientMemory):
        await world.load("d")
    with pytest.raises(AdapterLimit):
        await world.load("d", rank=8)
    await world.unload("a")
    assert (await world.load("d")).state is AdapterState.READY
    world.agrees()


@pytest.mark.parametrize("step", ["load", "place"])
async def test_an_engine_that_refuses_leaves_nothing_behind(world: World, step: str) -> None:
    world.host.fail[step] = Internal("no")
    if step == "load":
        with pytest.raises(Internal):
            await world.load("a")
        assert world.desk.contents() == ()
        await world.load("a")
    else:
        assert (await world.load("a")).state is AdapterState.EVICTED
    async with world.desk.use("a"):
        world.agrees()


async def test_a_replacement_that_fails_leaves_the_old_one_serving(world: World) -> None:
    old = await world.load("a")
    world.host.fail["load"] = Internal("no")
    with pytest.raises(Internal):
        await world.load("a", "two", revision=2)
    assert [(status.id, status.state) for status in world.desk.contents()] == [(old.id, AdapterState.READY)]
    world.agrees()


async def test_what_cannot_be_served_is_refused_before_the_engine_is_asked(world: World) -> None:
    for error, name, options in [
        (DigestMismatch, "a", {"digest": "sha256:" + "0" * 64}),
        (IncompatibleAdapter, "a", {"base_digest": "sha256:" + "0" * 64}),
        (AdapterLimit, "a", {"rank": 16}),
        (BadRequest, "base", {}),
    ]:
        with pytest.raises(error):
            await world.load(name, **options)
    with pytest.raises(SourceNotFound):
        await world.clock.run(world.desk.load(world.request("a", "file:///nothing")))
    assert (world.host.calls, world.desk.contents(), world.base.written) == ([], (), [])


async def test_callers_who_are_not_entitled(world: World) -> None:
    await world.load("a", revision=5)
    for error, options in [
        (StaleRevision, {"revision": 4}),
        (StaleRevision, {"revision": 9, "epoch": 0}),
        (ForeignOwner, {"revision": 9, "owner": "other"}),
    ]:
        with pytest.raises(error):
            await world.load("a", "two", **options)
    with pytest.raises(WrongPod):
        await world.unload("a", pod_uid="other")
    with pytest.raises(StaleRevision):
        await world.unload("a", revision=1)
    with pytest.raises(StateMoved):
        await world.clock.run(world.desk.load(world.request("b", "file:///x"), if_match='"boot.0"'))
    # Unloaded is a decision, too: what was decided before it does not bring the adapter back.
    await world.unload("a", revision=6)
    with pytest.raises(StaleRevision):
        await world.load("a", revision=5)
    assert world.desk.contents() == ()
    world.base.epoch = 7
    with pytest.raises(StaleRevision, match="old leader"):
        await world.load("new", epoch=6)


async def test_a_person_may_act_where_no_object_decides(world: World) -> None:
    await world.load("a", owner="cli", epoch=0)
    assert (await world.load("a", "two", owner="cli", epoch=0, revision=2)).revision == 2
    await world.unload("a", owner_uid="cli", epoch=0, revision=3)


async def test_what_a_worker_took_with_it_comes_back(world: World) -> None:
    for name, options in [("a", {}), ("b", {"pinned": True}), ("c", {}), ("gone", {})]:
        await world.load(name, **options)  # type: ignore[arg-type]
    using = world.desk.use("gone")
    await using.__aenter__()
    await world.unload("gone", seconds=0)
    world.opener.errors["file:///adapters/c/one"] = Unavailable("the volume is away")
    world.host.lose()
    assert world.base.live is not None
    await world.clock.run(world.desk.restore(world.base.live))
    await using.__aexit__(None, None, None)
    await world.clock.settle()
    assert world.states() == {"a": AdapterState.READY, "b": AdapterState.READY, "c": AdapterState.FAILED}
    world.agrees()
    with pytest.raises(NotReady, match="the volume is away"):
        async with world.desk.use("c"):
            pass
    del world.opener.errors["file:///adapters/c/one"]
    await world.load("c", revision=2)
    async with world.desk.use("c"):
        world.agrees()


async def test_a_new_process_brings_back_what_the_journal_knows(world: World) -> None:
    loaded = await world.load("a")
    await world.load("other", base_digest="sha256:" + "b" * 64)
    await world.load("removed")
    await world.unload("removed")
    world.opener.put("file:///adapters/a/one", "changed since")
    world.host.lose()
    world.start()
    await world.clock.run(world.desk.restore(VersionRef(digest="sha256:" + "c" * 64)))
    # Other content than was registered is not served under its name, nor one that is bound to another base.
    assert world.states() == {"a": AdapterState.FAILED, "other": AdapterState.UNLOADED}
    assert world.desk.status("a").id == loaded.id
    assert not world.desk.has("other")
    with pytest.raises(StaleRevision):
        await world.load("removed", revision=1)


async def test_an_engine_that_dies_while_an_adapter_comes_in(world: World) -> None:
    world.host.hanging["load"] = asyncio.Event()
    world.opener.put("file:///x", "one")
    loading = asyncio.ensure_future(world.desk.load(world.request("a", "file:///x")))
    await world.clock.settle()
    # The engine lost everything and was loaded again before the answer came.
    await world.clock.run(world.desk.restore(VersionRef(digest="sha256:" + "b" * 64)))
    world.host.hanging.pop("load").set()
    with pytest.raises(NotReady, match="lost its memory"):
        await world.clock.run(loading)
    world.host.alive = False
    with pytest.raises(WorkerLost):
        await world.load("b")
    assert world.desk.contents() == () or all(not status.references for status in world.desk.contents())


async def test_of_two_contents_at_the_same_time_one_is_the_name_and_no_other_stays(world: World) -> None:
    for content in ("one", "two"):
        world.opener.put(f"file:///{content}", content)
    outcomes = await world.clock.run(
        asyncio.gather(
            *(world.desk.load(world.request("a", f"file:///{content}", revision=revision))
              for revision, content in enumerate(("one", "two"), 1)),
            return_exceptions=True,
        )
    )  # fmt: skip
    assert not [outcome for outcome in outcomes if isinstance(outcome, ModelswapError)]
    await world.clock.settle()
    assert len(world.desk.contents()) == 1
    world.agrees()


async def test_a_source_that_is_looked_at_again_is_read_unless_its_files_are_known(world: World) -> None:
    status = await world.load("a")
    target = VersionRef(version="a", uri=status.uri, digest=status.digest)
    seen = await world.clock.run(world.desk.reader.look(LookRequest(target=target)))
    assert (seen, world.opener.opened.hashed) == (SourceLook(revision="files of one"), True)
    known = LookRequest(target=target, known=seen.revision)
    assert await world.clock.run(world.desk.reader.look(known)) == seen
    assert not world.opener.opened.hashed
    world.opener.put(status.uri, "two")
    found = await world.clock.run(world.desk.reader.look(known))
    other = await world.clock.run(
        world.desk.reader.resolve(ResolveAdaptersRequest(sources=[AdapterSource(name="x", uri=status.uri)]))
    )
    assert found == SourceLook(found=other.adapters[0].digest, revision="files of two")
    world.opener.put(status.uri, "one")
    assert (await world.clock.run(world.desk.reader.look(LookRequest(target=target)))).found == "", "it is back"
    world.opener.configs[status.uri] = b"{}"
    spoilt = await world.clock.run(world.desk.reader.look(LookRequest(target=target)))
    assert spoilt.found == "other files (adapter_config.json, adapter_model.safetensors)"
    del world.opener.contents[status.uri]
    with pytest.raises(SourceNotFound):
        await world.clock.run(world.desk.reader.look(LookRequest(target=target)))
    assert world.desk.status("a").digest == status.digest, "nothing was loaded for it"
