"""Base and adapters in one commit: the real coordinator and desk, engine and sources in memory, time by hand."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from modelswap_engine.backends.port import Load, Reply
from modelswap_engine.lora.desk import AdapterDesk
from modelswap_engine.lora.settings import LoraSettings
from modelswap_engine.protocol.adapter_calls import AssignAdaptersRequest, LoadAdapterRequest, UnloadAdapterRequest
from modelswap_engine.protocol.adapters import AdapterChange, AdapterSource, AdapterState, OnIncompatible
from modelswap_engine.protocol.assignment import AssignedAdapter, AssignedSource
from modelswap_engine.protocol.errors import AdapterNotFound, Busy, IncompatibleAdapter
from modelswap_engine.protocol.holding import Hold
from modelswap_engine.protocol.messages import (
    Fence,
    PlanRequest,
    ProceedRequest,
    RollbackRequest,
    SwapStatus,
    VersionRef,
)
from modelswap_engine.protocol.policy import Loading, LoadingMode, Traffic, TrafficMode
from modelswap_engine.protocol.states import SwapState
from modelswap_engine.swap.companion import Companion
from tests.support.fake_adapters import FakeHost, FakeOpened, FakeOpener
from tests.support.fake_backend import FakeBackend, Fault
from tests.support.swapping import OWNER, POD, World, checkpoint, request


class Engine(FakeBackend):
    """A whole load takes the adapters with it."""

    host: FakeHost

    async def load(self, order: Load) -> Sequence[Reply]:
        replies = await super().load(order)
        self.host.lose()
        self.host.alive = True
        return replies

    def kill(self) -> None:
        super().kill()
        if hasattr(self, "host"):
            self.host.alive = False


class AdapterWorld(World):
    def __init__(self, folder: Path, **bounds: Any) -> None:
        self.host, self.opener = FakeHost(slots=3), FakeOpener()
        super().__init__(folder, **bounds)
        self.next = self.publish("1.1", checkpoint(norm=b"N" * 2))

    def build(self) -> None:
        if not isinstance(self.backend, Engine):
            self.backend = Engine(read=self.sources.read)
            self.backend.host = self.host
        super().build()

    def companion(self) -> Companion | None:
        settings = LoraSettings(slots=3, served_model_name="base", pod_uid=POD)
        self.desk = AdapterDesk(host=self.host, opener=self.opener, clock=self.clock, settings=settings)
        return self.desk

    def source(self, name: str, content: str, base: VersionRef | None = None, **more: Any) -> AdapterSource:
        uri = self.opener.put(f"file:///adapters/{content}", content)
        return AdapterSource(name=name, uri=uri, base_digest=base.digest if base is not None else "", **more)

    async def load(self, source: AdapterSource, *, revision: int = 1) -> str:
        fence = Fence(pod_uid=POD, owner_uid=f"adapter {source.name}", epoch=1, revision=revision)
        status = await self.clock.run(self.desk.load(LoadAdapterRequest(fence=fence, source=source)))
        return status.id

    async def change(
        self, target: VersionRef, *sources: AdapterSource, unload: bool = False, **more: Any
    ) -> SwapStatus:
        on = OnIncompatible.UNLOAD if unload else OnIncompatible.BLOCK
        return await self.swap(target, adapters=AdapterChange(on_incompatible=on, sources=list(sources)), **more)

    async def begin(self, target: VersionRef, *sources: AdapterSource) -> None:
        """Start a swap and let it go on until it waits for something."""
        order = request(target, adapters=AdapterChange(sources=list(sources)))
        await self.clock.run(self.coordinator.swap(order))
        await self.clock.settle()

    async def assign(self, *contents: str, revision: int) -> None:
        """Assign adapter ``a`` these contents, each for the next base; without one it is taken away."""
        sources = [
            AssignedSource(uri=self.opener.put(f"file:///adapters/{content}", content), base_digest=self.next.digest)
            for content in contents
        ]
        items = [AssignedAdapter(name="a", sources=sources)] if sources else []
        fence = Fence(pod_uid=POD, owner_uid=OWNER, epoch=1, revision=revision)
        await self.clock.run(self.desk.assign(AssignAdaptersRequest(fence=fence, adapters=items)))
        await self.clock.settle()

    def serving(self) -> dict[str, str]:
        """What each name leads to; the engine has all of it."""
        registered = {status.name: status.id for status in self.desk.registered()}
        assert set(registered.values()) <= self.host.held
        return registered

    async def settled(self) -> None:
        """Nothing is left over: the engine holds what names lead to, and no reference or claim is open."""
        await self.clock.settle()
        assert self.host.held == set(self.serving().values())
        for entry in self.desk._registry.entries():
            assert (entry.claims, entry.pin_claims, entry.references) == (0, 0, 0), entry.id
        assert self.desk._together is None


def hold_of(owner: object, name: str, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Keep a method from beginning until the event is set."""
    held, act = asyncio.Event(), getattr(owner, name)

    async def slow(*arguments: Any, **more: Any) -> Any:
        await held.wait()
        return await act(*arguments, **more)

    monkeypatch.setattr(owner, name, slow)
    return held


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[AdapterWorld]:
    made = AdapterWorld(tmp_path)
    await made.start()
    yield made
    await made.stop()


