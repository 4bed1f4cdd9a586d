"""Plans over random checkpoints: doing what one says makes the live bytes the target's, and reads no more than that."""

import dataclasses

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from modelswap_engine.protocol.engine_state import Capabilities, MemoryState
from modelswap_engine.protocol.messages import PlanRequest, VersionRef
from modelswap_engine.protocol.policy import Loading, LoadingMode, Traffic
from modelswap_engine.swap.plan import Nothing, ReadTensors, Situation, UseRetained, decide
from tests.support.fake_source import FakeCheckpoint

NAMES = [f"t{number}" for number in range(6)]
contents = st.fixed_dictionaries({name: st.sampled_from([b"aaaa", b"bbbb"]) for name in NAMES})
partitions = st.lists(st.sampled_from(range(3)), min_size=len(NAMES), max_size=len(NAMES)).map(
    lambda marks: tuple(
        tuple(name for name, mark in zip(NAMES, marks, strict=True) if mark == group) for group in sorted(set(marks))
    )
)
modes = st.sampled_from(list(LoadingMode))


def situation(live, target, groups, *, previous="", memory=None, reserve=0, method="pointer"):
    return Situation(
        live=VersionRef(version="live", digest=live.digest),
        live_manifest=live.manifest(),
        target_manifest=target.manifest(),
        groups=groups,
        side=(),
        previous=previous,
        memory=memory or MemoryState(),
        capabilities=Capabilities(commit_method=method),
        reserve=reserve,
    )


def ask(target, mode=LoadingMode.AUTO):
    return PlanRequest(target=VersionRef(digest=target.digest), loading=Loading(mode=mode), traffic=Traffic())


@given(contents, contents, partitions, modes)
def test_doing_the_plan_makes_the_target(old, new, groups, mode):
    live, target = FakeCheckpoint(old), FakeCheckpoint(new)
    decision = decide(situation(live, target, groups), ask(target, mode))
    assert decision.refusals == ()
    plan = decision.plan
    changed = {name for name in NAMES if old[name] != new[name]}
    assert set(plan.changed_names) == changed
    assert plan.changed_bytes == 4 * len(changed)
    if old == new:
        assert decision.work == Nothing()
        assert plan.bytes_to_fetch == plan.groups == 0
        return
    assert isinstance(decision.work, ReadTensors)
    read = set(decision.work.names)
    assert {name: new[name] if name in read else old[name] for name in NAMES} == new
    assert all(read.issuperset(group) or read.isdisjoint(group) for group in groups)
    if mode is not LoadingMode.FULL:
        assert all(changed.intersection(group) for group in groups if read.issuperset(group))
    assert plan.bytes_to_fetch == 4 * len(read)


@given(contents, contents, partitions)
def test_tensors_that_the_engine_does_not_read_are_not_fetched(old, new, groups):
    live, target = FakeCheckpoint(old), FakeCheckpoint(new)
    work = decide(situation(live, target, groups[1:]), ask(target, LoadingMode.FULL)).work
    if isinstance(work, ReadTensors):
        assert not set(groups[0]).intersection(work.names)


@given(contents, contents, partitions, st.integers(0, 40), st.integers(0, 40), st.integers(0, 10))
def test_memory_is_refused_exactly_when_it_cannot_be_made(old, new, groups, available, previous, reserve):
    live, target = FakeCheckpoint(old), FakeCheckpoint(new)
    memory = MemoryState(available_bytes=available, previous_bytes=previous)
    decision = decide(situation(live, target, groups, memory=memory, reserve=reserve), ask(target))
    needed, free = decision.plan.memory_needed, max(0, available - reserve)
    codes = [refusal.code for refusal in decision.refusals]
    assert codes == (["InsufficientMemory"] if needed > free + previous else [])
    if isinstance(decision.work, ReadTensors):
        assert decision.work.drop_previous == (needed > free and previous > 0)


