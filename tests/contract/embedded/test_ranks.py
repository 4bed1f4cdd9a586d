"""Two ranks, as one split model and as two replicas: stopped, changed and lost together.

One rank of two fails, dies, hangs or says something else at each step of a swap, and both end on the old bytes; two
loops of one model are stopped before the same step, however often.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import pytest_asyncio
from msgspec.structs import replace

from modelswap_engine.backends.port import FinishReason, Reply, RequestPolicy, Sampling, Tokens
from modelswap_engine.protocol.states import SwapState
from tests.contract.embedded.conftest import SETTINGS, Checkpoints, Engine
from tests.support.orders import answer, collect, digest_of, ids, load_order, prompt, stage_order
from tests.support.ranked import Ranked

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="session")]

BASE = replace(SETTINGS, lora_slots=0, call_timeout=10.0, heartbeat_seconds=2.0)
LAYOUTS = {"split": replace(BASE, tensor_parallel=2), "replicas": replace(BASE, data_parallel=2)}
STEPS = ("stage", "prepare", "pause", "commit", "midway", "verify", "resume")
QUICK = [
    *(f"{step}@1:raise" for step in STEPS),
    *(f"{step}@1:lie" for step in ("prepare", "verify")),
    *(f"{step}@0:raise" for step in ("pause", "midway")),
]
"""Nobody has to be started again after these; they act the first time in a swap."""
COSTLY = [f"{step}@{rank}:{action}" for rank in (0, 1) for step in STEPS for action in ("kill", "stop")]
IN_LANE = {"split": ("commit@1:stop",), "replicas": ()}
_LONG = "A prompt that fills several pages of the cache: " + "the quick brown fox jumps over the lazy dog. " * 3


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def engines(
    checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[dict[str, Ranked]]:
    """Both layouts, each for all tests of this file."""
    made = {
        layout: Ranked(tmp_path_factory.mktemp(layout), settings, checkpoints.root)
        for layout, settings in LAYOUTS.items()
    }
    await asyncio.gather(*(engine.start(checkpoints.v1, "1.0") for engine in made.values()))
    yield made
    await asyncio.gather(*(engine.coordinator.stop() for engine in made.values()))


async def old_version(engine: Ranked, checkpoints: Checkpoints) -> None:
    """Serve 1.0, whatever the test before left behind."""
    await engine.whole()
    live = engine.coordinator.state().live
    if live is None or live.version != "1.0":
        status = await engine.swap(checkpoints.v1, "1.0")
        assert status.state is SwapState.SERVING, status.error


async def survives(engine: Ranked, checkpoints: Checkpoints, fault: str) -> None:
    await old_version(engine, checkpoints)
    status = await engine.swap(checkpoints.v2, "1.1", fault=f"{fault}#1")
    assert status.state in (SwapState.ABORTED, SwapState.ROLLED_BACK), (fault, status.state)
    assert status.error is not None, fault
    await engine.assert_serves(checkpoints.v1, "1.0")


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_a_rank_that_fails_or_lies_takes_both_back(
    engines: dict[str, Ranked], checkpoints: Checkpoints, layout: str
) -> None:
    """At every step, and nobody is started again for it; the next swap is welcome."""
    engine = engines[layout]
    before = [rank.boot_id for rank in engine.backend.ranks()]
    for fault in QUICK:
        await survives(engine, checkpoints, fault)
    assert [rank.boot_id for rank in engine.backend.ranks()] == before
    status = await engine.swap(checkpoints.v2, "1.1")
    assert status.state is SwapState.SERVING, status.error
    await engine.assert_serves(checkpoints.v2, "1.1")


@pytest.mark.parametrize(
    ("layout", "fault"),
    [
        pytest.param(layout, fault, marks=() if fault in IN_LANE[layout] else pytest.mark.full)
        for layout in LAYOUTS
        for fault in COSTLY
    ],
)
async def test_a_rank_that_dies_or_hangs_takes_both_back_and_is_caught_up(
    engines: dict[str, Ranked], checkpoints: Checkpoints, layout: str, fault: str
) -> None:
    engine = engines[layout]
    await old_version(engine, checkpoints)
    await engine.forget_previous()
    before = [rank.boot_id for rank in engine.backend.ranks()]
    await survives(engine, checkpoints, fault)
    after = [rank.boot_id for rank in engine.backend.ranks()]
    lost = int(fault[fault.index("@") + 1])
    # A split model is started anew as a whole; a replica that is lost leaves the other one's process as it is.
    assert after[lost] != before[lost]
    assert (after[1 - lost] == before[1 - lost]) == (layout == "replicas")


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_a_byte_that_changes_on_one_rank_is_found_there_and_repaired_on_both(
    engines: dict[str, Ranked], checkpoints: Checkpoints, layout: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine, name = engines[layout], "model.layers.1.mlp.up_proj.weight"  # the versions do not differ in it
    await old_version(engine, checkpoints)
    before = [rank.boot_id for rank in engine.backend.ranks()]
    repaired = engine.coordinator.state().repairs
    status = await engine.swap(checkpoints.v2, "1.1", fault=f"release@1:flip={name}#1")
    assert status.state is SwapState.SERVING, status.error
    while True:  # the audit that follows each swap finds it
        state = engine.coordinator.state()
        if state.repairs > repaired and state.repair is not None and state.repair.state is SwapState.SERVING:
            break
        await asyncio.sleep(0.05)
    assert state.repair.plan is not None
    assert state.repair.plan.changed_names == [name]
    assert f"the first is {name} on rank 1" in caplog.text
    await engine.assert_serves(checkpoints.v2, "1.1")
    assert [rank.boot_id for rank in engine.backend.ranks()] == before


def agreed(replies: Sequence[Reply], *, ranks: int = 2) -> Reply:
    """Return the first rank's reply; all must have done what was asked, and say the same."""
    assert [reply.rank for reply in replies] == list(range(ranks))
    assert [reply.error for reply in replies] == [None] * ranks
    assert len({reply.digest for reply in replies}) == 1
    return replies[0]


