"""Pods of the real engines on a real cluster: the operator changes their weights under load, and nothing is restarted.

Then the engine of one dies, and the kubelet starts it on the assigned version; and one pod is deleted while it answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from demo.answers import mixed_by_text
from demo.load import Load
from modelswap_engine.checkpoint.manifest import MANIFEST_FILE, decode
from tests.support import engine_values
from tests.support.adapters import LINEAR
from tests.support.cluster.provider import DATA_NODE_PORT, Cluster
from tests.support.models import DIGITS, LOWER, UPPER
from tests.support.pod import Pod
from tests.support.stack import Slot, build_images

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

OLD, NEW, TUNED = "wide/v1", "wide/v2", "wide/v5"
ADAPTERS = {OLD: "k", NEW: "K", TUNED: "7"}
LORA = {
    "vllm": ("--enable-lora", "--max-lora-rank=8", "--max-loras=2", "--max-cpu-loras=4"),
    "sglang": (
        "--enable-lora", "--max-lora-rank=8", "--max-loras-per-batch=2", "--max-loaded-loras=4",
        "--lora-backend=torch_native", "--lora-target-modules", *LINEAR,
    ),
}  # fmt: skip
SIDECAR_BYTES = 150_000_000

# The launcher is process 1 of the container; its child is the engine.
_KILL_ENGINE = """
import os, signal
for name in filter(str.isdigit, os.listdir('/proc')):
    with open(f'/proc/{name}/stat') as file: parent = file.read().rpartition(')')[2].split()[1]
    if parent == '1': os.kill(int(name), signal.SIGKILL); print('killed', name)
