"""Weight updates by a trainer, through the coordinator: one transaction however many parts arrive."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from modelswap_engine.protocol.assignment import Assignment, AssignmentTarget, WeightsPolicy
from modelswap_engine.protocol.engine_state import UpdateState
from modelswap_engine.protocol.errors import (
    BadRequest,
    Busy,
    Cancelled,
    DigestMismatch,
    ForeignOwner,
    IncompatibleModel,
    InsufficientMemory,
    Internal,
    InvalidCheckpoint,
    NotFound,
    SourceNotAllowed,
    SourceUnreadable,
    WeightsManaged,
    WorkerLost,
)
from modelswap_engine.protocol.messages import SwapStatus, VersionRef
from modelswap_engine.protocol.states import SwapState
from modelswap_engine.protocol.updates import (
    AbortUpdate,
    BeginUpdate,
    CommitUpdate,
    DiskPart,
    SharedPart,
    SharedTensor,
)
from tests.support.fake_backend import Fault
from tests.support.swapping import OWNER, World, checkpoint, request
from tests.support.tensor_files import written

NORM, EMBED, Q, K = b"N" * 2, b"E" * 8, b"Q" * 4, b"K" * 4


class Trainer:
    """Calls the coordinator as the routes do, in the world's time."""

    def __init__(self, world: World, folder: Path) -> None:
        self.world = world
        self.folder = folder
        self.sent = 0

    async def begin(self, update_id: str = "u", **options: Any) -> UpdateState:
        call = self.world.coordinator.updates.begin(BeginUpdate(update_id=update_id, **options))
        state: UpdateState = await self.world.clock.run(call)
        return state

    async def send(self, update_id: str = "u", *, owner: str = "", **tensors: bytes) -> UpdateState:
        self.sent += 1
        file = written(self.folder / f"part-{self.sent}.safetensors", tensors)
        call = self.world.coordinator.parts.tensors(update_id, file, owner=owner)
        state: UpdateState = await self.world.clock.run(call)
        file.unlink()  # after the answer the bytes are the sender's again
        return state

    async def disk(self, uri: str, *names: str) -> UpdateState:
        call = self.world.coordinator.parts.disk("u", DiskPart(uri=uri, names=names))
        state: UpdateState = await self.world.clock.run(call)
        return state

    async def commit(self, update_id: str = "u", **options: Any) -> SwapStatus:
        call = self.world.coordinator.updates.commit(update_id, CommitUpdate(**options))
        status: SwapStatus = await self.world.clock.run(call)
        return status

    async def abort(self, update_id: str = "u", *, owner: str = "") -> None:
        await self.world.clock.run(self.world.coordinator.updates.abort(update_id, AbortUpdate(owner=owner)))


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World(tmp_path / "pod")
    await made.start()
    yield made
    assert made.backend.violations == []
    await made.stop()


@pytest.fixture
def trainer(world: World, tmp_path: Path) -> Trainer:
    return Trainer(world, tmp_path)


def serves(world: World, **changed: bytes) -> bool:
    """Say whether exactly these bytes are live, under their own content digest."""
    wanted = checkpoint(**changed)
    live = world.state.live
    return world.backend.live == wanted.tensors and live is not None and live.digest == wanted.digest


def untouched(world: World) -> bool:
    return serves(world) and world.state.update is None and world.backend.inbox is None and world.state.gate.open


async def test_many_parts_are_one_swap(world: World, trainer: Trainer) -> None:
    other = world.publish("other", checkpoint(embed=EMBED, norm=b"x" * 2))
    begun = await trainer.begin(seconds=30)
    assert (begun.tensors, begun.base, begun.seconds_left) == (0, world.template, 30)
    await trainer.send(norm=NORM)
    await trainer.disk(other.uri, "emb*")
    state = await trainer.send(q=Q, k=K)
    assert (state.tensors, state.bytes, state.sources) == (4, 18, ["tensor", "disk"])
    assert world.state.update == state
    assert serves(world)  # nothing of it is live
    assert "commit" not in world.backend.steps
    status = await trainer.commit(version="step-1")
    assert status.state is SwapState.SERVING, status.error
    assert serves(world, norm=NORM, embed=EMBED, q=Q, k=K)
    assert world.state.live is not None
    assert world.state.live.version == world.listener.active.version == "step-1"
    assert world.backend.steps.count("commit") == world.backend.steps.count("stage") == 1
    assert status.bytes_fetched == 18
    assert world.state.update is None
    again = await trainer.commit()
    assert again == status