class Ranks(Engine):
    """The same steps, on more than one rank."""

    async def load(self, directory: Path) -> None:
        agreed(await self.backend.load(load_order(directory)))

    async def prepared(self, old: Path, new: Path, **options: bool) -> str:
        operation = self.operation()
        order = stage_order(old, new, operation_id=operation, groups=self.backend.layout().groups, **options)
        agreed(await self.backend.stage(order))
        agreed(await self.backend.prepare(operation))
        return operation

    async def commit(self, operation: str, policy: RequestPolicy = RequestPolicy.NONE_RUNNING) -> int:
        agreed(await self.backend.pause(operation, timeout=20))
        replies = await self.backend.commit(operation, policy)
        agreed(replies)
        agreed(await self.backend.verify(operation, strict=True))
        agreed(await self.backend.resume(operation))
        return sum(reply.requests for reply in replies)

    async def swap(
        self, old: Path, new: Path, *, policy: RequestPolicy = RequestPolicy.NONE_RUNNING, **options: bool
    ) -> int:
        operation = await self.prepared(old, new, **options)
        affected = await self.commit(operation, policy)
        agreed(await self.backend.release(operation, previous=False))
        return affected


@pytest.fixture
def split(engines: dict[str, Ranked]) -> Ranks:
    """The split model by its port alone; its coordinator is not asked any more after this."""
    return Ranks(engines["split"].backend)


async def test_after_a_swap_both_ranks_hold_and_compute_what_a_fresh_load_does(
    split: Ranks, checkpoints: Checkpoints
) -> None:
    await split.load(checkpoints.v2)
    fresh = await answer(split.backend, _LONG)
    await split.load(checkpoints.v1)
    old = await answer(split.backend, _LONG)
    assert max(old) < 132 <= min(fresh)
    # The same prompt is in the caches of both ranks under the old version: a stale page of either would show.
    assert await split.swap(checkpoints.v1, checkpoints.v2) == 0
    assert await answer(split.backend, _LONG) == fresh
    assert await split.holds(checkpoints.v2)
    assert {(rank.replica, rank.alive, rank.digest) for rank in split.backend.ranks()} == {
        (0, True, digest_of(checkpoints.v2))
    }
    memory = await split.backend.memory()
    whole = sum(Path(file).stat().st_size for file in checkpoints.v2.glob("*.safetensors"))
    assert memory.model_bytes < 1.2 * whole


async def test_many_stops_and_swaps_under_load_never_deadlock(split: Ranks, checkpoints: Checkpoints) -> None:
    """Two ranks are stopped before the same step, forty times, while requests come, run, end and are given up."""
    versions = [checkpoints.v1, checkpoints.v2]
    await split.load(versions[0])
    before = [rank.boot_id for rank in split.backend.ranks()]
    ending = asyncio.Event()
    made: list[list[Tokens]] = []

    async def ask(number: int) -> None:
        turn = 0
        while not ending.is_set():
            stream = split.backend.generate(prompt(f"{number} {turn}" * 9, tokens=3 + (7 * turn + number) % 20))
            turn += 1
            if turn % 5 == 0:
                await anext(stream)
                await stream.aclose()
            else:
                made.append(await collect(stream))

    clients = [asyncio.ensure_future(ask(number)) for number in range(4)]
    policies = [RequestPolicy.RECOMPUTE, RequestPolicy.ABORT, RequestPolicy.FREEZE]
    try:
        for number in range(20):
            old, new = versions[number % 2], versions[1 - number % 2]
            await split.swap(old, new, policy=policies[number % 3])
            # And a pause that changes nothing.
            agreed(await split.backend.pause(f"hold {number}", timeout=20))
            agreed(await split.backend.resume(f"hold {number}"))
    finally:
        ending.set()
        await asyncio.gather(*clients)
    assert len(made) > 20
    assert {items[-1].finish for items in made} <= {FinishReason.LENGTH, FinishReason.ABORT}
    for item in (item for items in made for item in items if item.tokens):
        assert (max(item.tokens) < 132) == (item.digest == digest_of(versions[0]))
    assert await split.holds(versions[0])
    assert [rank.boot_id for rank in split.backend.ranks()] == before


async def test_drawn_tokens_are_the_same_on_both_ranks(split: Ranks, checkpoints: Checkpoints) -> None:
    """Each rank draws for itself; had they drawn differently, the loops would have ended."""
    await split.load(checkpoints.v1)

    async def draw(**how: float) -> list[int]:
        return ids(await collect(split.backend.generate(prompt(_LONG, tokens=24, sampling=Sampling(**how)))))  # type: ignore[arg-type]

    first, second, unseeded = await asyncio.gather(
        draw(temperature=1.5, seed=5), draw(temperature=1.5, seed=5), draw(temperature=1.5)
    )
    assert first == second != unseeded
    assert await draw(temperature=1.5) != unseeded
