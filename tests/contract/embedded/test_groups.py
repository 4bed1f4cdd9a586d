"""Process groups with a real other process over gloo on loopback: a trainer with torch's own tools, another engine."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from modelswap_engine.backends.embedded.backend import EmbeddedBackend
from modelswap_engine.backends.port import Stage
from modelswap_engine.backends.transfer import (
    JoinGroup,
    LeaveGroup,
    ReceiveBroadcast,
    SendBroadcast,
    TensorSpec,
    TransferOrder,
    TransferReply,
)
from tests.contract.embedded.conftest import SETTINGS, Checkpoints, Engine
from tests.contract.embedded.test_transfer import held, wanted
from tests.support.free_ports import free_port
from tests.support.orders import accepted, answer, digest_of, hashes_of, ranges
from tests.support.trainer import trainer

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="session")]

SECONDS = 60.0


def join(port: int, rank: int, name: str = "weights", seconds: float = SECONDS) -> JoinGroup:
    return JoinGroup(group=name, address="127.0.0.1", port=port, rank=rank, size=2, seconds=seconds)


async def carry_out(backend: EmbeddedBackend, order: TransferOrder) -> TransferReply:
    (reply,) = await backend.transfer(order, timeout=SECONDS + 10)
    return reply


async def done(backend: EmbeddedBackend, order: TransferOrder) -> TransferReply:
    reply = await carry_out(backend, order)
    assert reply.error is None, reply.error
    return reply


async def failed(backend: EmbeddedBackend, order: TransferOrder) -> str:
    reply = await carry_out(backend, order)
    assert reply.error is not None
    return reply.error.code


def specs(directory: Path, names: list[str]) -> tuple[TensorSpec, ...]:
    chosen = {item.name: item for item in ranges(directory)}
    return tuple(TensorSpec(name=n, dtype=chosen[n].dtype, shape=chosen[n].shape) for n in names)


async def commit_received(engine: Engine, operation: str, target: Path, names: list[str]) -> None:
    order = Stage(
        operation_id=operation,
        digest=digest_of(target),
        directory=str(target),
        tensors=tuple(map(held, wanted(target, names))),
    )
    accepted(await engine.backend.stage(order))
    accepted(await engine.backend.prepare(operation))
    await engine.commit(operation)


@pytest.mark.parametrize("how", ["single", "flattened"])
async def test_a_trainer_broadcasts_with_its_own_tools(engine: Engine, checkpoints: Checkpoints, how: str) -> None:
    names, port, operation = list(checkpoints.changed), free_port(), engine.operation()
    with trainer(port, checkpoints.v2, names, how):
        await done(engine.backend, join(port, 1))
        order = ReceiveBroadcast(
            operation_id=operation, group="weights", tensors=specs(checkpoints.v2, names),
            flattened=how == "flattened", seconds=SECONDS,
        )  # fmt: skip
        reply = await done(engine.backend, order)
        truth = hashes_of(checkpoints.v2)
        assert {item.name: item.sha256 for item in reply.received} == {name: truth[name] for name in names}
        await done(engine.backend, LeaveGroup(group="weights"))
    await commit_received(engine, operation, checkpoints.v2, names)
    assert await engine.holds(checkpoints.v2)


async def test_a_sender_that_goes_away(engine: Engine, checkpoints: Checkpoints) -> None:
    names, port, operation = list(checkpoints.changed), free_port(), engine.operation()
    order = ReceiveBroadcast(operation_id=operation, group="weights", tensors=specs(checkpoints.v2, names), seconds=2)
    assert await failed(engine.backend, order) == "UnknownGroup"
    with trainer(port, checkpoints.v2, names, "leave"):
        await done(engine.backend, join(port, 1))
        assert await failed(engine.backend, join(port, 1)) == "Busy"
        assert await failed(engine.backend, order) == "GroupFailed"
    # The broken group is left, and nothing of half a part is kept.
    assert await failed(engine.backend, LeaveGroup(group="weights")) == "UnknownGroup"
    assert (await engine.backend.memory()).staged_bytes == 0
    assert await engine.holds(checkpoints.v1)
    assert len(await answer(engine.backend, "still here")) == 16


async def test_nobody_comes_to_the_meeting(engine: Engine) -> None:
    assert await failed(engine.backend, join(free_port(), 1, seconds=1)) == "GroupFailed"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def second(checkpoints: Checkpoints) -> AsyncIterator[Engine]:
    backend = EmbeddedBackend(SETTINGS)
    await backend.start()
    yield Engine(backend)
    await backend.stop()


@pytest.mark.full  # two whole engines do it in tests/e2e_local
async def test_a_new_engine_gets_its_weights_from_a_running_one(
    engine: Engine, second: Engine, checkpoints: Checkpoints
) -> None:
    await second.load(checkpoints.v2)
    port, operation = free_port(), engine.operation()
    await asyncio.gather(done(second.backend, join(port, 0)), done(engine.backend, join(port, 1)))
    names = sorted(name for group in engine.backend.layout().groups for name in group)
    send = SendBroadcast(group="weights", names=tuple(names), seconds=SECONDS)
    receive = ReceiveBroadcast(
        operation_id=operation, group="weights", tensors=specs(checkpoints.v1, names), seconds=SECONDS
    )
    await asyncio.gather(done(second.backend, send), done(engine.backend, receive))
    await commit_received(engine, operation, checkpoints.v2, names)
    assert await engine.holds(checkpoints.v2)
    assert await answer(engine.backend, "the same") == await answer(second.backend, "the same")
    for one in (engine, second):
        await done(one.backend, LeaveGroup(group="weights"))
