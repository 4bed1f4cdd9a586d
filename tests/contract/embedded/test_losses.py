"""Workers that die, break in the middle of a step, or are left alone in a pause."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from msgspec.structs import replace

from modelswap_engine.backends.embedded.backend import EmbeddedBackend
from modelswap_engine.backends.embedded.settings import CommitMethod
from modelswap_engine.backends.port import FinishReason, Reply, RequestPolicy, Tokens
from modelswap_engine.protocol.errors import Cancelled, Internal, NotReady, SourceUnreadable, WorkerLost
from tests.contract.embedded.conftest import SETTINGS, Checkpoints, Engine
from tests.support.orders import accepted, answer, collect, digest_of, ids, prompt, refused, stage_order

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="session")]

# The points of one worker's life in the order in which the test below passes them.
_FAULTS = "midway:raise#1,verify:raise#2,commit:raise#3,stage:exit#4"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def faulty() -> AsyncIterator[Engine]:
    backend = EmbeddedBackend(SETTINGS, environ={**os.environ, "MODELSWAP_FAULT": _FAULTS})
    await backend.start()
    yield Engine(backend)
    await backend.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def hasty() -> AsyncIterator[Engine]:
    """Return an engine whose pauses last half a second, and that copies in place."""
    backend = EmbeddedBackend(replace(SETTINGS, pause_lease_seconds=0.5, commit_method=CommitMethod.COPY))
    await backend.start()
    yield Engine(backend)
    await backend.stop()


async def test_a_killed_worker_is_lost_and_a_load_brings_it_back(engine: Engine, checkpoints: Checkpoints) -> None:
    with engine.slowly():
        stream = engine.backend.generate(prompt("a long answer", tokens=900))
        first = await anext(stream)
        before = engine.backend.ranks()[0]
        os.kill(before.pid, signal.SIGKILL)
    last = (await collect(stream))[-1]
    assert last.finish is FinishReason.ERROR
    assert last.digest == first.digest
    assert "signal 9" in last.error
    (rank,) = engine.backend.ranks()
    assert not rank.alive
    assert rank.digest == ""
    with pytest.raises(WorkerLost):
        await engine.backend.memory()
    with pytest.raises(WorkerLost):
        await engine.backend.prepare("op")
    with pytest.raises(NotReady):
        engine.backend.generate(prompt("now"))
    await engine.load(checkpoints.v2)
    after = engine.backend.ranks()[0]
    assert after.alive
    assert after.boot_id != before.boot_id
    assert min(await answer(engine.backend, "again")) >= 132


async def test_broken_steps_are_undone(faulty: Engine, checkpoints: Checkpoints) -> None:
    backend, old, new = faulty.backend, checkpoints.v1, checkpoints.v2
    await faulty.load(old)
    before = await answer(backend, "before")
    for step in ("midway", "verify", "commit"):
        operation = await faulty.prepared(old, new)
        accepted(await backend.pause(operation, timeout=20))
        replies = await backend.commit(operation, RequestPolicy.NONE_RUNNING)
        if step == "verify":
            accepted(replies)
            # The first verification was the one after the first rollback.
            replies = await backend.verify(operation, strict=False)
        assert refused(replies) == "Internal"
        if step != "commit":
            assert refused(await backend.resume(operation)) == "Internal"
        accepted(await backend.rollback(operation))
        accepted(await backend.verify(operation, strict=True))
        accepted(await backend.resume(operation))
        accepted(await backend.release(operation, previous=False))
        assert await faulty.holds(old), step
        assert await answer(backend, "before") == before
    with pytest.raises(WorkerLost, match="exit code 86"):
        await backend.stage(stage_order(old, new, operation_id="last"))
    await faulty.load(new)
    assert await faulty.holds(new)


async def test_a_worker_dies_with_its_front(faulty: Engine) -> None:
    (worker,) = faulty.backend._replicas.groups[0].workers
    worker._writer.transport.abort()
    assert await asyncio.wait_for(worker._process.wait(), 20) in {0, -signal.SIGKILL}


async def committed_in_time(engine: Engine, operation: str) -> Reply:
    """Commit under a pause that soon ends by itself; on a busy machine that may be before the commit is there."""
    while True:
        accepted(await engine.backend.pause(operation, timeout=20))
        (reply,) = replies = await engine.backend.commit(operation, RequestPolicy.NONE_RUNNING)
        if reply.error is None or reply.error.code != "Cancelled":
            return accepted(replies)


async def test_an_abandoned_pause_ends_by_itself(hasty: Engine, checkpoints: Checkpoints) -> None:
    await hasty.load(checkpoints.v1)
    undisturbed = await answer(hasty.backend, "abandoned", tokens=200)
    stream = hasty.backend.generate(prompt("abandoned", tokens=200))
    items: list[Tokens] = [await anext(stream)]
    accepted(await hasty.backend.pause("gone", timeout=20))
    assert ids(items + await collect(stream)) == undisturbed
    assert await answer(hasty.backend, "after")  # not before the pause has ended
    assert refused(await hasty.backend.commit("gone", RequestPolicy.NONE_RUNNING)) == "Cancelled"


async def test_an_abandoned_commit_is_undone(hasty: Engine, checkpoints: Checkpoints) -> None:
    if hasty.backend.ranks()[0].digest != digest_of(checkpoints.v1):
        await hasty.load(checkpoints.v1)
    before = await answer(hasty.backend, "before")
    operation = await hasty.prepared(checkpoints.v1, checkpoints.v2)
    assert hasty.backend.capabilities().commit_method == "copy"
    assert (await committed_in_time(hasty, operation)).method == "copy"
    # Answered only when the pause has ended.
    assert await answer(hasty.backend, "before") == before
    assert await hasty.holds(checkpoints.v1)
    assert refused(await hasty.backend.rollback(operation)) == "Cancelled"
    assert accepted(await hasty.backend.verify(operation, strict=True)).digest == digest_of(checkpoints.v1)


async def test_what_hangs_beside_serving_is_called_off_and_the_worker_stays(checkpoints: Checkpoints) -> None:
    """A source that hangs, and a re-hash that takes too long: no answer is lost for either.

    The hung staging is given up when its time is over, and another one when somebody says so.
    """
    backend = EmbeddedBackend(
        replace(SETTINGS, stage_timeout=0.3, hash_timeout=0.3),
        environ={
            **os.environ,
            "MODELSWAP_FAULT": "stage:delay=600#1,stage:delay=600#2,hashes:delay=1.5#1,hashes:raise#2",
        },
    )
    await backend.start()
    engine = Engine(backend)
    try:
        await engine.load(checkpoints.v1)
        before = backend.ranks()[0].boot_id
        with pytest.raises(SourceUnreadable, match="staging took longer"):
            await backend.stage(stage_order(checkpoints.v1, checkpoints.v2, operation_id="hangs"))
        assert await answer(backend, "meanwhile")
        # The second one ends in the queue behind the first: had it begun, it would have met the fault of the third.
        slow, dropped = (asyncio.ensure_future(backend.hashes("*")) for _ in range(2))
        with pytest.raises(Cancelled, match="hashing took longer"):
            await slow
        with pytest.raises(Cancelled, match="hashing took longer"):
            await dropped
        backend._settings = SETTINGS
        with pytest.raises(Internal, match="fault injected at hashes"):
            await backend.hashes("*")
        staging = asyncio.ensure_future(
            backend.stage(stage_order(checkpoints.v1, checkpoints.v2, operation_id="called off"))
        )
        assert await answer(backend, "meanwhile")
        assert not staging.done()
        accepted(await backend.release("called off", previous=False))
        assert refused(await staging) == "Cancelled"
        assert refused(await backend.prepare("called off")) == "NotFound"
        assert (await backend.memory()).staged_bytes == 0
        assert await engine.holds(checkpoints.v1)
        await engine.swap(checkpoints.v1, checkpoints.v2)
        assert await engine.holds(checkpoints.v2)
        assert backend.ranks()[0].boot_id == before
    finally:
        await backend.stop()


async def test_an_abandoned_commit_that_cannot_be_undone_ends_the_worker(checkpoints: Checkpoints) -> None:
    backend = EmbeddedBackend(
        replace(SETTINGS, pause_lease_seconds=0.3), environ={**os.environ, "MODELSWAP_FAULT": "rollback:raise"}
    )
    await backend.start()
    engine = Engine(backend)
    try:
        await engine.load(checkpoints.v1)
        operation = await engine.prepared(checkpoints.v1, checkpoints.v2)
        await committed_in_time(engine, operation)
        # It waits in the pause, and must not be computed on weights that nobody proved.
        (last,) = await collect(backend.generate(prompt("never")))
        assert last.finish is FinishReason.ERROR
        assert "could not be undone" in last.error
        assert not backend.ranks()[0].alive
    finally:
        await backend.stop()


async def test_a_staged_swap_is_undone_by_nothing_after_an_earlier_swap(
    engine: Engine, checkpoints: Checkpoints
) -> None:
    operation = await engine.prepared(checkpoints.v1, checkpoints.v2)
    await engine.commit(operation)
    # Nobody released it. The next swap is refused at its commit, because a request runs.
    second = await engine.prepared(checkpoints.v2, checkpoints.v1)
    with engine.slowly():
        stream = engine.backend.generate(prompt("a long answer", tokens=300))
        first = await anext(stream)
        accepted(await engine.backend.pause(second, timeout=20))
    assert refused(await engine.backend.commit(second, RequestPolicy.NONE_RUNNING)) == "Busy"
    accepted(await engine.backend.rollback(second))
    accepted(await engine.backend.verify(second, strict=True))
    accepted(await engine.backend.resume(second))
    assert (await collect(stream))[-1].digest == first.digest == digest_of(checkpoints.v2)
    accepted(await engine.backend.release(second, previous=False))
    assert await engine.holds(checkpoints.v2)


async def test_a_worker_that_hangs_is_lost(hasty: Engine) -> None:
    """The last one here: it costs the worker."""
    os.kill(hasty.backend.ranks()[0].pid, signal.SIGSTOP)
    hasty.backend._settings = replace(SETTINGS, call_timeout=0.3)
    with pytest.raises(WorkerLost, match="did not answer within"):
        await hasty.backend.memory()
    assert not hasty.backend.ranks()[0].alive
