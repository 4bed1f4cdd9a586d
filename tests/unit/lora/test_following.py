"""What is assigned is what a pod serves: loaded, replaced and taken away, whoever dies or fails, with time by hand."""

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest

from modelswap_engine.lora.registry import Registry
from modelswap_engine.lora.turns import AT_ONCE, OF_A_PLACE
from modelswap_engine.protocol.adapter_calls import (
    AssignAdaptersRequest,
    ResolveAdaptersRequest,
    UnloadAdapterRequest,
)
from modelswap_engine.protocol.adapters import AdapterSource, AdapterState
from modelswap_engine.protocol.assignment import AssignedAdapter, AssignedSource
from modelswap_engine.protocol.errors import (
    BadRequest,
    ForeignOwner,
    InvalidCheckpoint,
    SourceUnreadable,
    StaleRevision,
    WrongPod,
)
from modelswap_engine.protocol.messages import Fence, VersionRef
from modelswap_engine.protocol.policy import Verification
from tests.support.fake_adapters import FakeBase
from tests.support.following import OTHER_BASE, OWNER, World


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    yield made
    await made.desk.stop()


async def test_what_is_assigned_is_loaded_and_what_is_not_any_more_is_taken_away(world: World) -> None:
    told = await world.assign(world.item("a"), world.item("b"), revision=1)
    assert (world.served(), told.revision, told.open, told.adapters) == ({"a": "one", "b": "one"}, 1, 0, 2)
    told = await world.assign(world.item("b"), revision=2)
    assert (world.served(), told.open, world.desk.view().host_bytes > 0) == ({"b": "one"}, 0, True)
    assert len(world.host.held) == 1


async def test_adapters_of_other_pods_are_not_loaded(world: World) -> None:
    await world.assign(world.item("a", pod_uids=["pod"]), world.item("b", pod_uids=["other"]), revision=1)
    assert world.served() == {"a": "one"}


async def test_the_same_again_asks_the_engine_for_nothing(world: World) -> None:
    await world.assign(world.item("a"), revision=1)
    calls = list(world.host.calls)
    await world.assign(world.item("a"), revision=2)
    await world.clock.advance(120)
    assert (world.host.calls, world.told.revision) == (calls, 2)


async def test_other_content_takes_the_name_over_at_once_and_the_old_one_drains_in_its_time(world: World) -> None:
    await world.assign(world.item("a"), revision=1)
    using = world.desk.use("a")
    before = await using.__aenter__()
    await world.assign(world.item("a", "two", drain_timeout_seconds=5), revision=2)
    async with world.desk.use("a") as now:
        assert now.id != before.id
    states = {status.id: status.state for status in world.desk.contents()}
    assert states[before.id] is AdapterState.DRAINING
    await world.clock.advance(6)
    assert {s.id: s.state for s in world.desk.contents()}[before.id] is AdapterState.TOMBSTONE
    await using.__aexit__(None, None, None)
    await world.clock.settle()
    assert [status.id for status in world.desk.contents()] == [now.id]


async def test_what_is_taken_away_drains_as_long_as_it_was_assigned_to(world: World) -> None:
    await world.assign(world.item("a", drain_timeout_seconds=30), revision=1)
    using = world.desk.use("a")
    await using.__aenter__()
    told = await world.assign(revision=2)
    assert (world.served(), told.open) == ({}, 0)
    await world.clock.advance(29)
    assert [s.state for s in world.desk.contents()] == [AdapterState.DRAINING]
    await world.clock.advance(2)
    assert [s.state for s in world.desk.contents()] == [AdapterState.TOMBSTONE]
    await using.__aexit__(None, None, None)


async def test_what_cannot_be_loaded_leaves_the_old_content_and_is_tried_again(world: World) -> None:
    await world.assign(world.item("a"), revision=1)
    new = world.item("a", "two")
    world.opener.errors[new.sources[0].uri] = SourceUnreadable("the volume is away")
    told = await world.assign(new, revision=2)
    assert (world.served(), world.problems(), told.open) == ({"a": "one"}, {"a": "SourceUnreadable"}, 0)
    world.opener.errors.clear()
    await world.clock.advance(3)
    assert (world.served(), world.problems()) == ({"a": "two"}, {})


