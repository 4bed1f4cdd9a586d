"""Weights that come to and leave engines of two real ranks: a split model and two replicas, by their own coordinators.

The model has fused experts, so that every update of one of them needs what the others are; that lies in no file.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from modelswap_engine.backends.embedded.settings import EmbeddedSettings
from modelswap_engine.checkpoint.build import build_manifest
from modelswap_engine.protocol.errors import Busy
from modelswap_engine.protocol.messages import SwapStatus
from modelswap_engine.protocol.states import SwapState
from modelswap_engine.protocol.transfers import JoinGroupRequest, ReadRequest, SaveRequest, SendRequest
from modelswap_engine.protocol.updates import Announced, BeginUpdate, BroadcastPart, CommitUpdate
from tests.support import models
from tests.support.free_ports import free_port
from tests.support.orders import answer, hashes_of, ranges
from tests.support.ranked import Ranked, until_gone
from tests.support.trainer import trainer

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="session")]

BASE = EmbeddedSettings(page_size=16, num_blocks=64, max_batch_tokens=128, torch_threads=1)
LAYOUTS = {"split": replace(BASE, tensor_parallel=2), "replicas": replace(BASE, data_parallel=2)}
GROUP = "weights"


class Steps:
    """A model, and what two steps of a trainer make of it: each changes one expert."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.old = models.tiny_mixtral(root / "old", layers=1, experts=2)
        self.sent = models.expert_gates(self.old)
        self.first = models.write_variant(self.old, root / "first", self.sent[:1], seed=5)
        self.second = models.write_variant(self.first, root / "second", self.sent[1:], seed=6)


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Steps:
    return Steps(tmp_path_factory.mktemp("steps"))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def engines(steps: Steps, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[dict[str, Ranked]]:
    """Both layouts; each test goes on where the one before ended."""
    made = {
        layout: Ranked(tmp_path_factory.mktemp(layout), settings, steps.root) for layout, settings in LAYOUTS.items()
    }
    await asyncio.gather(*(engine.start(steps.old, "1.0") for engine in made.values()))
    yield made
    await asyncio.gather(*(engine.coordinator.stop() for engine in made.values()))


def joining(port: int, rank: int, size: int, *, sends: bool = False) -> JoinGroupRequest:
    return JoinGroupRequest(group=GROUP, address="127.0.0.1", port=port, rank=rank, size=size, sends=sends, seconds=60)


async def committed(engine: Ranked, update: str, directory: Path) -> SwapStatus:
    digest = (await asyncio.to_thread(build_manifest, directory)).digest
    status = await engine.coordinator.updates.commit(update, CommitUpdate(version=update, digest=digest))
    assert status.state is SwapState.SERVING, status.error
    return status


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_a_trainer_changes_one_expert_after_another(
    engines: dict[str, Ranked], steps: Steps, layout: str, tmp_path: Path
) -> None:
    """The first is broadcast to a group of the trainer and all ranks, the second sent as a body."""
    engine = engines[layout]
    coordinator, port, name = engine.coordinator, free_port(), steps.sent[0]
    await coordinator.updates.begin(BeginUpdate(update_id="one"))
    with trainer(port, steps.first, [name], "single", size=3):
        await coordinator.export.join(joining(port, 1, 3))
        shape = next(list(item.shape) for item in ranges(steps.first) if item.name == name)
        announced = [Announced(name=name, dtype="F32", shape=shape)]
        await coordinator.parts.broadcast("one", BroadcastPart(group=GROUP, tensors=announced, seconds=60))
        await coordinator.export.leave(GROUP)
    await committed(engine, "one", steps.first)
    await engine.assert_holds(steps.first)
    await coordinator.updates.begin(BeginUpdate(update_id="two"))
    file = tmp_path / "part.safetensors"
    save_file({steps.sent[1]: load_file(steps.second / models.WEIGHTS)[steps.sent[1]]}, file)
    await coordinator.parts.tensors("two", file, owner="")
    await committed(engine, "two", steps.second)
    await engine.assert_holds(steps.second)


async def test_a_replica_that_is_killed_gets_what_was_sent_from_the_other(
    engines: dict[str, Ranked], steps: Steps
) -> None:
    """No file has it: the version is in the memory of the replica that lives, and there alone."""
    engine = engines["replicas"]
    live, before = engine.coordinator.state().live, engine.backend.ranks()
    assert live is not None
    assert live.version == "two"
    os.kill(before[1].pid, signal.SIGKILL)
    await until_gone(before[1], engine.backend.ranks)
    assert len(await answer(engine.backend, "meanwhile")) == 16
    await engine.assert_holds(steps.second)
    after = engine.backend.ranks()
    assert engine.coordinator.state().live == live
    assert (after[0].boot_id, after[0].digest) == (before[0].boot_id, live.digest)
    assert (after[1].boot_id != before[1].boot_id, after[1].digest) == (True, live.digest)
    texts = await asyncio.gather(*(answer(engine.backend, "the same") for _ in after))
    assert texts[0] == texts[1]


async def test_a_split_model_is_saved_and_read_whole(engines: dict[str, Ranked], steps: Steps) -> None:
    engine = engines["split"]
    export, target = engine.coordinator.export, engine.out / "saved"
    found = await export.save(SaveRequest(uri=target.as_uri(), shard_bytes=60_000))
    assert len(found.files) > 2
    assert hashes_of(target) == hashes_of(steps.second)
    name = "model.layers.0.self_attn.o_proj.weight"  # cut along its columns: a row is on both ranks
    read = await export.read(ReadRequest(name=name, rows=2))
    assert read.numbers == load_file(steps.second / models.WEIGHTS)[name][:2].flatten().tolist()


async def test_a_split_model_gives_its_weights_to_replicas(engines: dict[str, Ranked], steps: Steps) -> None:
    """One rank of the sender and both of the taker are in the group."""
    giver, taker = engines["split"].coordinator, engines["replicas"].coordinator
    status = await engines["replicas"].swap(steps.old, "1.0")
    assert status.state is SwapState.SERVING, status.error
    port = free_port()
    await asyncio.gather(giver.export.join(joining(port, 0, 3, sends=True)), taker.export.join(joining(port, 1, 3)))
    await taker.updates.begin(BeginUpdate(update_id="taken"))
    sending = giver.export.send(GROUP, SendRequest(seconds=60))
    taking = taker.parts.broadcast("taken", BroadcastPart(group=GROUP, seconds=60))
    sent, _ = await asyncio.gather(sending, taking)
    await taker.updates.commit("taken", CommitUpdate(digest=sent.digest))
    await engines["replicas"].assert_holds(steps.second)
    await asyncio.gather(giver.export.leave(GROUP), taker.export.leave(GROUP))


async def test_a_swap_ends_an_export_and_the_next_one_works(engines: dict[str, Ranked], steps: Steps) -> None:
    """Whichever rank hears of it first, none waits for the other."""
    engine = engines["split"]
    export = engine.coordinator.export
    for number in range(3):
        saving = asyncio.ensure_future(export.save(SaveRequest(uri=(engine.out / f"cut {number}").as_uri())))
        await asyncio.sleep(0.01 * number)
        target = (steps.old, steps.first)[number % 2]
        status = await engine.swap(target, f"2.{number}")
        assert status.state is SwapState.SERVING, status.error
        (outcome,) = await asyncio.gather(saving, return_exceptions=True)
        assert isinstance(outcome, Busy) or not isinstance(outcome, BaseException), outcome
    await export.save(SaveRequest(uri=(engine.out / "last").as_uri()))
    assert hashes_of(engine.out / "last") == hashes_of(steps.old)
