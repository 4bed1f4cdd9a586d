"""vLLM's control side against canned answers: what is made of answers that a healthy engine does not give.

The server here is no engine; what the real one answers is in ``tests/engines``.
"""

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from modelswap_engine.backends.port import RequestPolicy
from modelswap_engine.backends.vllm.client import VllmClient
from modelswap_engine.backends.vllm.control import EXTENSION, LOAD, VllmControl
from modelswap_engine.protocol.errors import BadRequest, NotReady, WorkerLost

SECONDS = 10.0


class Canned:
    """Answers of a server with two ranks, to be spoilt."""

    def __init__(self) -> None:
        self.started = 1.0
        self.is_paused = False
        self.pauses = True
        self.pause_status = 200
        self.answered: asyncio.Event | None = None
        self.flushed = True
        self.collective: tuple[int, Any] = (200, {"results": ["a", "b"]})
        self.development = True
        self.packages_unknown = False
        self.lora: dict[str, Any] | None = {"max_loras": 3, "max_cpu_loras": 5, "max_lora_rank": 16}
        self.loading = 400
        self.label = "default"
        self.checksums: dict[str, str] = {}
        self.calls: list[str] = []
        self.hang: asyncio.Event | None = None
        self.connections: list[int] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        self.calls.append(path)
        assert request.transport is not None
        self.connections.append(request.transport.get_extra_info("peername")[1])
        if path == "/version":
            return web.json_response({"version": "0.32.0"})
        if path == "/v1/models":
            models = [{"id": "tiny", "parent": None}, {"id": "adapter", "parent": "tiny"}]
            return web.json_response({"data": models})
        if path == "/metrics":
            return web.Response(text=f"# HELP\nprocess_start_time_seconds {self.started}\n")
        if not self.development:
            return web.json_response({"detail": "Not Found"}, status=404)
        return await self._development(path, request)

    async def _development(self, path: str, request: web.Request) -> web.StreamResponse:
        if path == "/server_info":
            if self.packages_unknown:
                return web.json_response({"error": {"message": "Could not collect pip list output"}}, status=500)
            parallel = {"world_size": 2, "worker_extension_cls": EXTENSION}
            return web.json_response({"vllm_config": {"parallel_config": parallel, "lora_config": self.lora}})
        if path == LOAD:
            return web.json_response({"error": {"message": "no"}}, status=self.loading)
        if path == "/weight_info":
            return web.json_response({"weight_version": self.label})
        if path == "/update_weight_version":
            return web.json_response({"success": True, "new_version": self.label})
        if path == "/pause":
            self.is_paused = self.pauses
            if self.answered is not None:
                await self.answered.wait()
            return web.json_response({}, status=self.pause_status)
        if path == "/resume":
            self.is_paused = False
            return web.json_response({})
        if path == "/is_paused":
            return web.json_response({"is_paused": self.is_paused})
        if path == "/reset_prefix_cache":
            return web.json_response({"success": self.flushed})
        if self.hang is not None:
            await self.hang.wait()
        if path == "/weight_checker":
            return web.json_response({"checksums": self.checksums})
        status, body = self.collective
        return web.json_response(body, status=status)


@pytest.fixture
def canned() -> Canned:
    return Canned()


@pytest.fixture
async def control(canned: Canned) -> AsyncIterator[VllmControl]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", canned.answer)
    async with TestServer(app) as server:
        made = VllmControl(str(server.make_url("")), aiohttp.ClientSession())
        await made.facts(seconds=SECONDS)
        yield made
        for held in (canned.hang, canned.answered):
            if held is not None:
                held.set()
        await made.close()


async def test_facts_come_from_the_routes(control: VllmControl) -> None:
    facts = await control.facts(seconds=SECONDS)
    assert (facts.ranks, facts.agent) == (2, True)
    assert (facts.adapters.slots, facts.adapters.held, facts.adapters.max_rank) == (3, 5, 16)
    assert facts.served_model_names == ("tiny",)
    assert facts.weight_version == "default"


async def test_an_environment_without_pip_is_named_as_the_cause(canned: Canned, control: VllmControl) -> None:
    canned.packages_unknown = True
    with pytest.raises(WorkerLost, match=r"Could not collect pip list output .*neither pip nor uv"):
        await control.facts(seconds=SECONDS)


@pytest.mark.parametrize(
    ("lora", "loading", "option"), [(None, 404, "--enable-lora"), ({"max_loras": 1}, 404, "VLLM_ALLOW_RUNTIME_LORA")]
)
async def test_an_engine_without_adapters_says_by_which_option_it_would_have_them(
    canned: Canned, control: VllmControl, lora: dict[str, Any] | None, loading: int, option: str
) -> None:
    canned.lora, canned.loading = lora, loading
    facts = await control.facts(seconds=SECONDS)
    assert facts.adapters.slots == 0
    assert option in facts.adapters.reason
    assert option in facts.adapters.options.slots