@given(contents, contents, partitions, st.integers(0, 60), st.booleans())
def test_where_tensors_are_copied_the_old_values_need_room_too(old, new, groups, available, retained):
    live, target = FakeCheckpoint(old), FakeCheckpoint(new)
    memory = MemoryState(available_bytes=available, previous_bytes=10)
    previous = target.digest if retained else ""

    def plan(method):
        return decide(situation(live, target, groups, memory=memory, method=method, previous=previous), ask(target))

    pointed, copied = plan("pointer"), plan("copy")
    size = 4 * len({name for group in groups for name in group if any(old[n] != new[n] for n in group)})
    assert pointed.plan.memory_needed == (0 if retained else size)
    assert copied.plan.memory_needed == (size if retained else 2 * size)
    assert copied.plan.bytes_to_fetch == pointed.plan.bytes_to_fetch
    droppable = 10 if isinstance(copied.work, ReadTensors) else 0
    assert bool(copied.refusals) == (copied.plan.memory_needed > available + droppable)


@given(contents, contents, partitions, st.integers(0, 40), st.integers(0, 40), st.integers(0, 10))
def test_tensors_of_a_device_need_its_memory_and_not_the_containers(old, new, groups, available, host, reserve):
    live, target = FakeCheckpoint(old), FakeCheckpoint(new)
    memory = MemoryState(available_bytes=host, device_limit_bytes=64, device_available_bytes=available)
    decision = decide(situation(live, target, groups, memory=memory, reserve=reserve), ask(target))
    fits = decision.plan.memory_needed <= max(0, available - reserve)
    assert [refusal.code for refusal in decision.refusals] == ([] if fits else ["InsufficientMemory"])
    assert all("device" in refusal.advice for refusal in decision.refusals)
    assert decision.plan.memory_available == available


@given(contents, contents, partitions, modes)
def test_the_retained_version_is_used_unless_everything_is_to_be_read(old, new, groups, mode):
    live, target = FakeCheckpoint(old), FakeCheckpoint(new)
    decision = decide(situation(live, target, groups, previous=target.digest), ask(target, mode))
    if old != new:
        assert isinstance(decision.work, UseRetained) == (mode is not LoadingMode.FULL)
        assert (decision.plan.bytes_to_fetch == 0) == (mode is not LoadingMode.FULL)


@given(
    contents,
    contents,
    st.sets(st.sampled_from(NAMES)),
    st.sets(st.sampled_from(NAMES)),
    st.booleans(),
    st.sampled_from(["Tiny", "Other"]),
)
def test_another_layout_is_always_refused_and_names_a_tensor(old, new, removed, resized, added, architecture):
    changed = {name: data + b"+" if name in resized else data for name, data in new.items() if name not in removed}
    target = FakeCheckpoint(changed | ({"extra": b"x"} if added else {}), architecture=architecture)
    live = FakeCheckpoint(old)
    decision = decide(situation(live, target, ((NAMES[0],),)), ask(target))
    same = not removed and not resized and not added and architecture == "Tiny"
    if target.digest == live.digest:
        return
    assert (decision.refusals == ()) == same
    assert all(refusal.advice for refusal in decision.refusals)
    tensors = {refusal.details["tensor"] for refusal in decision.refusals if "tensor" in refusal.details}
    assert tensors <= removed | resized | {"extra"}
    assert len(tensors) == bool(removed) + bool(resized - removed) + added


@given(contents, contents, partitions)
def test_a_plan_survives_the_wire(old, new, groups):
    live, target = FakeCheckpoint(old), FakeCheckpoint(new)
    plan = decide(situation(live, target, groups), ask(target)).plan
    assert msgspec.json.decode(msgspec.json.encode(plan), type=type(plan)) == plan


@given(contents, contents, st.lists(st.sampled_from(NAMES), min_size=2, max_size=3, unique=True))
def test_tied_tensors_that_differ_are_refused_by_name(old, new, tied):
    live, target = FakeCheckpoint(old), FakeCheckpoint(new)
    facts = dataclasses.replace(situation(live, target, ((*tied,),)), tied=(tuple(tied),))
    decision = decide(facts, ask(target))
    if old == new:
        return
    named = [refusal.details["tensor"] for refusal in decision.refusals if "tiedTo" in refusal.details]
    assert named == [name for name in tied[1:] if new[name] != new[tied[0]]]