async def test_what_is_refused_for_its_content_is_rarely_looked_at_again(world: World) -> None:
    item = world.item("a")
    uri = item.sources[0].uri
    world.opener.errors[uri] = InvalidCheckpoint("not an adapter")
    await world.assign(item, revision=1)
    await world.clock.advance(100)
    assert [p.attempts for p in world.told.problems] == [1]
    await world.assign(world.item("a"), world.item("b"), revision=2)
    assert (world.served(), [p.attempts for p in world.told.problems]) == ({"b": "one"}, [1])
    world.opener.errors.clear()
    await world.clock.advance(301)
    assert world.served() == {"a": "one", "b": "one"}


async def test_somebody_who_asks_has_what_was_refused_tried_again_at_once(world: World) -> None:
    items = [world.item(name) for name in "ab"]
    for item in items:
        world.opener.errors[item.sources[0].uri] = InvalidCheckpoint("not an adapter")
    await world.assign(*items, revision=1)
    world.opener.errors.clear()
    asked = msgspec.structs.replace(items[0], requested_at="now")
    await world.assign(asked, items[1], revision=2)
    assert (world.served(), world.problems()) == ({"a": "one"}, {"b": "InvalidCheckpoint"})
    world.opener.errors[items[0].sources[0].uri] = InvalidCheckpoint("not an adapter")
    await world.assign(asked, items[1], revision=3)
    assert (world.served(), world.told.problems[0].attempts) == ({"a": "one"}, 1), "what serves is not read again"


async def test_what_there_is_no_room_for_is_loaded_once_another_assignment_has_made_some() -> None:
    world = World(max_pinned=1)
    await world.assign(world.item("a", pinned=True), world.item("b", pinned=True), revision=1)
    assert (world.served(), world.problems()) == ({"a": "one"}, {"b": "AdapterLimit"})
    await world.clock.advance(200)
    attempts = world.told.problems[0].attempts
    assert attempts == 8  # ever more rarely: each reads the whole adapter
    await world.assign(world.item("a"), world.item("b", pinned=True), revision=2)
    await world.clock.advance(2)
    assert (world.served(), world.problems()) == ({"a": "one", "b": "one"}, {})
    await world.desk.stop()


async def test_a_source_that_hangs_keeps_no_other_adapter_waiting(world: World) -> None:
    slow = world.item("a")
    world.opener.hanging[slow.sources[0].uri] = asyncio.Event()
    told = await world.assign(slow, world.item("b"), revision=1)
    assert (world.served(), told.open) == ({"b": "one"}, 1)
    told = await world.assign(slow, world.item("c"), revision=2)
    assert (world.served(), told.open) == ({"c": "one"}, 1)
    world.opener.hanging[slow.sources[0].uri].set()
    await world.clock.settle()
    assert (world.served(), world.told.open) == ({"a": "one", "c": "one"}, 0)


async def test_a_place_that_hangs_holds_up_what_lies_there_and_only_until_it_was_late() -> None:
    world = World(slots=16, load_seconds=20)
    slow = [world.item(f"slow-{number}") for number in range(OF_A_PLACE)]
    for item in slow:
        world.opener.hanging[item.sources[0].uri] = asyncio.Event()
    there, elsewhere = world.item("there"), world.item("elsewhere", place="s3://bucket")
    await world.assign(*slow, there, elsewhere, revision=1)
    assert world.served() == {"elsewhere": "one"}
    await world.clock.advance(21)
    assert world.served() == {"elsewhere": "one", "there": "one"}
    assert set(world.problems().values()) == {"Unavailable"}
    await world.clock.advance(5)  # they are tried again, one at a time
    more = world.item("more")
    await world.assign(*slow, there, elsewhere, more, revision=2)
    assert world.served() == {"elsewhere": "one", "there": "one", "more": "one"}
    for hanging in world.opener.hanging.values():
        hanging.set()
    await world.clock.advance(200)
    assert len(world.served()) == OF_A_PLACE + 3
    await world.desk.stop()


async def test_an_assignment_that_came_while_its_adapter_was_read_is_the_one_that_counts(world: World) -> None:
    first = world.item("a")
    world.opener.hanging[first.sources[0].uri] = asyncio.Event()
    await world.assign(first, revision=1)
    await world.assign(revision=2)
    world.opener.hanging[first.sources[0].uri].set()
    await world.clock.settle()
    assert (world.served(), world.told.open, world.host.held) == ({}, 0, set())
    assert not [call for call in world.host.calls if call.startswith("place")], "it was served for a moment"


async def test_a_new_pod_has_its_adapters_before_it_serves(world: World) -> None:
    world.write(world.item("a"), world.item("b"), revision=3)
    await world.restart()
    assert (world.served(), world.told.revision) == ({"a": "one", "b": "one"}, 3)