async def test_the_last_of_two_tensors_with_one_name_counts(world: World, trainer: Trainer) -> None:
    other = world.publish("other", checkpoint(norm=b"d" * 2, embed=b"d" * 8))
    await trainer.begin()
    await trainer.send(norm=b"1" * 2, embed=b"1" * 8)
    await trainer.send(norm=NORM)
    await trainer.disk(other.uri, "embed")
    await trainer.commit()
    assert serves(world, norm=NORM, embed=b"d" * 8)


async def test_the_label_tells_results_apart(world: World, trainer: Trainer) -> None:
    for number, norm in enumerate((b"a" * 2, b"b" * 2)):
        await trainer.begin(f"u{number}")
        await trainer.send(f"u{number}", norm=norm)
        status = await trainer.commit(f"u{number}")
        assert status.target.version == f"1.0+{status.target.digest[7:15]}"


async def test_half_of_a_fused_parameter_is_completed_from_what_is_live(world: World, trainer: Trainer) -> None:
    await trainer.begin()
    await trainer.send(q=Q)
    assert (await trainer.commit()).state is SwapState.SERVING
    assert serves(world, q=Q)
    # And once more over a version that has no files any more.
    await trainer.begin("second")
    await trainer.send("second", k=K)
    assert (await trainer.commit("second")).state is SwapState.SERVING
    assert serves(world, q=Q, k=K)


async def test_a_whole_version_from_disk_with_tensors_over_it(world: World, trainer: Trainer) -> None:
    other = world.publish("other", checkpoint(embed=EMBED, q=Q))
    await trainer.begin()
    await trainer.disk(other.uri)
    await trainer.send(norm=NORM)
    with pytest.raises(Busy):
        await trainer.disk(other.uri)
    assert (await trainer.commit()).state is SwapState.SERVING
    assert serves(world, embed=EMBED, q=Q, norm=NORM)


async def test_a_whole_version_from_disk_alone_lasts(world: World, trainer: Trainer) -> None:
    other = world.publish("other", checkpoint(embed=EMBED))
    await trainer.begin()
    await trainer.disk(other.uri)
    status = await trainer.commit()
    assert status.target == VersionRef(version="other", uri=other.uri, digest=other.digest)
    await world.crash()
    await world.start()
    assert serves(world, embed=EMBED)


async def test_an_update_without_parts_changes_nothing_but_the_label(world: World, trainer: Trainer) -> None:
    await trainer.begin()
    assert (await trainer.commit(version="renamed")).state is SwapState.SERVING
    assert serves(world)
    assert world.state.live is not None
    assert world.state.live.version == "renamed"
    assert "stage" not in world.backend.steps


async def test_abort_leaves_nothing(world: World, trainer: Trainer) -> None:
    await trainer.begin()
    await trainer.send(norm=NORM)
    assert world.backend.inbox is not None
    await trainer.abort()
    assert untouched(world)
    with pytest.raises(NotFound):
        await trainer.commit()
    await trainer.begin("next")


async def test_abort_ends_a_part_that_is_under_way(world: World, trainer: Trainer) -> None:
    await trainer.begin()
    world.backend.faults["transfer"] = Fault.HANG
    file = written(trainer.folder / "part.safetensors", {"norm": NORM})
    sending = asyncio.ensure_future(world.coordinator.parts.tensors("u", file, owner=""))
    await world.clock.settle()
    assert world.backend.steps[-1] == "transfer"
    await trainer.abort()
    with pytest.raises(Cancelled):
        await sending
    assert untouched(world)


async def test_a_lease_that_nobody_renews_ends_the_update(world: World, trainer: Trainer) -> None:
    await trainer.begin(seconds=10)
    await world.clock.advance(8)
    await trainer.send(norm=NORM)
    await world.clock.advance(8)
    assert world.state.update is not None  # the part renewed it
    await world.clock.advance(3)
    assert untouched(world)
    with pytest.raises(NotFound):
        await trainer.send(norm=NORM)


async def test_one_update_at_a_time_and_no_swap_beside_it(world: World, trainer: Trainer) -> None:
    await trainer.begin(owner="a", seconds=30)
    await world.clock.advance(20)
    assert (await trainer.begin(owner="a", seconds=30)).seconds_left == 30
    with pytest.raises(ForeignOwner):
        await trainer.begin(owner="b")
    with pytest.raises(ForeignOwner):
        await trainer.send(owner="b", norm=NORM)
    with pytest.raises(ForeignOwner):
        await trainer.abort(owner="b")
    with pytest.raises(Busy):
        await trainer.begin("other")
    with pytest.raises(Busy):
        await world.swap(world.publish("1.1", checkpoint(norm=NORM)), "op-1")
    await trainer.send(owner="a", norm=NORM)
    await trainer.commit(owner="a")
    with pytest.raises(Busy):
        await trainer.begin(owner="a")  # an id names one update for good
    assert serves(world, norm=NORM)


