"""Swaps by an engine's own load from a folder: what is proved when, and what becomes of an engine that is not right."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from modelswap_engine.backends.external.plain.backend import PlainBackend
from modelswap_engine.backends.external.plain.memory import SumMemory
from modelswap_engine.backends.external.plain.staging import Staging
from modelswap_engine.backends.external.restart import RestartWish
from modelswap_engine.backends.port import PromptTrial, RequestPolicy
from modelswap_engine.protocol.errors import WorkerLost
from tests.support.checkpoints import write_checkpoint
from tests.support.external_world import BOUNDS, FakeStarting
from tests.support.fake_control import Broken
from tests.support.fake_plain import LAYOUT, FakePlain, read
from tests.support.orders import accepted, digest_of, load_order, refused, stage_order

NOBODY = RequestPolicy.NONE_RUNNING
OLD = {
    "model.a": ("BF16", (4,), bytes(8)),
    "model.b": ("BF16", (2,), bytes(4)),
    "model.wide": ("F32", (1,), bytes(4)),  # which an engine would convert, so that files say nothing of its checksum
}
NEW = {**OLD, "model.a": ("BF16", (4,), b"\x01\x00" * 4)}


class World:
    """A backend over a fake engine that was started on ``old``."""

    def __init__(self, root: Path, *, starting: FakeStarting | None = None) -> None:
        self.old, self.new = write_checkpoint(root / "old", OLD), write_checkpoint(root / "new", NEW)
        self.engine, self.wish = FakePlain(self.old), RestartWish()
        self.memory, self.folder = SumMemory(root / "sums"), root / "shared"
        self.backend = PlainBackend(
            self.engine,
            staging=Staging(self.folder, experimental=False),
            memory=self.memory,
            requests=self.engine.control.requests(),
            restart=self.wish,
            settings=BOUNDS,
            starting=starting,
        )

    async def prepared(self, operation: str = "op") -> None:
        order = stage_order(self.old, self.new, operation_id=operation, groups=self.backend.layout().groups)
        accepted(await self.backend.stage(order))
        accepted(await self.backend.prepare(operation))
        self.engine.calls.clear()

    async def committed(self, operation: str = "op") -> None:
        await self.prepared(operation)
        accepted(await self.backend.pause(operation, timeout=1, policy=NOBODY))
        accepted(await self.backend.commit(operation, NOBODY))

    def proven(self) -> str:
        (rank,) = self.backend.ranks()
        return rank.digest

    def written(self) -> None:
        """Somebody writes to the folders of ours."""
        for file in self.folder.glob("exchanges/*/model.safetensors"):
            file.write_bytes(file.read_bytes())


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World(tmp_path)
    accepted(await made.backend.load(load_order(made.old)))
    yield made
    await made.backend.stop()


@pytest.mark.parametrize(("strict", "between"), [(False, []), (True, ["hash"])])
async def test_nothing_is_hashed_while_requests_wait_unless_that_is_asked_for(
    world: World, strict: bool, between: list[str]
) -> None:
    await world.committed()
    assert world.proven() == ""
    assert accepted(await world.backend.verify("op", strict=strict)).digest == digest_of(world.new)
    accepted(await world.backend.resume("op"))
    assert world.engine.calls == ["pause", "exchange", *between, "resume"]
    assert world.proven() == digest_of(world.new)
    assert world.engine.live == read(world.new)
    accepted(await world.backend.release("op", previous=False))
    assert bool(world.memory.recall(digest_of(world.new), LAYOUT)) is strict  # what was seen is remembered


async def test_where_the_engine_did_not_say_that_all_went_well_everything_is_hashed(world: World) -> None:
    world.engine.well = False
    await world.committed()
    accepted(await world.backend.verify("op", strict=False))
    assert world.engine.calls[-1] == "hash"


async def test_a_load_that_did_not_take_is_found_by_the_check_that_follows(world: World) -> None:
    world.engine.keeps = {"model.a": bytes(8)}
    await world.committed()
    accepted(await world.backend.verify("op", strict=False))
    accepted(await world.backend.resume("op"))
    (wrong,) = (await world.backend.hashes("*")).runtime
    assert wrong.name == "model.a"
    assert refused(await world.backend.verify("op", strict=True)) == "DigestMismatch"


async def test_a_folder_that_was_written_to_never_reaches_the_engine(world: World) -> None:
    await world.prepared()
    accepted(await world.backend.pause("op", timeout=1, policy=NOBODY))
    world.written()
    assert refused(await world.backend.commit("op", NOBODY)) == "SourceChanged"
    accepted(await world.backend.rollback("op"))
    assert world.engine.calls == ["pause"]
    assert world.proven() == digest_of(world.old)


async def test_an_engine_under_whose_load_the_folder_was_written_to_is_not_trusted(world: World) -> None:
    await world.prepared()
    accepted(await world.backend.pause("op", timeout=1, policy=NOBODY))
    world.engine.on_load = lambda folder: world.written()
    with pytest.raises(WorkerLost, match="changed after it was proved"):
        await world.backend.commit("op", NOBODY)
    assert world.wish.wanted
    assert not world.backend.ranks()[0].alive


async def test_what_was_exchanged_is_taken_back_and_all_of_it_hashed(world: World) -> None:
    await world.committed()
    accepted(await world.backend.rollback("op"))
    assert world.proven() == ""
    assert accepted(await world.backend.verify("op", strict=False)).digest == digest_of(world.old)
    assert world.engine.calls == ["pause", "exchange", "undo", "hash"]
    assert world.engine.live == read(world.old)


async def test_an_engine_that_could_not_be_stopped_goes_on_and_takes_no_commit(world: World) -> None:
    await world.prepared()
    world.engine.drains = False
    assert refused(await world.backend.pause("op", timeout=1, policy=NOBODY)) == "Busy"
    assert refused(await world.backend.commit("op", NOBODY)) == "Internal"
    accepted(await world.backend.resume("op"))
    assert world.engine.calls == ["pause", "resume"]


@pytest.mark.parametrize("policy", [RequestPolicy.RECOMPUTE, RequestPolicy.FREEZE])
async def test_no_answer_is_mixed_of_two_versions(world: World, policy: RequestPolicy) -> None:
    await world.prepared()
    assert refused(await world.backend.pause("op", timeout=1, policy=policy)) == "UnsupportedChange"
    assert world.engine.calls == []


async def test_what_was_staged_beside_one_start_is_not_loaded_into_the_next(world: World) -> None:
    await world.prepared()
    world.engine.restart(world.old)
    with pytest.raises(WorkerLost, match="restarted"):
        await world.backend.prepare("op")
    assert not world.backend.ranks()[0].alive
    with pytest.raises(WorkerLost):
        await world.backend.pause("op", timeout=1, policy=NOBODY)
    assert world.engine.calls == []


async def test_a_check_waits_for_a_moment_without_requests(world: World) -> None:
    world.engine.calls.clear()
    world.engine.control.running = 1
    checking = asyncio.create_task(world.backend.hashes("*"))
    await asyncio.sleep(0)
    assert world.engine.calls == []
    world.engine.control.running = 0
    assert (await checking).tensors.keys() == OLD.keys() - {"model.wide"}


async def test_what_agreed_with_nothing_is_not_remembered_as_right(world: World) -> None:
    (sums,) = world.memory.recall(digest_of(world.old), LAYOUT).values()
    assert {name for name, value in sums.items() if value} == {"model.a", "model.b"}


async def test_where_somebody_starts_engines_the_next_start_is_waited_for(tmp_path: Path) -> None:
    starting = FakeStarting()
    world = World(tmp_path, starting=starting)
    world.engine.live = read(world.new)

    world.engine.on_wrong = lambda: world.engine.restart(world.old)
    accepted(await world.backend.load(load_order(world.old)))
    assert world.engine.calls == ["take", "take"]
    assert world.proven() == digest_of(world.old)
    await world.backend.stop()


async def test_where_nobody_does_an_engine_that_holds_something_else_is_lost(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.engine.live = read(world.new)
    with pytest.raises(WorkerLost, match="other weights"):
        await world.backend.load(load_order(world.old))
    assert world.engine.calls == ["take"]
    assert world.proven() == ""


# Prompts.

TRIALS = [PromptTrial(text="hello", max_logprob_delta=0.5)]


async def test_prompts_run_within_the_pause_on_what_was_loaded(world: World) -> None:
    world.engine.control.logprob = lambda: -1.0 if world.engine.live == read(world.old) else -1.4
    accepted(await world.backend.try_out("op", TRIALS))
    assert "go on" not in world.engine.calls
    await world.committed()
    accepted(await world.backend.verify("op", strict=False))
    accepted(await world.backend.try_out("op", TRIALS))
    accepted(await world.backend.resume("op"))
    assert world.engine.calls == ["pause", "exchange", "go on", "resume"]
    assert world.proven() == digest_of(world.new)
    assert not world.wish.wanted


async def test_one_that_fails_leaves_the_version_to_be_taken_back(world: World) -> None:
    world.engine.control.logprob = lambda: -1.0 if world.engine.live == read(world.old) else -1.6
    accepted(await world.backend.try_out("op", TRIALS))
    await world.committed()
    accepted(await world.backend.verify("op", strict=False))
    assert refused(await world.backend.try_out("op", TRIALS)) == "ChecksFailed"
    accepted(await world.backend.rollback("op"))
    assert accepted(await world.backend.verify("op", strict=False)).digest == digest_of(world.old)
    accepted(await world.backend.resume("op"))
    assert world.engine.live == read(world.old)


async def test_an_engine_that_is_lost_with_a_prompt_has_to_start_again(world: World) -> None:
    accepted(await world.backend.try_out("op", TRIALS))
    await world.committed()
    accepted(await world.backend.verify("op", strict=False))
    world.engine.control.broken["logprobs"] = Broken.LOST_BEFORE
    with pytest.raises(WorkerLost):
        await world.backend.try_out("op", TRIALS)
    assert world.wish.wanted
    assert world.proven() == ""