async def test_a_restart_knows_what_is_assigned_without_the_file_and_without_the_operator(world: World) -> None:
    broken = world.item("b")
    world.opener.errors[broken.sources[0].uri] = SourceUnreadable("the volume is away")
    await world.assign(world.item("a"), broken, revision=1)
    world.opener.errors.clear()
    await world.restart()
    assert (world.served(), world.told.revision) == ({"a": "one", "b": "one"}, 1)


async def test_what_was_taken_away_while_the_pod_was_down_does_not_come_back(world: World) -> None:
    await world.assign(world.item("a"), world.item("b"), revision=1)
    world.write(world.item("b", "two"), world.item("c"), revision=2)
    await world.restart()
    assert (world.served(), world.told.open) == ({"b": "two", "c": "one"}, 0)


async def test_a_restart_into_a_bad_successor_serves_what_was_served(world: World) -> None:
    await world.assign(world.item("a"), revision=1)
    first = world.item("a")
    pinned = AssignedSource(uri=first.sources[0].uri, digest=world.desk.status("a").digest)
    await world.assign(AssignedAdapter(name="a", sources=[pinned]), revision=2)
    bad = AssignedSource(uri="file:///adapters/nothing", digest=OTHER_BASE)
    world.write(AssignedAdapter(name="a", sources=[bad]), revision=3)
    await world.restart()
    assert (world.served(), world.problems()) == ({"a": "one"}, {"a": "SourceNotFound"})


async def test_bytes_that_were_lost_with_a_worker_come_back_when_their_source_does(world: World) -> None:
    item = world.item("a")
    await world.assign(item, revision=1)
    world.opener.errors[item.sources[0].uri] = SourceUnreadable("the volume is away")
    await world.restart()
    assert (world.served(), world.problems()) == ({}, {"a": "SourceUnreadable"})
    world.opener.errors.clear()
    await world.clock.advance(5)
    assert (world.served(), world.problems()) == ({"a": "one"}, {})


async def test_a_start_does_not_wait_for_a_hanging_source_for_ever() -> None:
    world = World(load_seconds=20)
    item = world.item("a")
    world.opener.hanging[item.sources[0].uri] = asyncio.Event()
    world.write(item, world.item("b"), revision=1)
    before = world.clock.now
    await world.restart()
    assert (world.served(), world.clock.now - before) == ({"b": "one"}, 20)
    await world.desk.stop()


async def test_sources_that_hang_hold_a_start_up_for_one_bound_together() -> None:
    world = World(slots=8, load_seconds=20)
    items = [world.item(name) for name in "abc"]
    await world.assign(*items, revision=1)
    await world.by_hand("mine", revision=1)
    for item in items:
        world.opener.hanging[item.sources[0].uri] = asyncio.Event()
    world.write(*items, world.item("new"), revision=2)
    before = world.clock.now
    await world.restart()
    assert (world.served(), world.clock.now - before) == ({"mine": "hand", "new": "one"}, 20)
    assert {s.error.code for s in world.desk.registered() if s.error is not None} == {"Unavailable"}
    for hanging in world.opener.hanging.values():
        hanging.set()
    await world.clock.advance(60)
    assert set(world.served()) == {"a", "b", "c", "mine", "new"}
    await world.desk.stop()


async def test_what_is_taken_away_waits_for_no_source_that_hangs(world: World) -> None:
    await world.assign(world.item("gone"), revision=1)
    slow = [world.item(f"slow-{number}") for number in range(AT_ONCE)]
    for item in slow:
        world.opener.hanging[item.sources[0].uri] = asyncio.Event()
    told = await world.assign(*slow, revision=2)
    assert (world.served(), told.open) == ({}, AT_ONCE)


async def test_a_defect_in_a_load_is_told_and_tried_again_after_a_pause(world: World) -> None:
    item = world.item("a")
    defects: dict[str, Exception] = {item.sources[0].uri: KeyError("ours")}
    world.opener.errors = defects  # type: ignore[assignment]
    told = await world.assign(item, world.item("b"), revision=1)
    assert [(p.name, p.attempts, p.error is not None and p.error.code) for p in told.problems] == [("a", 1, "Internal")]
    await world.clock.advance(10)
    assert world.told.problems[0].attempts == 4  # after 1, 2 and 4 s
    await world.restart()
    assert world.served() == {"b": "one"}
    defects.clear()
    await world.clock.advance(20)
    assert (world.served(), world.problems()) == ({"a": "one", "b": "one"}, {})