async def test_a_managed_pod_refuses_and_an_external_one_does_not(world: World, trainer: Trainer) -> None:
    target = world.publish("1.1", checkpoint(norm=NORM))
    await world.swap(target, "op-1")
    with pytest.raises(WeightsManaged):
        await trainer.begin()
    stable = AssignmentTarget(version=target.version, uri=target.uri, digest=target.digest)
    world.assignment = Assignment(owner_uid=OWNER, epoch=1, revision=1, stable=stable)
    with pytest.raises(WeightsManaged):
        await trainer.begin()
    world.assignment = Assignment(owner_uid=OWNER, epoch=1, revision=1, stable=stable, weights=WeightsPolicy.EXTERNAL)
    await trainer.begin()
    await trainer.send(embed=EMBED)
    assert (await trainer.commit()).state is SwapState.SERVING
    assert serves(world, norm=NORM, embed=EMBED)
    assert world.state.revision == 1  # no decision of the operator was overtaken
    # The next decision of the operator is welcome.
    third = world.publish("1.2", checkpoint(norm=NORM, q=Q))
    assert (await world.swap(third, "op-2", revision=2)).state is SwapState.SERVING
    assert serves(world, norm=NORM, q=Q)


@pytest.mark.parametrize(
    ("tensors", "error"),
    [({"nothing": b"x"}, IncompatibleModel), ({"norm": b"x" * 3}, IncompatibleModel)],
)
async def test_what_does_not_fit_is_refused_and_the_update_goes_on(
    world: World, trainer: Trainer, tensors: dict[str, bytes], error: type[Exception]
) -> None:
    await trainer.begin()
    await trainer.send(embed=EMBED)
    with pytest.raises(error):
        await trainer.send(**tensors)
    await trainer.commit()
    assert serves(world, embed=EMBED)


async def test_what_is_no_safetensors_file_is_refused(world: World, trainer: Trainer, tmp_path: Path) -> None:
    await trainer.begin()
    file = tmp_path / "hostile.safetensors"
    file.write_bytes(b"\x80\x04.garbage")
    with pytest.raises(InvalidCheckpoint):
        await world.clock.run(world.coordinator.parts.tensors("u", file, owner=""))
    with pytest.raises(BadRequest):
        await trainer.disk(world.template.uri, "no.such.*")
    world.sources.errors["file:///etc"] = SourceNotAllowed("outside")
    with pytest.raises(SourceNotAllowed):
        await trainer.disk("file:///etc", "*")


async def test_shared_memory_is_copied_by_name(world: World, trainer: Trainer, tmp_path: Path) -> None:
    segment = Path("/dev/shm") / f"modelswap-test-{id(world)}"
    segment.write_bytes(b"..." + NORM)
    try:
        await trainer.begin()
        part = SharedPart(segment=segment.name, tensors=[SharedTensor(name="norm", dtype="U8", shape=[2], offset=3)])
        await world.clock.run(world.coordinator.parts.shared("u", part))
    finally:
        segment.unlink()
    with pytest.raises(SourceUnreadable):
        await world.clock.run(world.coordinator.parts.shared("u", part))
    await trainer.commit()
    assert serves(world, norm=NORM)


@pytest.mark.parametrize("segment", ["", ".", "..", "a/b", "../etc/passwd", "/dev/shm/x", "a\0b"])
async def test_a_segment_is_a_plain_name(world: World, trainer: Trainer, segment: str) -> None:
    await trainer.begin()
    part = SharedPart(segment=segment, tensors=[SharedTensor(name="norm", dtype="U8", shape=[2])])
    with pytest.raises(BadRequest):
        await world.clock.run(world.coordinator.parts.shared("u", part))


async def test_a_pin_that_is_not_met_drops_the_update(world: World, trainer: Trainer) -> None:
    await trainer.begin()
    await trainer.send(norm=NORM)
    with pytest.raises(DigestMismatch):
        await trainer.commit(digest=world.template.digest)
    assert untouched(world)
    await trainer.begin("next")
    await trainer.send("next", norm=NORM)
    assert (await trainer.commit("next", digest=checkpoint(norm=NORM).digest)).state is SwapState.SERVING


