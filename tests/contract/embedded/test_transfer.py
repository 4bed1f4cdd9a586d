"""Weights that a real worker receives: kept beside what is live, staged in whole groups, proved like any version."""

from collections.abc import Iterable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from modelswap_engine.backends.port import Stage, TensorRange
from modelswap_engine.backends.transfer import ReceivedTensor, ReceiveFiles, TransferReply
from tests.contract.embedded.conftest import Checkpoints, Engine
from tests.support import models
from tests.support.custom_loaders import BROKEN, MISSING, RENAMED
from tests.support.orders import accepted, answer, digest_of, hashes_of, ranges, refused

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="session")]


async def receive(engine: Engine, operation: str, tensors: Iterable[TensorRange], *, loader: str = "") -> TransferReply:
    order = ReceiveFiles(operation_id=operation, tensors=tuple(tensors), loader=loader)
    (reply,) = await engine.backend.transfer(order, timeout=60)
    return reply


def hashless(item: TensorRange) -> TensorRange:
    return TensorRange(
        name=item.name, dtype=item.dtype, shape=item.shape, path=item.path, offset=item.offset, nbytes=item.nbytes,
        sha256="",
    )  # fmt: skip


def held(item: TensorRange) -> TensorRange:
    return TensorRange(
        name=item.name, dtype=item.dtype, shape=item.shape, path="", offset=0, nbytes=item.nbytes, sha256=item.sha256
    )


def wanted(directory: Path, names: Iterable[str]) -> list[TensorRange]:
    chosen = set(names)
    return [item for item in ranges(directory) if item.name in chosen]


async def stage(engine: Engine, operation: str, target: Path, tensors: Iterable[TensorRange]) -> None:
    order = Stage(
        operation_id=operation, digest=digest_of(target), directory=str(target), tensors=tuple(map(held, tensors))
    )
    accepted(await engine.backend.stage(order))
    accepted(await engine.backend.prepare(operation))


async def test_received_tensors_become_live_only_with_the_commit(engine: Engine, checkpoints: Checkpoints) -> None:
    operation = engine.operation()
    before = await answer(engine.backend, "hello")
    changed = wanted(checkpoints.v2, checkpoints.changed)
    for item in changed:  # one part each
        reply = await receive(engine, operation, [hashless(item)])
        assert reply.error is None
        assert reply.received == (
            ReceivedTensor(name=item.name, dtype=item.dtype, shape=item.shape, nbytes=item.nbytes, sha256=item.sha256),
        )
    assert await answer(engine.backend, "hello") == before
    assert (await engine.backend.memory()).staged_bytes == sum(item.nbytes for item in changed)
    await stage(engine, operation, checkpoints.v2, changed)
    assert (await engine.backend.memory()).staged_bytes == sum(item.nbytes for item in changed)  # held once
    await engine.commit(operation)
    assert await engine.holds(checkpoints.v2)
    assert (await answer(engine.backend, "hello")) != before


async def test_what_was_not_committed_is_gone_after_release(engine: Engine, checkpoints: Checkpoints) -> None:
    operation = engine.operation()
    changed = wanted(checkpoints.v2, checkpoints.changed)
    await receive(engine, operation, changed)
    accepted(await engine.backend.release(operation, previous=False))
    assert (await engine.backend.memory()).staged_bytes == 0
    order = Stage(operation_id=operation, digest="d", directory="", tensors=tuple(map(held, changed)))
    # Without the received bytes a range without a path means the live ones, and those are others.
    assert refused(await engine.backend.stage(order)) == "ManifestMismatch"
    assert await engine.holds(checkpoints.v1)


async def test_bytes_that_are_not_the_promised_ones(engine: Engine, checkpoints: Checkpoints) -> None:
    right, wrong = wanted(checkpoints.v2, ["lm_head.weight"])[0], wanted(checkpoints.v1, ["lm_head.weight"])[0]
    mixed = TensorRange(
        name=right.name, dtype=right.dtype, shape=right.shape, path=wrong.path, offset=wrong.offset,
        nbytes=right.nbytes, sha256=right.sha256,
    )  # fmt: skip
    reply = await receive(engine, engine.operation(), [mixed])
    assert reply.error is not None
    assert reply.error.code == "ManifestMismatch"
    assert (await engine.backend.memory()).staged_bytes == 0


async def test_the_rest_of_a_fused_parameter_comes_from_live_memory(
    engine: Engine, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    old = models.tiny_mixtral(tmp_path / "old", layers=1, experts=2)
    sent = next(name for name in models.tensor_names(old) if ".experts.1.w1" in name or "experts.1.gate_proj" in name)
    new = models.write_variant(old, tmp_path / "new", [sent], seed=5)
    await engine.load(old)
    group = next(group for group in engine.backend.layout().groups if sent in group)
    assert len(group) > 1
    operation = engine.operation()
    await receive(engine, operation, [hashless(item) for item in wanted(new, [sent])])
    for item in ranges(old):
        Path(item.path).write_bytes(b"")  # no file is read any more
        break
    await stage(engine, operation, new, wanted(new, group))
    await engine.commit(operation)
    assert (await engine.backend.hashes("*")).tensors == hashes_of(new)


async def test_a_custom_loader_converts_before_anything_is_checked(
    engine: Engine, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    tensors = load_file(checkpoints.v2 / models.WEIGHTS)
    save_file({f"trainer.{name}": tensors[name].double() for name in checkpoints.changed}, tmp_path / models.WEIGHTS)
    operation = engine.operation()
    reply = await receive(engine, operation, map(hashless, ranges(tmp_path)), loader=RENAMED)
    assert reply.error is None
    truth = hashes_of(checkpoints.v2)
    assert {item.name: item.sha256 for item in reply.received} == {name: truth[name] for name in checkpoints.changed}
    await stage(engine, operation, checkpoints.v2, wanted(checkpoints.v2, checkpoints.changed))
    await engine.commit(operation)
    assert await engine.holds(checkpoints.v2)


async def test_a_loader_that_is_absent_or_broken(engine: Engine, checkpoints: Checkpoints) -> None:
    head = wanted(checkpoints.v2, ["lm_head.weight"])
    for loader, code in (
        ("os:system", "UnknownLoader"),
        ("x", "UnknownLoader"),
        (MISSING, "BadRequest"),
        (BROKEN, "ChecksFailed"),
    ):
        reply = await receive(engine, engine.operation(), head, loader=loader)
        assert reply.error is not None
        assert reply.error.code == code
    assert await engine.holds(checkpoints.v1)