async def test_a_defect_in_taking_away_does_not_spin(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await world.assign(world.item("a"), revision=1)
    calls = 0

    def broken(registry: Registry, name: str) -> None:
        nonlocal calls
        calls += 1
        if calls > 3:
            raise AssertionError("it is begun again at once")
        raise KeyError("ours")

    with monkeypatch.context() as patch:
        patch.setattr(Registry, "withdraw", broken)
        told = await world.assign(revision=2)
    assert (calls, told.open, world.served()) == (1, 1, {"a": "one"})
    await world.clock.advance(61)
    assert (world.told.open, world.served()) == (0, {})


async def test_a_defect_in_a_round_ends_that_round_alone(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await world.assign(world.item("a"), revision=1)

    async def broken(base: FakeBase) -> None:
        raise KeyError("ours")

    with monkeypatch.context() as patch:
        patch.setattr(FakeBase, "assignment", broken)
        await world.clock.advance(20)
    await world.assign(world.item("b"), revision=2)
    await world.clock.advance(20)
    assert world.served() == {"b": "one"}


async def test_a_newer_file_is_followed_without_a_call(world: World) -> None:
    await world.assign(world.item("a"), revision=1)
    world.write(world.item("b"), revision=2)
    await world.clock.advance(20)
    assert world.served() == {"b": "one"}
    world.write(world.item("c"), revision=1)  # the kubelet was late
    await world.clock.advance(20)
    assert (world.served(), world.told.revision) == ({"b": "one"}, 2)


@pytest.mark.parametrize(
    ("fence", "error"),
    [
        (Fence(pod_uid="other", owner_uid=OWNER, epoch=1, revision=9), WrongPod),
        (Fence(pod_uid="pod", owner_uid=OWNER, epoch=1, revision=4), StaleRevision),
        (Fence(pod_uid="pod", owner_uid=OWNER, epoch=0, revision=9), StaleRevision),
        (Fence(pod_uid="pod", owner_uid="somebody", epoch=1, revision=9), ForeignOwner),
        (Fence(pod_uid="pod", owner_uid="cli", epoch=1, revision=9), BadRequest),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
async def test_who_may_not_assign(world: World, fence: Fence, error: type[Exception]) -> None:
    await world.assign(world.item("a"), revision=5)
    with pytest.raises(error):
        await world.clock.run(world.desk.assign(AssignAdaptersRequest(fence=fence)))
    await world.clock.settle()
    assert world.served() == {"a": "one"}


async def test_another_object_owns_the_pod_once_the_file_says_so(world: World) -> None:
    await world.assign(world.item("a"), world.item("b"), revision=5)
    for older in (4, 5):  # a file that was late says nothing about who owns the pod now
        world.write(world.item("a"), revision=older, owner="model-version-2")
        with pytest.raises(ForeignOwner):
            await world.assign(world.item("a"), revision=6, owner="model-version-2")
    world.write(world.item("a"), revision=6, owner="model-version-2")
    told = await world.assign(world.item("a"), revision=6, owner="model-version-2")
    assert (world.served(), told.owner_uid) == ({"a": "one"}, "model-version-2")


async def test_a_person_overrules_an_assignment_only_above_its_revision_and_until_the_next_one(world: World) -> None:
    await world.assign(world.item("a"), revision=1)
    await world.assign(world.item("a"), world.item("b"), revision=5)
    with pytest.raises(StaleRevision):
        await world.by_hand("a", revision=3)
    await world.by_hand("a", revision=6)
    await world.clock.advance(30)
    assert (world.served(), world.problems()) == ({"a": "hand", "b": "one"}, {"a": "StaleRevision"})
    await world.assign(world.item("a"), world.item("b"), revision=7)
    assert (world.served(), world.problems()) == ({"a": "one", "b": "one"}, {})


async def test_adapters_loaded_by_hand_stay_beside_assigned_ones(world: World) -> None:
    await world.by_hand("mine", revision=1)
    await world.assign(world.item("a"), revision=1)
    await world.assign(revision=2)
    assert world.served() == {"mine": "hand"}
    await world.assign(world.item("mine"), revision=3)
    assert world.served() == {"mine": "one"}
    await world.assign(revision=4)
    assert world.served() == {}


async def test_adapters_of_a_deleted_object_stay_and_are_a_persons_to_change(world: World) -> None:
    await world.assign(world.item("a"), world.item("b"), revision=1)
    world.write(world.item("a"), world.item("b"), revision=1, released=True)
    await world.clock.advance(20)
    fence = Fence(pod_uid="pod", owner_uid="cli", epoch=1, revision=2)
    await world.clock.run(world.desk.unload("a", UnloadAdapterRequest(fence=fence)))
    await world.clock.advance(60)
    assert world.served() == {"b": "one"}
    await world.restart()
    assert world.served() == {"b": "one"}


async def test_without_a_source_for_the_base_what_is_served_stays(world: World) -> None:
    await world.assign(world.item("a"), revision=1)
    await world.assign(world.item("a", "two", base=OTHER_BASE), world.item("b", base=OTHER_BASE), revision=2)
    assert (world.served(), set(world.problems().values())) == ({"a": "one"}, {"IncompatibleAdapter"})
    world.base.live = VersionRef(version="1.1", digest=OTHER_BASE)
    world.desk.activate(OTHER_BASE)
    await world.clock.settle()
    assert (world.served(), world.problems()) == ({"a": "two", "b": "one"}, {})


async def test_the_name_of_the_base_is_told_as_a_problem(world: World) -> None:
    await world.assign(world.item("base"), world.item("a"), revision=1)
    assert (world.served(), world.problems()) == ({"a": "one"}, {"base": "BadRequest"})


async def test_two_hundred_adapters_are_loaded_and_the_engine_holds_just_those(world: World) -> None:
    items = [world.item(f"adapter-{number}") for number in range(200)]
    told = await world.assign(*items, revision=1)
    assert (len(world.served()), told.open, len(world.host.held)) == (200, 0, 200)
    told = await world.assign(*items[:20], revision=2)
    assert (len(world.served()), told.open, len(world.host.held)) == (20, 0, 20)


async def test_sources_are_looked_up_without_loading_anything(world: World) -> None:
    good = world.opener.put("file:///adapters/good", "one")
    sources = [AdapterSource(name="a", uri=good), AdapterSource(name="b", uri="file:///nothing")]
    found = (await world.clock.run(world.desk.reader.resolve(ResolveAdaptersRequest(sources=sources)))).adapters
    assert found[0].digest.startswith("sha256:")
    assert (found[0].error, found[1].error is not None and found[1].error.code) == (None, "SourceNotFound")
    assert (world.desk.contents(), world.host.calls) == ((), [])


async def test_an_unsigned_adapter_is_refused_what_served_stays_and_another_policy_counts_at_once(world: World) -> None:
    await world.assign(world.item("a"), revision=1)
    must = Verification(required=True)
    await world.assign(world.item("a", verification=must), revision=2)
    assert (world.served(), world.problems()) == ({"a": "one"}, {}), "what is served is not asked again"
    await world.assign(world.item("a", "two", verification=must), revision=3)
    assert (world.served(), world.problems()) == ({"a": "one"}, {"a": "SignatureMissing"})
    await world.assign(world.item("a", "two"), revision=4)
    assert (world.served(), world.problems()) == ({"a": "two"}, {})


async def test_an_adapter_is_asked_for_with_the_credentials_that_it_is_assigned_with(world: World) -> None:
    item = world.item("a")
    named = [msgspec.structs.replace(source, credentials="adapters") for source in item.sources]
    await world.assign(msgspec.structs.replace(item, sources=named), revision=1)
    assert world.opener.credentials == {item.sources[0].uri: "adapters"}
    world.opener.credentials.clear()
    await world.restart()
    assert world.opener.credentials == {item.sources[0].uri: "adapters"}, "a restarted pod asks with the same"


async def test_of_several_sources_none_keeps_the_answer_back_for_long() -> None:
    world = World(load_seconds=300)
    good, slow = (world.opener.put(f"s3://bucket/{name}", "one") for name in ("good", "slow"))
    world.opener.hanging[slow] = asyncio.Event()
    sources = [AdapterSource(name=uri[-4:], uri=uri) for uri in (slow, good)]
    before = world.clock.now
    found = (await world.clock.run(world.desk.reader.resolve(ResolveAdaptersRequest(sources=sources)))).adapters
    assert world.clock.now - before == 20
    assert [row.error.code if row.error else "" for row in found] == ["Unavailable", ""]
    alone = asyncio.create_task(world.desk.reader.resolve(ResolveAdaptersRequest(sources=sources[:1])))
    await world.clock.advance(100)
    world.opener.hanging[slow].set()
    assert (await alone).adapters[0].digest == found[1].digest
    await world.desk.stop()
