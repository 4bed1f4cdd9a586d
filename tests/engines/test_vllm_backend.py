"""The backend port over the real vLLM: what the coordinator calls, and what the engine's clients see of it."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import aiohttp
import pytest

from modelswap_engine.backends.external.backend import ExternalBackend
from modelswap_engine.backends.external.restart import RestartWish
from modelswap_engine.backends.external.settings import ExternalSettings
from modelswap_engine.backends.port import Load, Reply, RequestPolicy, StageRetained
from modelswap_engine.backends.vllm.control import VllmControl
from modelswap_engine.protocol.errors import ErrorBody, NotFound, from_body
from tests.support import engines
from tests.support.engine_ranks import SECONDS, Client
from tests.support.engines import EngineServer
from tests.support.free_ports import free_port
from tests.support.models import LOWER, UPPER, Pair
from tests.support.orders import accepted, digest_of, load_order, stage_order

pytestmark = pytest.mark.engine

UNI = ("--distributed-executor-backend", "uni")


class NoRequests:
    """The clients of this test send nothing while weights change, as behind a closed gate."""

    def running(self) -> int:
        return 0

    def end(self) -> int:
        return 0

    def barred(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class AsItLies:
    """The checkpoint lies where the engine sees it, so nothing is made for it to start on."""

    async def offer(self, order: Load) -> Path:
        return Path(order.directory)

    async def withdraw(self) -> None:
        """The engine of this test starts once."""


@pytest.fixture
def wish() -> RestartWish:
    return RestartWish()


@pytest.fixture
async def backend(vllm: EngineServer, wish: RestartWish) -> AsyncIterator[ExternalBackend]:
    control = VllmControl(vllm.url, aiohttp.ClientSession())
    made = ExternalBackend(control, requests=NoRequests(), restart=wish, starting=AsItLies())
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def client(vllm: EngineServer, session: aiohttp.ClientSession) -> Client:
    return Client(session, vllm.url)


async def exchange(backend: ExternalBackend, operation: str) -> str:
    """Go from staged to serving; return the digest that was proven."""
    accepted(await backend.prepare(operation))
    accepted(await backend.pause(operation, timeout=SECONDS, policy=RequestPolicy.NONE_RUNNING))
    assert accepted(await backend.commit(operation, RequestPolicy.NONE_RUNNING)).method == "pointer"
    proven = accepted(await backend.verify(operation, strict=True)).digest
    accepted(await backend.resume(operation))
    return proven


async def test_a_whole_swap_and_back_without_reading(
    backend: ExternalBackend, client: Client, pair: Pair, wish: RestartWish, vllm: EngineServer
) -> None:
    old, new = digest_of(pair.old), digest_of(pair.new)
    assert accepted(await backend.load(load_order(pair.old))).digest == old
    assert {"model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.v_proj.weight"} <= {
        name for group in backend.layout().groups for name in group if len(group) == 3
    }
    before = await client.texts()
    order = stage_order(pair.old, pair.new, operation_id="there", groups=backend.layout().groups)
    accepted(await backend.stage(order))
    assert await exchange(backend, "there") == new
    assert set("".join(await client.texts())) <= set(UPPER)
    assert await label(vllm) == new
    accepted(await backend.release("there", previous=False))

    accepted(await backend.stage(StageRetained(operation_id="back", digest=old, directory=str(pair.old))))
    assert await exchange(backend, "back") == old
    assert await client.texts() == before
    accepted(await backend.pause("back", timeout=SECONDS, policy=RequestPolicy.NONE_RUNNING))
    accepted(await backend.rollback("back"))
    assert accepted(await backend.verify("back", strict=True)).digest == new
    accepted(await backend.resume("back"))
    assert set("".join(await client.texts())) <= set(UPPER)
    assert not wish.wanted


@pytest.mark.full  # the conformance suite asks the same of the backend
async def test_an_engine_on_another_version_loads_the_right_one_and_proves_it(
    backend: ExternalBackend, client: Client, pair: Pair
) -> None:
    for folder, letters in ((pair.new, UPPER), (pair.old, LOWER)):
        assert accepted(await backend.load(load_order(folder))).digest == digest_of(folder)
        assert set("".join(await client.texts())) <= set(letters)
        assert [rank.digest for rank in backend.ranks()] == [digest_of(folder)]


@pytest.mark.full
async def test_a_killed_engine_is_missed_and_its_next_start_is_taken_over(
    pair: Pair, tmp_path: Path, session: aiohttp.ClientSession
) -> None:
    port = free_port()
    control = VllmControl(f"http://127.0.0.1:{port}", aiohttp.ClientSession())
    settings = ExternalSettings(watch=0.2, answer=5.0, misses=2, call=SECONDS)
    backend = ExternalBackend(control, requests=NoRequests(), restart=RestartWish(), settings=settings)
    await backend.start()
    try:
        with engines.running(engines.vllm(pair.old, tmp_path / "first", *UNI, port=port)) as first:
            accepted(await backend.load(load_order(pair.old)))
            boot = backend.ranks()[0].boot_id
            order = stage_order(pair.old, pair.new, operation_id="op", groups=backend.layout().groups)
            accepted(await backend.stage(order))
            os.killpg(first.pid, signal.SIGKILL)
            async with asyncio.timeout(SECONDS):
                while backend.ranks()[0].alive:
                    await asyncio.sleep(0.05)  # it is the backend that asks the engine
            assert not backend.ranks()[0].digest
        with engines.running(engines.vllm(pair.old, tmp_path / "second", *UNI, port=port)):
            assert accepted(await backend.load(load_order(pair.old))).boot_id != boot
            with pytest.raises(NotFound):
                raise from_body(error_of(await backend.prepare("op")))
            texts = await Client(session, f"http://127.0.0.1:{port}").texts()
            assert set("".join(texts)) <= set(LOWER)
    finally:
        await backend.stop()


def error_of(replies: Sequence[Reply]) -> ErrorBody:
    (reply,) = replies
    assert reply.error is not None
    return reply.error


async def label(server: EngineServer) -> str:
    async with aiohttp.ClientSession() as session, session.get(f"{server.url}/weight_info") as answer:
        return str((await answer.json())["weight_version"])