async def test_new_contents_come_with_the_new_base(world: AdapterWorld) -> None:
    old = await world.load(world.source("a", "a-old", world.template))
    free = await world.load(world.source("free", "free"))
    status = await world.change(world.next, world.source("a", "a-new", world.next), world.source("b", "b", world.next))
    assert status.state is SwapState.SERVING, status.error
    assert status.plan is not None
    assert [line.partition(":")[0] for line in status.plan.adapters] == ["a", "b"]
    serving = world.serving()
    assert (set(serving), serving["free"]) == ({"a", "b", "free"}, free)
    assert serving["a"] != old
    await world.settled()
    world.assert_serves(world.next)


async def test_assigned_contents_change_with_the_base_in_both_directions(world: AdapterWorld) -> None:
    bases = {"a-old": world.template.digest, "a-new": world.next.digest}
    sources = [
        AssignedSource(uri=world.opener.put(f"file:///adapters/{content}", content), base_digest=base)
        for content, base in bases.items()
    ]
    fence = Fence(pod_uid=POD, owner_uid=OWNER, epoch=1, revision=1)
    items = [AssignedAdapter(name="a", sources=sources)]
    await world.clock.run(world.desk.assign(AssignAdaptersRequest(fence=fence, adapters=items)))
    await world.clock.settle()
    old = world.serving()["a"]
    status = await world.change(world.next)
    assert status.state is SwapState.SERVING, status.error
    new = world.serving()["a"]
    assert new != old
    world.backend.faults["commit"] = Fault.LATE_ERROR
    status = await world.change(world.template, operation_id="op-2", revision=2)
    assert (status.state.succeeded, world.serving()) == (False, {"a": new})
    status = await world.change(world.template, operation_id="op-3", revision=3)
    assert (status.state, world.serving()) == (SwapState.SERVING, {"a": old})
    await world.clock.advance(60)
    told = world.desk.view().assigned
    assert told is not None
    assert (told.open, told.problems) == (0, [])
    await world.settled()


async def test_an_assigned_content_that_only_the_new_base_has_comes_with_it(world: AdapterWorld) -> None:
    uri = world.opener.put("file:///adapters/a-new", "a-new")
    fence = Fence(pod_uid=POD, owner_uid=OWNER, epoch=1, revision=1)
    items = [AssignedAdapter(name="a", sources=[AssignedSource(uri=uri, base_digest=world.next.digest)])]
    await world.clock.run(world.desk.assign(AssignAdaptersRequest(fence=fence, adapters=items)))
    await world.clock.settle()
    assert world.serving() == {}
    status = await world.change(world.next)
    assert status.plan is not None
    assert (status.plan.adapters, set(world.serving())) == ([f"a: {uri}"], {"a"})
    await world.settled()