"""
_STARTED_ON = "import json; print(json.load(open('/run/modelswap/engine.json'))['digest'])"


either = pytest.mark.parametrize("pods", ["vllm", "sglang"], indirect=True)
# What is the launcher's and the sidecar's is the same for both; a start of an engine takes half a minute.
first_of_all = pytest.mark.parametrize("pods", ["vllm", pytest.param("sglang", marks=pytest.mark.full)], indirect=True)


@pytest.fixture(scope="module")
def pods(request: pytest.FixtureRequest, cluster: Cluster, models: Path) -> Iterator[Slot]:
    """Two pods of a real engine, serving 1.0 of an object that says so."""
    build_images(cluster, *engine_values.IMAGES)
    slot = Slot(cluster, name=request.param, models=models)
    options = ("--dtype=float32", *LORA[request.param])
    slot.install(
        replicas=2,
        model=OLD,
        version="1.0",
        node_port=DATA_NODE_PORT,
        engine=engine_values.values_of(request.param, served=slot.name, options=options),
    )
    yield slot
    slot.cluster.kubectl("-n", slot.namespace, "delete", "services", "--all")  # the node port is needed again
    slot.uninstall(wait=False)


def digest_of(slot: Slot, model: str) -> str:
    return decode((slot.models / model / MANIFEST_FILE).read_bytes()).digest


def load_on(slot: Slot) -> Load:
    mixed = mixed_by_text(LOWER, UPPER, DIGITS)
    return Load(slot.cluster.data_url, model=slot.name, streams=3, max_tokens=32, mixed=mixed)


async def decided(slot: Slot, version: str, model: str, **spec: Any) -> None:
    generation = await asyncio.to_thread(slot.apply, version, model, digest=digest_of(slot, model), **spec)
    await asyncio.to_thread(slot.wait_ready, generation)


def prompt(allowed: str) -> dict[str, Any]:
    """Return checks with a prompt; versions of different letters differ by more than 1 and less than 1000."""
    return {"prompts": [{"prompt": "abc", "maxLogprobDelta": allowed}]}


@either
async def test_versions_change_under_load(pods: Slot) -> None:
    before = pods.pods()
    async with load_on(pods) as load:
        await load.served_more(4)
        await decided(pods, "1.0", OLD)
        refused = await asyncio.to_thread(pods.apply, "1.1", NEW, digest=digest_of(pods, NEW), checks=prompt("1"))
        await asyncio.to_thread(pods.wait_stalled, refused)
        assert "checks.prompts, number 1" in pods.condition("Stalled")["message"]
        for pod in pods.pods().values():
            await asyncio.to_thread(serves, pods, pod, OLD)
        await load.served_more(4)
        assert {answer.version for answer in load.answers} == {"1.0"}, "it was live while nobody was let in"
        await decided(pods, "1.1", NEW, checks=prompt("1000"))
        await load.served_more(4)
        for pod in pods.pods().values():
            await asyncio.to_thread(serves, pods, pod, NEW)
            assert await asyncio.to_thread(resident_bytes, pods, pod) < SIDECAR_BYTES
    summary = load.summary()
    assert (summary.failed, summary.mixed) == (0, 0), summary.lines()
    assert set(summary.by_version) == {"1.0", "1.1"}
    for answer in load.answers:
        assert set(answer.text) & set(LOWER + UPPER) <= set(LOWER if answer.version == "1.0" else UPPER), answer
    assert [(p.uid, p.restarts) for p in pods.pods().values()] == [(p.uid, p.restarts) for p in before.values()]


@pytest.mark.full
@either
async def test_to_another_fine_tune_and_back_with_an_adapter_on_each(pods: Slot) -> None:
    await decided(pods, "1.0", OLD)
    before = pods.pods()
    sources = [
        {"uri": f"file://{pods.inside('wide/adapters/' + letter)}", "baseDigest": digest_of(pods, base)}
        for base, letter in ADAPTERS.items()
    ]
    await asyncio.to_thread(pods.apply_adapter, "letters", *sources)
    by_adapter = mixed_by_text(*ADAPTERS.values())
    async with (
        load_on(pods) as load,
        Load(pods.cluster.data_url, model="letters", streams=1, max_tokens=32, mixed=by_adapter) as adapted,
    ):
        await adapted.served_more(4)
        for version, model in (("1.1", NEW), ("2.0", TUNED), ("1.0", OLD)):
            await decided(pods, version, model)
            for pod in pods.pods().values():
                await asyncio.to_thread(serves, pods, pod, model)
            await load.served_more(4)
            await adapted.served_more(4)
    for summary in (load.summary(), adapted.summary()):
        assert (summary.failed, summary.mixed) == (0, 0), summary.lines()
    says_only(load, {"1.0": LOWER, "1.1": UPPER, "2.0": DIGITS})
    says_only(adapted, {"1.0": "k", "1.1": "K", "2.0": "7"})
    assert [(p.uid, p.restarts) for p in pods.pods().values()] == [(p.uid, p.restarts) for p in before.values()]
    await asyncio.to_thread(pods.delete_adapter, "letters")


def says_only(load: Load, letters: Mapping[str, str]) -> None:
    """See that all these versions answered, each with its own letters."""
    assert {answer.version for answer in load.answers} == set(letters)
    for answer in load.answers:
        assert answer.text, answer
        assert set(answer.text) <= set(letters[answer.version]), answer


def serves(slot: Slot, pod: Pod, model: str) -> None:
    """See that every rank of a pod has proved a version."""
    state = slot.state(pod)
    assert state.live is not None
    assert {state.live.digest, *(rank.digest for rank in state.ranks)} == {digest_of(slot, model)}
    assert state.memory.available_bytes > 0
    assert state.memory.limit_bytes == 4 << 30, "of the engine's container, where tensors are charged"


def resident_bytes(slot: Slot, pod: Pod) -> int:
    """Return what the sidecar's only process takes."""
    code = "print(next(line.split()[1] for line in open('/proc/1/status') if line.startswith('VmRSS')))"
    done = slot.exec_python(pod.name, code, container="modelswap")
    assert done.returncode == 0, done.stderr
    return int(done.stdout) * 1024


@first_of_all
async def test_an_engine_that_dies_comes_back_on_the_assigned_version(pods: Slot) -> None:
    await decided(pods, "1.1", NEW)
    name, pod = next(iter(pods.pods().items()))
    before = await asyncio.to_thread(pods.state, pod)
    async with load_on(pods) as load:
        await load.served_more(2)
        killed = await asyncio.to_thread(pods.exec_python, name, _KILL_ENGINE)
        assert "killed" in killed.stdout, killed.stderr
        await asyncio.to_thread(pods.wait_restarted, name, pod.restarts)
        await asyncio.to_thread(pods.wait_serving, pod, digest_of(pods, NEW), since=before)
        started = await asyncio.to_thread(pods.exec_python, name, _STARTED_ON)
        assert started.returncode == 0, started.stderr
        assert started.stdout.strip() == digest_of(pods, NEW), "the template names the old one"
        await load.served_more(4)
    assert load.summary().mixed == 0, load.summary().lines()
    assert {answer.version for answer in load.answers if answer.served} == {"1.1"}
    assert pods.pods()[name].restarts == pod.restarts + 1, "it was started once, and the sidecar not at all"


@first_of_all
async def test_a_pod_that_is_deleted_answers_to_the_end(pods: Slot) -> None:
    await decided(pods, "1.1", NEW)
    async with load_on(pods) as load:
        await load.served_more(2)
        await asyncio.to_thread(pods.delete_pod, next(iter(pods.pods())))
        await load.served_more(2)
    summary = load.summary()
    assert (summary.failed, summary.mixed) == (0, 0), summary.lines()
