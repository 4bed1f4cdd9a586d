"""The engine, or the sidecar, killed in each phase of a swap: one whole version serves afterwards, the right one.

A tap between the two says when; each message of a swap is a moment before which, or after which, somebody dies.
"""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio

from modelswap_engine.protocol.policy import VerifyMode
from modelswap_engine.protocol.states import SwapState
from tests.support.engine_pod import ONE_PROCESS
from tests.support.engine_world import World, long
from tests.support.models import Pair

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]


OPTIONS = {"vllm": ONE_PROCESS, "sglang": ()}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["vllm", long("sglang")])
async def shared(
    request: pytest.FixtureRequest, pair: Pair, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[World]:
    folder, engine = tmp_path_factory.mktemp("kills"), request.param
    async with World.running(folder, pair, engine=engine, options=OPTIONS[engine]) as world:
        yield world


@pytest_asyncio.fixture(loop_scope="module")
async def world(shared: World) -> World:
    await shared.on_one()
    return shared


LABEL = "label"
LABELS = {"vllm": "/update_weight_version", "sglang": "commit"}
"""Which message has the engine call its weights by what was proved: where it can, the one that exchanged them."""


async def swap_at(world: World, when: str, message: str, act: Callable[[], None]) -> str:
    """Act at a message of a swap to 1.1, once that has begun and come there; returns the operation."""
    getattr(world.tap, when)(LABELS[world.pod.engine] if message == LABEL else message, act)
    # By itself only a proof by hash is asked for; the other comes with the commit.
    operation = await world.begin("1.1", verify=VerifyMode.STRICT if message == "verify" else VerifyMode.STANDARD)
    await world.tap.acted()
    return operation


@pytest.mark.parametrize(
    ("when", "message", "ended", "version"),
    [
        long("before", "stage", SwapState.ABORTED, "1.0"),
        ("before", "prepare", SwapState.ABORTED, "1.0"),
        long("after", "prepare", SwapState.ABORTED, "1.0"),
        long("before", "commit", SwapState.SERVING, "1.1"),
        ("after", "commit", SwapState.SERVING, "1.1"),
        long("after", "verify", SwapState.SERVING, "1.1"),
        long("after", LABEL, SwapState.SERVING, "1.1"),
        ("before", "release", SwapState.SERVING, "1.1"),
    ],
)
async def test_the_sidecar_is_killed(world: World, when: str, message: str, ended: SwapState, version: str) -> None:
    """The intent is on the disk before the commit: from there on the new version is what comes up."""
    boot, restarts = world.pod.boot_id(), world.kubelet.restarts
    operation = await swap_at(world, when, message, world.pod.sidecar.kill)
    await asyncio.to_thread(lambda: world.pod.sidecar.start().wait_ready())
    await world.serves(version)
    assert await world.ended(operation) is ended
    assert (world.pod.boot_id(), world.kubelet.restarts) == (boot, restarts)  # the engine is the same one


@pytest.mark.parametrize(
    ("when", "message", "ended", "version"),
    [
        long("before", "stage", SwapState.ABORTED, "1.0"),
        long("before", "prepare", SwapState.ABORTED, "1.0"),
        long("before", "commit", SwapState.ROLLED_BACK, "1.0"),
        ("after", "commit", SwapState.ROLLED_BACK, "1.0"),
        long("before", "verify", SwapState.ROLLED_BACK, "1.0"),
        long("before", LABEL, SwapState.ROLLED_BACK, "1.0"),
        long("before", "release", SwapState.SERVING, "1.1"),
    ],
)
async def test_the_engine_is_killed(world: World, when: str, message: str, ended: SwapState, version: str) -> None:
    boot = world.pod.boot_id()
    operation = await swap_at(world, when, message, world.pod.kill_engine)
    assert await world.ended(operation) is ended
    await world.serves(version)
    assert world.pod.boot_id() != boot
    state = await asyncio.to_thread(world.pod.sidecar.state)
    assert state.live is not None
    assert world.pod.starts_on() == state.live.digest  # and not the template's first version
    assert await world.ended(await world.begin("1.1")) is SwapState.SERVING
    await world.serves("1.1")