@pytest.mark.parametrize("before", [False, True], ids=["new", "known-once"])
@pytest.mark.parametrize("when", ["read", "prepare", "verify", "resume", "release"])
async def test_what_is_taken_away_while_the_base_changes_does_not_stay(
    world: AdapterWorld, monkeypatch: pytest.MonkeyPatch, when: str, before: bool
) -> None:
    """Its only source came with the new base, so nothing else than the swap ever brought it."""
    if before:
        await world.load(world.source("a", "a-once"))
        fence = Fence(pod_uid=POD, owner_uid="adapter a", epoch=1, revision=1)
        await world.clock.run(world.desk.unload("a", UnloadAdapterRequest(fence=fence)))
    await world.assign("a-new", revision=2)
    hold = hold_of(FakeOpened, "hash", monkeypatch) if when == "read" else hold_of(world.backend, when, monkeypatch)
    await world.begin(world.next)
    await world.assign(revision=3)
    hold.set()
    assert (await world.ended("op-1")).state is SwapState.SERVING
    await world.clock.advance(1)
    assert (world.serving(), world.desk.contents()) == ({}, ())
    await world.settled()
    await world.crash()
    world.host.lose()
    await world.start()
    assert world.serving() == {}


@pytest.mark.parametrize("step", ["verify", "resume"])
async def test_what_is_unloaded_before_a_swap_is_taken_back_stays_away(
    world: AdapterWorld, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    await world.load(world.source("a", "a-old", world.template))
    hold = hold_of(world.backend, step, monkeypatch)
    world.backend.faults[step] = Fault.ERROR
    await world.begin(world.next, world.source("a", "a-new", world.next))
    fence = Fence(pod_uid=POD, owner_uid="adapter a", epoch=1, revision=2)
    await world.clock.run(world.desk.unload("a", UnloadAdapterRequest(fence=fence)))
    hold.set()
    assert (await world.ended("op-1")).state is SwapState.ROLLED_BACK
    assert (world.serving(), world.desk.contents()) == ({}, ())
    await world.settled()


async def test_an_adapter_of_another_base_blocks_and_nothing_is_touched(world: AdapterWorld) -> None:
    old = await world.load(world.source("a", "a-old", world.template))
    calls = list(world.host.calls)
    plan = await world.clock.run(world.coordinator.plan(PlanRequest(target=world.next)))
    assert [refusal.code for refusal in plan.refusals] == ["IncompatibleAdapter"]
    status = await world.change(world.next)
    assert (status.state, status.pause_seconds) == (SwapState.ABORTED, None)
    assert status.error is not None
    assert (status.error.code, "a is bound to base" in status.error.message) == ("IncompatibleAdapter", True)
    assert (world.host.calls, world.serving()) == (calls, {"a": old})
    world.assert_serves(world.template)


async def test_or_is_unloaded_and_comes_back_with_its_base(world: AdapterWorld) -> None:
    old = await world.load(world.source("a", "a-old", world.template))
    free = await world.load(world.source("free", "free"))
    status = await world.change(world.next, unload=True)
    assert status.state is SwapState.SERVING, status.error
    assert world.serving() == {"free": free}
    waiting = [status for status in world.desk.contents() if status.state is AdapterState.UNLOADED]
    assert [(status.id, status.error is not None) for status in waiting] == [(old, True)]
    with pytest.raises(AdapterNotFound):
        async with world.desk.use("a"):
            pass
    await world.settled()
    back = RollbackRequest(operation_id="back", fence=Fence(pod_uid=POD, owner_uid=OWNER, epoch=1, revision=2))
    await world.clock.run(world.coordinator.rollback(back))
    assert (await world.ended("back")).state is SwapState.SERVING
    assert world.serving() == {"a": old, "free": free}
    await world.settled()
    world.assert_serves(world.template)


async def test_a_rollback_to_the_retained_version_brings_its_adapters_back(world: AdapterWorld) -> None:
    old = await world.load(world.source("a", "a-old", world.template))
    await world.change(world.next, world.source("a", "a-new", world.next))
    assert world.serving()["a"] != old
    back = RollbackRequest(operation_id="back", fence=Fence(pod_uid=POD, owner_uid=OWNER, epoch=1, revision=2))
    await world.clock.run(world.coordinator.rollback(back))
    assert (await world.ended("back")).state is SwapState.SERVING
    assert world.serving() == {"a": old}
    await world.settled()


@pytest.mark.parametrize("step", ["stage", "prepare", "pause", "commit", "verify", "resume"])
@pytest.mark.parametrize("fault", [Fault.ERROR, Fault.DIE, Fault.LIE, Fault.RAISE])
async def test_a_swap_that_fails_leaves_base_and_adapters_as_they_were(
    world: AdapterWorld, step: str, fault: Fault
) -> None:
    old = await world.load(world.source("a", "a-old", world.template))
    gone = await world.load(world.source("gone", "gone", world.template))
    free = await world.load(world.source("free", "free"))
    world.backend.faults[step] = fault
    wanted = [world.source("a", "a-new", world.next), world.source("new", "new", world.next)]
    status = await world.change(world.next, *wanted, unload=True)
    assert status.state in (SwapState.ABORTED, SwapState.ROLLED_BACK, SwapState.SERVING)
    if status.state is SwapState.SERVING:  # nothing went wrong with this fault at this step
        assert set(world.serving()) == {"a", "new", "free"}
    else:
        assert world.serving() == {"a": old, "gone": gone, "free": free}
        world.assert_serves(world.template)
        assert "new" not in {status.name for status in world.desk.contents()}  # and nothing is remembered of it
    await world.settled()
    # And the next one goes through.
    status = await world.change(world.next, *wanted, unload=True, operation_id="op-2", revision=2)
    assert status.state is SwapState.SERVING, status.error
    assert set(world.serving()) == {"a", "new", "free"}
    await world.settled()


@pytest.mark.parametrize("step", ["prepare", "commit", "verify", "retire"])
@pytest.mark.parametrize("fault", [Fault.ERROR, Fault.DIE, Fault.RAISE])
async def test_an_overlap_that_fails_leaves_one_of_both(world: AdapterWorld, step: str, fault: Fault) -> None:
    old = await world.load(world.source("a", "a-old", world.template))
    world.backend.faults[step] = fault
    overlap = Traffic(mode=TrafficMode.OVERLAP)
    status = await world.change(world.next, world.source("a", "a-new", world.next), traffic=overlap)
    if status.state is SwapState.SERVING:  # what fails after the switch takes nothing back
        assert world.serving()["a"] != old
        world.assert_serves(world.next)
    else:
        assert world.serving() == {"a": old}
        world.assert_serves(world.template)
    assert (status.state is SwapState.SERVING) is (step == "retire")
    await world.settled()


@pytest.mark.parametrize("what", ["missing", "unfit", "engine"])
async def test_a_content_that_cannot_be_had_aborts_the_swap(world: AdapterWorld, what: str) -> None:
    old = await world.load(world.source("a", "a-old", world.template))
    good, bad = world.source("a", "a-new", world.next), world.source("b", "b", world.next)
    if what == "missing":
        del world.opener.contents[bad.uri]
    elif what == "unfit":
        world.opener.ranks[bad.uri] = 16
    else:
        world.host.fail["load"] = IncompatibleAdapter("no")
    status = await world.change(world.next, good, bad)
    assert status.state is SwapState.ABORTED
    assert status.error is not None
    codes = {"missing": "SourceNotFound", "unfit": "AdapterLimit", "engine": "IncompatibleAdapter"}
    assert (status.error.code, status.error.details["adapter"]) == (codes[what], "a" if what == "engine" else "b")
    assert world.serving() == {"a": old}
    await world.settled()
    world.assert_serves(world.template)


@pytest.mark.parametrize("mode", [TrafficMode.RECOMPUTE, TrafficMode.FREEZE])
async def test_requests_do_not_go_on_with_an_adapter_that_changes(world: AdapterWorld, mode: TrafficMode) -> None:
    await world.load(world.source("a", "a-old", world.template))
    status = await world.change(world.next, world.source("a", "a-new", world.next), traffic=Traffic(mode=mode))
    assert status.error is not None
    assert (status.state, status.error.code) == (SwapState.ABORTED, "UnsupportedChange")
    # One that fits any base goes along.
    fence = Fence(pod_uid=POD, owner_uid="adapter a", epoch=1, revision=2)
    await world.clock.run(world.desk.unload("a", UnloadAdapterRequest(fence=fence)))
    await world.load(world.source("free", "free"))
    status = await world.change(world.next, traffic=Traffic(mode=mode), operation_id="op-2", revision=2)
    assert status.state is SwapState.SERVING, status.error


@pytest.mark.parametrize("mode", [TrafficMode.DRAIN, TrafficMode.OVERLAP])
async def test_a_request_of_the_old_content_ends_with_it(world: AdapterWorld, mode: TrafficMode) -> None:
    """Requests that outlive the swap keep what they began with, and then it goes."""
    old = await world.load(world.source("a", "a-old", world.template))
    using = world.desk.use("a")
    entry = await using.__aenter__()
    status = await world.change(world.next, world.source("a", "a-new", world.next), traffic=Traffic(mode=mode))
    assert status.state is SwapState.SERVING, status.error
    assert (entry.id, entry.state) == (old, AdapterState.DRAINING)
    assert old in world.host.held
    await using.__aexit__(None, None, None)
    await world.settled()


async def test_who_comes_while_the_base_changes(world: AdapterWorld) -> None:
    """A load that is bound to the base of before is refused, one that is bound to none is not held up."""
    hold = asyncio.Event()
    commit = world.backend.commit

    async def slow(*arguments: Any) -> Sequence[Reply]:
        await hold.wait()
        return await commit(*arguments)

    world.backend.commit = slow  # type: ignore[method-assign]
    await world.begin(world.next)
    with pytest.raises(Busy):
        await world.load(world.source("bound", "bound", world.template))
    free = await world.load(world.source("free", "free"))
    hold.set()
    assert (await world.ended("op-1")).state is SwapState.SERVING
    with pytest.raises(IncompatibleAdapter):
        await world.load(world.source("bound", "bound", world.template))
    assert world.serving() == {"free": free}
    await world.settled()


async def test_whoever_decides_about_a_name_last_is_obeyed(world: AdapterWorld) -> None:
    hold = asyncio.Event()
    prepare = world.backend.prepare

    async def slow(*arguments: Any, **more: Any) -> Sequence[Reply]:
        await hold.wait()
        return await prepare(*arguments, **more)

    world.backend.prepare = slow  # type: ignore[method-assign]
    await world.load(world.source("a", "a-old", world.template))
    await world.load(world.source("b", "b-old", world.template))
    staged = [world.source("a", "a-new", world.next), world.source("b", "b-new", world.next)]
    await world.begin(world.next, *staged)
    fence = Fence(pod_uid=POD, owner_uid="adapter a", epoch=1, revision=2)
    await world.clock.run(world.desk.unload("a", UnloadAdapterRequest(fence=fence)))
    later = await world.load(world.source("b", "b-later"), revision=2)
    hold.set()
    assert (await world.ended("op-1")).state is SwapState.SERVING
    assert world.serving() == {"b": later}
    await world.settled()


async def test_one_that_comes_after_the_plan_still_blocks(world: AdapterWorld) -> None:
    hold = asyncio.Event()
    stage = world.backend.stage

    async def slow(*arguments: Any) -> Sequence[Reply]:
        await hold.wait()
        return await stage(*arguments)

    world.backend.stage = slow  # type: ignore[method-assign]
    await world.begin(world.next)
    late = await world.load(world.source("late", "late", world.template))
    hold.set()
    status = await world.ended("op-1")
    assert status.error is not None
    assert (status.state, status.error.code) == (SwapState.ABORTED, "IncompatibleAdapter")
    assert world.serving() == {"late": late}
    await world.settled()
    world.assert_serves(world.template)


async def hold(world: AdapterWorld, mode: TrafficMode = TrafficMode.DRAIN) -> None:
    """Start a swap to the next base that waits once it has staged, and let it come there."""
    order = request(world.next, hold=Hold(seconds=600), traffic=Traffic(mode=mode))
    await world.clock.run(world.coordinator.swap(order))
    await world.clock.settle()
    assert world.coordinator.operation("op-1").hold.held


async def go_on(world: AdapterWorld) -> SwapStatus:
    fence = Fence(pod_uid=POD, owner_uid=OWNER, epoch=1, revision=1)
    await world.clock.run(world.coordinator.proceed("op-1", ProceedRequest(fence=fence)))
    return await world.ended("op-1")


@pytest.mark.parametrize("contents", [(), ("a-newer",)], ids=["taken-away", "changed"])
async def test_what_is_assigned_while_a_swap_waits_is_what_comes_with_it(
    world: AdapterWorld, contents: tuple[str, ...]
) -> None:
    await world.assign("a-new", revision=1)
    await hold(world)
    assert world.host.held == set(), "nothing of the adapters is kept while it waits"
    await world.assign(*contents, revision=2)
    assert (await go_on(world)).state is SwapState.SERVING
    await world.clock.advance(1)
    assert [status.uri for status in world.desk.registered()] == [f"file:///adapters/{name}" for name in contents]
    await world.settled()


async def test_one_that_comes_while_a_swap_waits_blocks_it(world: AdapterWorld) -> None:
    await hold(world)
    late = await world.load(world.source("late", "late", world.template))
    status = await go_on(world)
    assert status.error is not None
    assert (status.state, status.error.code) == (SwapState.ABORTED, "IncompatibleAdapter")
    assert world.serving() == {"late": late}
    world.assert_serves(world.template)


async def test_requests_do_not_go_on_with_an_adapter_that_changed_while_a_swap_waited(world: AdapterWorld) -> None:
    await hold(world, TrafficMode.RECOMPUTE)
    await world.assign("a-new", revision=2)
    status = await go_on(world)
    assert status.error is not None
    assert (status.state, status.error.code, status.error.retryable) == (SwapState.ABORTED, "Busy", True)
    world.assert_serves(world.template)


async def test_adapters_change_without_a_change_of_the_base(world: AdapterWorld) -> None:
    old = await world.load(world.source("a", "a-old"))
    status = await world.change(world.template, world.source("a", "a-new"), world.source("b", "b"))
    assert status.state is SwapState.SERVING, status.error
    serving = world.serving()
    assert set(serving) == {"a", "b"}
    assert serving["a"] != old
    await world.settled()


@pytest.mark.parametrize("target", ["1.0", "1.1"])
async def test_after_a_crash_each_base_has_its_own_adapters(world: AdapterWorld, target: str) -> None:
    old = await world.load(world.source("a", "a-old", world.template, pinned=True))
    await world.change(world.next, world.source("a", "a-new", world.next, pinned=True))
    new = world.serving()["a"]
    if target == "1.0":
        status = await world.swap(
            world.template, "op-2", revision=2, loading=Loading(mode=LoadingMode.FULL), adapters=AdapterChange()
        )
        assert status.state is SwapState.SERVING, status.error
    await world.crash()
    world.host.lose()
    await world.start()
    assert world.serving() == {"a": old if target == "1.0" else new}
    assert world.desk.status("a").pinned
    await world.settled()


@pytest.mark.parametrize("step", ["stage", "prepare", "pause", "commit", "verify", "resume", "release"])
async def test_killed_at_any_step_whichever_base_comes_up_has_its_own(world: AdapterWorld, step: str) -> None:
    old = await world.load(world.source("a", "a-old", world.template))
    wanted = [world.source("a", "a-new", world.next), world.source("new", "new", world.next)]
    world.backend.faults[step] = Fault.HANG
    await world.begin(world.next, *wanted)
    assert world.backend.steps[-1] == step
    await world.crash()
    world.host.lose()
    await world.start()
    serving = world.serving()
    if world.state.live == world.template:
        assert serving == {"a": old}
    else:
        assert world.state.live == world.next
        assert set(serving) == {"a", "new"}
        assert serving["a"] != old
    await world.settled()


async def test_a_cold_swap_brings_its_adapters(world: AdapterWorld) -> None:
    world.sources.errors[world.template.uri] = IncompatibleAdapter("not now")
    await world.crash()
    await world.start()
    assert world.state.live is None
    status = await world.change(world.next, world.source("a", "a-new", world.next))
    assert status.state is SwapState.SERVING, status.error
    assert set(world.serving()) == {"a"}
    await world.settled()
