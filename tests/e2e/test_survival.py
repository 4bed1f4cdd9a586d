"""Whatever dies in the middle of a swap, the slot converges, and nothing but whole versions is ever served.

Clients keep asking all the while. Requests may break only where the process that answers them is killed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from demo.answers import mixed_by_text
from demo.load import Load
from modelswap_engine.checkpoint.manifest import MANIFEST_FILE, decode
from tests.support.cluster.provider import Cluster
from tests.support.models import LOWER, UPPER
from tests.support.operator_release import install_operator, kill_operator, operator_down
from tests.support.stack import Slot

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

_KILL_WORKER = """
import os, signal
me = os.getpid()
for name in os.listdir('/proc'):
    if name.isdigit() and int(name) != me:
        try: command = open(f'/proc/{name}/cmdline').read()
        except OSError: continue
        if 'embedded.worker' in command: os.kill(int(name), signal.SIGKILL); print('killed', name)
"""


@dataclass
class Versions:
    """Four versions in a ring: neighbours share no letter, and none is retained in memory when its turn comes again.

    So each test is one swap that has to read its tensors, from wherever the test before left the slot.
    """

    slot: Slot
    at: int = 0

    @property
    def model(self) -> str:
        return f"v{self.at % 4 + 1}"

    @property
    def label(self) -> str:
        return f"1.{self.at}"

    @property
    def digest(self) -> str:
        return decode((self.slot.models / self.model / MANIFEST_FILE).read_bytes()).digest

    async def apply_next(self, **spec: Any) -> int:
        """Apply the next version and return its generation."""
        self.at += 1
        return await asyncio.to_thread(self.slot.apply, self.label, self.model, **spec)


def letters_of(version: str) -> str:
    return UPPER if int(version.split(".")[1]) % 2 else LOWER


@pytest.fixture(scope="module")
def shared(slot: Slot) -> Versions:
    slot.wait_ready(slot.apply("1.0", "v1"))
    return Versions(slot)


@pytest.fixture
def versions(shared: Versions) -> Versions:
    """The slot with two pods, all on one version."""
    shared.slot.scale(2)
    shared.slot.wait_pods()
    shared.slot.wait_condition("Ready")
    return shared


async def in_the_middle(versions: Versions) -> tuple[int, str]:
    """Apply the next version and return its generation and the pod that is staging it right now."""
    generation = await versions.apply_next()
    name = await asyncio.to_thread(versions.slot.swapping_pod)
    return generation, name


async def converged(versions: Versions, generation: int) -> None:
    slot = versions.slot
    await asyncio.to_thread(slot.wait_ready, generation)
    await asyncio.to_thread(slot.wait_pods)
    for pod in slot.pods().values():
        assert (await asyncio.to_thread(slot.check, pod)).digest == versions.digest
    assignment = slot.assignment()
    assert assignment.stable is not None
    assert assignment.stable.digest == versions.digest


@asynccontextmanager
async def clients(versions: Versions, *, may_break: bool) -> AsyncIterator[None]:
    """Keep asking; at the end no answer was mixed, and none failed but on a process that was killed."""
    slot = versions.slot
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
        assert not answer.served or letters <= set(letters_of(answer.version)), answer


def seen_staged(slot: Slot, pods: int) -> list[str]:
    """Wait until the status says that so many pods have staged, and return the digests that are served then."""
    with slot.watch() as objects:
        for found in objects:
            status = found.get("status", {})
            if status.get("rollout", {}).get("stagedPods") == pods:
                return [version["digest"] for version in status["versions"]]
    raise AssertionError(f"never {pods} pods had staged")


async def test_all_pods_stage_before_the_first_one_changes(versions: Versions) -> None:
    before = versions.digest
    async with clients(versions, may_break=False):
        generation = await versions.apply_next()
        assert await asyncio.to_thread(seen_staged, versions.slot, 2) == [before]
        await converged(versions, generation)


async def test_worker_killed_in_the_middle_and_after(versions: Versions) -> None:
    slot = versions.slot
    async with clients(versions, may_break=True):
        generation, name = await in_the_middle(versions)
        assert "killed" in (await asyncio.to_thread(slot.exec_python, name, _KILL_WORKER)).stdout
        await converged(versions, generation)
        assert "killed" in (await asyncio.to_thread(slot.exec_python, name, _KILL_WORKER)).stdout
        await asyncio.to_thread(slot.wait_engine, name, versions.digest)


async def test_engine_container_killed_in_the_middle_and_after(versions: Versions) -> None:
    slot = versions.slot
    async with clients(versions, may_break=True):
        generation, name = await in_the_middle(versions)
        await asyncio.to_thread(slot.kill_container, name)
        await converged(versions, generation)
        restarts = slot.pods()[name].restarts
        await asyncio.to_thread(slot.kill_container, name)
        await asyncio.to_thread(slot.wait_restarted, name, restarts)
        await asyncio.to_thread(slot.wait_engine, name, versions.digest)


async def test_operator_killed_in_the_middle(versions: Versions, cluster: Cluster) -> None:
    async with clients(versions, may_break=False):
        generation, _ = await in_the_middle(versions)
        await asyncio.to_thread(kill_operator, cluster)
        await converged(versions, generation)


async def test_operator_upgraded_in_the_middle(versions: Versions, cluster: Cluster) -> None:
    slot = versions.slot
    canary = {"pods": 1, "soakSeconds": 20}  # longer than Helm takes to end the old operator
    async with clients(versions, may_break=False):
        generation = await versions.apply_next(rollout={"canary": canary})
        await asyncio.to_thread(slot.wait_field, "{.status.rollout.state}=Soaking")
        begun = max(slot.state(pod).epoch for pod in slot.pods().values())
        await asyncio.to_thread(install_operator, cluster)  # as each time, with other values than before
        await converged(versions, generation)
    assert max(slot.state(pod).epoch for pod in slot.pods().values()) > begun, "the old operator did all of it"


async def test_pod_deleted_in_the_middle(versions: Versions) -> None:
    async with clients(versions, may_break=False):
        generation, name = await in_the_middle(versions)
        await asyncio.to_thread(versions.slot.delete_pod, name)
        await converged(versions, generation)


async def test_scaled_up_in_the_middle(versions: Versions) -> None:
    async with clients(versions, may_break=False):
        generation, _ = await in_the_middle(versions)
        await asyncio.to_thread(versions.slot.scale, 3)
        await converged(versions, generation)
    assert len(versions.slot.pods()) == 3


async def test_evicted_and_scaled_down_in_the_middle_then_to_nothing_and_back(versions: Versions) -> None:
    slot = versions.slot
    await asyncio.to_thread(slot.scale, 3)
    await asyncio.to_thread(slot.wait_pods)
    async with clients(versions, may_break=False):
        generation, name = await in_the_middle(versions)
        await asyncio.to_thread(slot.evict_pod, name)
        await asyncio.to_thread(slot.scale, 2)
        await converged(versions, generation)
    await asyncio.to_thread(slot.scale, 0)
    await asyncio.to_thread(slot.wait_field, '{.status.conditions[?(@.type=="Ready")].reason}=ScaledToZero')
    await asyncio.to_thread(slot.scale, 2)
    await asyncio.to_thread(slot.wait_pods)
    for name in slot.pods():
        await asyncio.to_thread(slot.wait_engine, name, versions.digest)


async def test_new_pod_serves_the_assignment_with_the_operator_down(versions: Versions, cluster: Cluster) -> None:
    if versions.model == "v1":  # that is what the template names
        await converged(versions, await versions.apply_next())
    slot = versions.slot
    with operator_down(cluster):
        async with clients(versions, may_break=False):
            victim = next(iter(slot.pods()))
            await asyncio.to_thread(slot.delete_pod, victim)
            await asyncio.to_thread(slot.wait_pods)
            for name in slot.pods():
                await asyncio.to_thread(slot.wait_engine, name, versions.digest)