async def test_a_load_that_one_of_several_ranks_refused_is_the_last_call(canned: Canned, control: VllmControl) -> None:
    canned.loading = 500
    with pytest.raises(WorkerLost, match="rank of 2 refused"):
        await control.ranks.request("POST", LOAD, seconds=SECONDS, json={})
    calls = len(canned.calls)
    with pytest.raises(WorkerLost, match="earlier call"):
        await control.call_all("x", seconds=SECONDS)
    assert len(canned.calls) == calls


async def test_without_development_routes_it_says_what_to_do(canned: Canned, control: VllmControl) -> None:
    canned.development = False
    facts = await control.facts(seconds=SECONDS)
    assert "VLLM_SERVER_DEV_MODE" in facts.refused["weights"]
    with pytest.raises(BadRequest, match="refuses"):
        await control.flush(seconds=SECONDS)


@pytest.mark.parametrize(
    "answer",
    [(500, {"error": {"message": "rank 1: boom"}}), (200, {"results": ["a"]}), (200, {"results": ["a", None]})],
)
async def test_after_a_failed_call_no_rank_is_asked_again_before_a_restart(
    canned: Canned, control: VllmControl, answer: tuple[int, Any]
) -> None:
    canned.collective = answer
    with pytest.raises(WorkerLost):
        await control.call_all("text", seconds=SECONDS)
    canned.collective = (200, {"results": ["a", "b"]})
    sent = len(canned.calls)
    for _ in range(2):
        with pytest.raises(WorkerLost, match="earlier call"):
            await control.call_all("text", seconds=SECONDS)
        with pytest.raises(WorkerLost, match="earlier call"):
            await control.load_full("/models/v1", "sha256:v1", seconds=SECONDS)
    assert len(canned.calls) == sent
    await control.facts(seconds=SECONDS)
    with pytest.raises(WorkerLost):
        await control.call_all("text", seconds=SECONDS)
    canned.started = 2.0
    await control.facts(seconds=SECONDS)
    assert await control.call_all("text", seconds=SECONDS) == ["a", "b"]


async def test_checksums_are_told_apart_by_rank_and_one_of_nothing_is_none(
    canned: Canned, control: VllmControl
) -> None:
    nothing = hashlib.sha256(b"").hexdigest()
    canned.checksums = {"dp0:pp0:pcp0:tp0:a.weight": "aa", "dp0:pp0:pcp0:tp1:a.weight": nothing}
    assert await control.checksums(seconds=SECONDS) == {0: {"a.weight": "aa"}, 1: {"a.weight": ""}}
    canned.checksums = {"dp1:pp0:pcp0:tp0:a.weight": "aa"}
    with pytest.raises(WorkerLost, match="dp1"):
        await control.checksums(seconds=SECONDS)


async def test_a_reload_that_failed_is_a_failed_call_and_the_label_stays(canned: Canned, control: VllmControl) -> None:
    canned.collective = (200, {"results": [None, None]})
    await control.reload("/folder", seconds=SECONDS)
    assert "/update_weight_version" not in canned.calls
    canned.collective = (500, {"error": {"message": "no weights there"}})
    with pytest.raises(WorkerLost, match="no weights there"):
        await control.reload("/folder", seconds=SECONDS)
    with pytest.raises(WorkerLost, match="earlier call"):
        await control.checksums(seconds=SECONDS)


@pytest.mark.parametrize("results", [[], [None], [None, "late answer"]])
async def test_a_load_that_not_every_rank_answered_is_a_failed_call(
    canned: Canned, control: VllmControl, results: list[Any]
) -> None:
    canned.collective = (200, {"results": results})
    with pytest.raises(WorkerLost, match="of 2 answered a load"):
        await control.reload("/folder", seconds=SECONDS)
    with pytest.raises(WorkerLost, match="earlier call"):
        await control.checksums(seconds=SECONDS)


async def test_a_call_that_nobody_waited_for_counts_as_failed(canned: Canned, control: VllmControl) -> None:
    canned.hang = asyncio.Event()
    with pytest.raises(WorkerLost, match="within"):
        await control.call_all("text", seconds=0.05)
    canned.hang.set()
    with pytest.raises(WorkerLost, match="earlier call"):
        await control.call_all("text", seconds=SECONDS)