@pytest.mark.parametrize("step", ["stage", "prepare", "pause", "commit", "verify", "resume"])
@pytest.mark.parametrize("fault", [Fault.ERROR, Fault.LATE_ERROR, Fault.DIE])
async def test_a_failed_commit_restores_name_and_bytes(world: World, trainer: Trainer, step: str, fault: Fault) -> None:
    await trainer.begin()
    await trainer.send(norm=NORM, q=Q)
    world.backend.faults[step] = fault
    status = await trainer.commit(version="step-1")
    assert status.state in (SwapState.ABORTED, SwapState.ROLLED_BACK)
    world.assert_serves(world.template)  # the name, the place it is loaded from and the bytes are the old ones
    assert world.backend.inbox is None
    await trainer.begin("next")
    await trainer.send("next", norm=NORM)
    assert (await trainer.commit("next")).state is SwapState.SERVING


async def test_ranks_that_received_different_tensors(world: World, trainer: Trainer) -> None:
    await trainer.begin()
    world.backend.faults["transfer"] = Fault.LIE
    with pytest.raises(Internal):
        await trainer.send(norm=NORM)


async def test_what_arrived_is_lost_with_the_worker(world: World, trainer: Trainer) -> None:
    await trainer.begin()
    await trainer.send(norm=NORM)
    world.backend.kill()
    await world.clock.advance(5)
    assert world.state.ready
    with pytest.raises(WorkerLost):
        await trainer.commit()
    assert untouched(world)


async def test_a_sent_version_is_lost_with_the_worker_and_says_so(world: World, trainer: Trainer) -> None:
    await trainer.begin()
    await trainer.send(norm=NORM)
    await trainer.commit()
    world.backend.kill()
    await world.clock.advance(5)
    world.assert_serves(world.template)


async def test_a_sent_version_is_lost_with_the_process(world: World, trainer: Trainer) -> None:
    await trainer.begin()
    await trainer.send(norm=NORM)
    status = await trainer.commit()
    await world.crash()
    await world.start()
    world.assert_serves(world.template)
    assert world.coordinator.operation("u") == status  # the answer to its id stays


@pytest.mark.parametrize("fault", [Fault.DIE_AFTER, Fault.DIE])
async def test_a_sent_version_cannot_come_back_after_a_failed_swap(
    world: World, trainer: Trainer, fault: Fault
) -> None:
    await trainer.begin()
    await trainer.send(norm=NORM)
    await trainer.commit()
    world.backend.faults["verify"] = fault
    status = await world.swap(world.publish("1.1", checkpoint(embed=EMBED)), "op-1")
    # Neither the new nor the old bytes could be proved; the version below them serves, proved.
    assert status.state is SwapState.QUARANTINED
    world.assert_serves(world.template)
    assert not world.state.quarantined


async def test_rollback_to_and_from_a_sent_version(world: World, trainer: Trainer) -> None:
    await trainer.begin()
    await trainer.send(norm=NORM)
    await trainer.commit(version="step-1")
    back = request(world.template, "back", revision=1)
    await world.clock.run(world.coordinator.swap(back))
    assert (await world.ended("back")).bytes_fetched == 0
    world.assert_serves(world.template)
    previous = world.state.previous
    assert previous is not None
    assert previous.version == "step-1"
    forth = request(previous, "forth", revision=2)
    await world.clock.run(world.coordinator.swap(forth))
    assert (await world.ended("forth")).state is SwapState.SERVING
    assert serves(world, norm=NORM)


async def test_memory_is_asked_before_bytes_move(world: World, trainer: Trainer) -> None:
    await world.swap(world.publish("1.1", checkpoint(embed=EMBED)), "op-1", owner="cli")
    await trainer.begin()
    world.backend.limit = 18 + 8 + 5  # live, previous, and room for the smallest one on both ranks
    with pytest.raises(InsufficientMemory, match="receiving"):
        await trainer.send(embed=b"3" * 8)  # 13 bytes could be had, each of the two ranks takes 8
    assert "transfer" not in world.backend.steps
    await trainer.send(norm=NORM)
    assert world.backend.previous is not None
    await trainer.send(q=Q)  # the retained version goes first
    assert world.backend.previous is None
    world.backend.limit = -1
    await trainer.send(k=K)
    assert (await trainer.commit()).state is SwapState.SERVING
    assert serves(world, embed=EMBED, norm=NORM, q=Q, k=K)


async def test_stopping_drops_it(world: World, trainer: Trainer) -> None:
    await trainer.begin()
    await trainer.send(norm=NORM)
    await world.clock.run(world.coordinator.drain(5))
    assert serves(world)
