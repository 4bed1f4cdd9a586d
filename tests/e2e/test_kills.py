"""Whatever dies in the middle of a swap, the slot converges, and nothing but whole versions is ever served.

Clients keep asking all the while. Requests may break only where the process that answers them is killed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from demo.answers import mixed_by_text
from demo.load import Load
from modelswap_engine.checkpoint.manifest import MANIFEST_FILE, decode
from tests.support.cluster.provider import DATA_NODE_PORT, Cluster
from tests.support.models import LOWER, UPPER
from tests.support.stack import Slot, kill_operator, operator_down

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

# Staging takes this long in these pods, so that there is a middle of a swap to kill something in.
STAGE_SECONDS = 3
_KILL_WORKER = """
import os, signal
me = os.getpid()
for name in os.listdir('/proc'):
    if name.isdigit() and int(name) != me:
        try: command = open(f'/proc/{name}/cmdline').read()
        except OSError: continue
        if 'embedded.worker' in command: os.kill(int(name), signal.SIGKILL); print('killed', name)
"""


@pytest.fixture(scope="module")
def shared_slot(cluster: Cluster, models: Path) -> Iterator[Slot]:
    slot = Slot(cluster, name="kills", models=models)
    slot.install(
        replicas=2,
        model="v1",
        version="1.0",
        node_port=DATA_NODE_PORT,
        env={"MODELSWAP_FAULT": f"stage:delay={STAGE_SECONDS}"},
    )
    yield slot
    slot.uninstall()


@pytest.fixture
async def slot(shared_slot: Slot) -> Slot:
    """The slot with two pods, all on 1.0."""
    shared_slot.scale(2)
    shared_slot.wait_pods()
    await decided(shared_slot, "1.0", "v1")
    return shared_slot


async def decided(slot: Slot, version: str, model: str) -> None:
    generation = await asyncio.to_thread(slot.apply, version, model)
    await asyncio.to_thread(slot.wait_ready, generation)


def digest_of(slot: Slot, model: str) -> str:
    return decode((slot.models / model / MANIFEST_FILE).read_bytes()).digest


async def in_the_middle(slot: Slot) -> tuple[int, str]:
    """Apply 1.1 and return its generation and the pod that is staging it right now."""
    generation = await asyncio.to_thread(slot.apply, "1.1", "v2")
    name = await asyncio.to_thread(slot.swapping_pod)
    return generation, name


async def converged(slot: Slot, generation: int) -> None:
    await asyncio.to_thread(slot.wait_ready, generation)
    await asyncio.to_thread(slot.wait_pods)
    wanted = digest_of(slot, "v2")
    for pod in slot.pods().values():
        assert (await asyncio.to_thread(slot.check, pod)).digest == wanted
    assignment = slot.assignment()
    assert assignment.stable is not None
    assert assignment.stable.digest == wanted


@asynccontextmanager
async def clients(slot: Slot, *, may_break: bool) -> AsyncIterator[None]:
    """Keep asking; at the end no answer was mixed, and none failed but on a process that was killed."""
    load = Load(slot.cluster.data_url, model=slot.name, streams=3, max_tokens=24, mixed=mixed_by_text(LOWER, UPPER))
    async with load:
        await load.served_more(3)
        yield
        await load.served_more(3)
    summary = load.summary()
    assert summary.mixed == 0, summary.lines()
    assert may_break or summary.failed == 0, summary.lines()
    for answer in load.answers:
        letters = set(answer.text) & set(LOWER + UPPER)
        assert not answer.served or letters <= set(LOWER if answer.version == "1.0" else UPPER), answer


async def test_worker_killed_in_the_middle_and_after(slot: Slot) -> None:
    async with clients(slot, may_break=True):
        generation, name = await in_the_middle(slot)
        assert "killed" in (await asyncio.to_thread(slot.exec_python, name, _KILL_WORKER)).stdout
        await converged(slot, generation)
        assert "killed" in (await asyncio.to_thread(slot.exec_python, name, _KILL_WORKER)).stdout
        await asyncio.to_thread(slot.wait_engine, name, digest_of(slot, "v2"))


async def test_engine_container_killed_in_the_middle_and_after(slot: Slot) -> None:
    async with clients(slot, may_break=True):
        generation, name = await in_the_middle(slot)
        await asyncio.to_thread(slot.kill_container, name)
        await converged(slot, generation)
        restarts = slot.pods()[name].restarts
        await asyncio.to_thread(slot.kill_container, name)
        await asyncio.to_thread(slot.wait_restarted, name, restarts)
        await asyncio.to_thread(slot.wait_engine, name, digest_of(slot, "v2"))


async def test_operator_killed_in_the_middle(slot: Slot, cluster: Cluster) -> None:
    async with clients(slot, may_break=False):
        generation, _ = await in_the_middle(slot)
        await asyncio.to_thread(kill_operator, cluster)
        await converged(slot, generation)


async def test_pod_deleted_in_the_middle(slot: Slot) -> None:
    async with clients(slot, may_break=False):
        generation, name = await in_the_middle(slot)
        await asyncio.to_thread(slot.delete_pod, name)
        await converged(slot, generation)


async def test_scaled_up_in_the_middle(slot: Slot) -> None:
    async with clients(slot, may_break=False):
        generation, _ = await in_the_middle(slot)
        await asyncio.to_thread(slot.scale, 3)
        await converged(slot, generation)
    assert len(slot.pods()) == 3


async def test_new_pod_serves_the_assignment_with_the_operator_down(slot: Slot, cluster: Cluster) -> None:
    generation = await asyncio.to_thread(slot.apply, "1.1", "v2")
    await converged(slot, generation)
    with operator_down(cluster):
        async with clients(slot, may_break=False):
            victim = next(iter(slot.pods()))
            await asyncio.to_thread(slot.delete_pod, victim)
            await asyncio.to_thread(slot.wait_pods)
            for name in slot.pods():
                await asyncio.to_thread(slot.wait_engine, name, digest_of(slot, "v2"))