async def test_a_call_that_was_given_up_is_answered_before_the_next_one(canned: Canned, control: VllmControl) -> None:
    """A check gives way to a swap in the middle of a call; that must not cost the engine."""
    canned.hang = asyncio.Event()
    asking = asyncio.create_task(control.call_all("text", seconds=SECONDS))
    while "/collective_rpc" not in canned.calls:
        await asyncio.sleep(0)  # until it has arrived
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    following = asyncio.create_task(control.call_all("next", seconds=SECONDS))
    canned.hang.set()
    assert await following == ["a", "b"]


async def test_a_method_that_is_not_there_is_no_failure_of_ranks(canned: Canned, control: VllmControl) -> None:
    canned.collective = (404, {"detail": "Not Found"})
    with pytest.raises(BadRequest):
        await control.call_all("text", seconds=SECONDS)
    canned.collective = (200, {"results": ["a", "b"]})
    assert await control.call_all("text", seconds=SECONDS) == ["a", "b"]


async def test_a_second_pause_is_not_sent_and_never_changes_the_policy(canned: Canned, control: VllmControl) -> None:
    await control.pause(RequestPolicy.RECOMPUTE, seconds=SECONDS)
    await control.pause(RequestPolicy.RECOMPUTE, seconds=SECONDS)
    with pytest.raises(BadRequest, match="already"):
        await control.pause(RequestPolicy.ABORT, seconds=SECONDS)
    assert canned.calls.count("/pause") == 1


@pytest.mark.parametrize("policy", [RequestPolicy.NONE_RUNNING, RequestPolicy.RECOMPUTE])
async def test_a_pause_is_over_once_it_shows_and_not_when_it_is_answered(
    canned: Canned, control: VllmControl, policy: RequestPolicy
) -> None:
    canned.answered = asyncio.Event()  # which it never is
    await control.pause(policy, seconds=SECONDS)
    assert canned.is_paused


async def test_a_pause_that_waits_for_requests_lasts_until_they_have_ended(
    canned: Canned, control: VllmControl
) -> None:
    canned.answered, canned.flushed = asyncio.Event(), False
    pausing = asyncio.create_task(control.pause(RequestPolicy.NONE_RUNNING, seconds=SECONDS))
    while canned.calls.count("/reset_prefix_cache") < 3:
        await asyncio.sleep(0)  # until it has been asked several times
    assert not pausing.done()
    canned.flushed = True
    await pausing


async def test_a_pause_that_is_answered_badly_counts_where_it_shows(canned: Canned, control: VllmControl) -> None:
    canned.pause_status = 500
    await control.pause(RequestPolicy.NONE_RUNNING, seconds=SECONDS)
    await control.resume(seconds=SECONDS)
    canned.pauses = False
    with pytest.raises(WorkerLost, match="/pause with 500"):
        await control.pause(RequestPolicy.NONE_RUNNING, seconds=SECONDS)
    canned.pause_status = 200
    with pytest.raises(WorkerLost, match="that it is not paused"):
        await control.pause(RequestPolicy.NONE_RUNNING, seconds=SECONDS)


async def test_a_flush_and_a_label_that_did_not_happen_are_noticed(canned: Canned, control: VllmControl) -> None:
    canned.flushed = False
    assert await control.flush(seconds=SECONDS) is False
    with pytest.raises(WorkerLost, match="calls its weights 'default'"):
        await control.set_version("sha256:other", seconds=SECONDS)


async def test_no_call_goes_over_a_connection_that_may_be_closing(canned: Canned, control: VllmControl) -> None:
    for _ in range(3):
        await control.flush(seconds=SECONDS)
    assert len(set(canned.connections)) == len(canned.connections) >= 3


async def test_nobody_listening_is_not_ready() -> None:
    control = VllmControl("http://127.0.0.1:9", aiohttp.ClientSession())
    with pytest.raises(NotReady):
        await control.flush(seconds=SECONDS)
    assert not await control.alive(seconds=SECONDS)
    await control.close()


async def test_a_call_ends_by_its_own_bound_and_by_cancelling_whatever_the_session_has(canned: Canned) -> None:
    """A limit of the session's that is over in the moment of a cancellation would have aiohttp swallow that."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", canned.answer)
    session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=0.1))
    async with TestServer(app) as server:
        client = VllmClient(str(server.make_url("")), session)
        canned.hang = asyncio.Event()
        calling = asyncio.create_task(client.send("POST", "/weight_checker"))
        while not canned.calls:
            await asyncio.sleep(0.001)
        time.sleep(0.2)  # the loop stands still meanwhile, as that of a process that does not get its turn
        asyncio.get_running_loop().call_soon(calling.cancel)
        with pytest.raises(asyncio.CancelledError):
            await calling
        canned.hang.set()
        await client.close()
