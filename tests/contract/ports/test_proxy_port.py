"""The data port before an external engine, over real sockets; the engine behind it is canned (see its module)."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientResponse

from modelswap_engine.http.proxy.dialects import SGLANG, VLLM
from modelswap_engine.protocol.messages import CheckRequest, PauseRequest, ResumeRequest
from modelswap_engine.protocol.policy import Traffic, TrafficMode
from modelswap_engine.protocol.states import SwapState
from tests.support.canned_engine import DONE, Canned, CannedEngine, canned_engine, event, stream
from tests.support.proxy_ports import BASE, MAX_BODY, MAX_REQUESTS, SERVED, ProxyPorts, open_proxy

HELLO = event(model=BASE, choices=[{"text": "hel"}])
MORE = event(model=BASE, choices=[{"text": "lo"}])


@pytest.fixture
async def behind() -> AsyncIterator[tuple[CannedEngine, str]]:
    async with canned_engine() as found:
        yield found


@pytest.fixture
def engine(behind: tuple[CannedEngine, str]) -> CannedEngine:
    return behind[0]


@pytest.fixture
async def proxy(behind: tuple[CannedEngine, str], tmp_path: Path) -> AsyncIterator[ProxyPorts]:
    async with open_proxy(tmp_path, behind[1]) as opened:
        yield opened


async def ask(
    proxy: ProxyPorts, path: str = "/v1/completions", *, headers: Any = None, **fields: Any
) -> ClientResponse:
    return await proxy.data.post(path, json={"model": SERVED, "prompt": "hi", **fields}, headers=headers)


async def error_of(response: ClientResponse) -> tuple[int, str]:
    return response.status, (await response.json())["error"]["code"]


async def test_a_request_reaches_the_engine_under_its_names_and_comes_back_under_ours(
    proxy: ProxyPorts, engine: CannedEngine
) -> None:
    response = await ask(proxy, max_tokens=3)
    body = await response.json()
    seen = engine.seen[0]

    assert (seen.path, seen.body["model"], seen.body["prompt"], seen.body["max_tokens"]) == (
        "/v1/completions",
        BASE,
        "hi",
        3,
    )
    assert seen.body["cache_salt"] == proxy.world.one.digest.removeprefix("sha256:")
    assert body["model"] == SERVED
    assert body["choices"] == [{"text": "hello"}]
    assert response.headers["x-modelswap-version"] == "1.0"
    assert response.headers["x-modelswap-digest"] == proxy.world.one.digest
    assert response.headers["x-request-id"] == seen.headers["X-Request-Id"]


async def test_values_reach_the_engine_as_they_were_written(proxy: ProxyPorts, engine: CannedEngine) -> None:
    raw = b'{"model":"chat","prompt":"\\u00e9","temperature":1.0,"seed":123456789012345678901234567890,"x":1e400}'
    await proxy.data.post("/v1/completions", data=raw)

    for value in (b'"\\u00e9"', b":1.0,", b"123456789012345678901234567890", b"1e400"):
        assert value in engine.seen[0].raw


async def test_a_field_that_comes_twice_has_one_meaning(proxy: ProxyPorts, engine: CannedEngine) -> None:
    """Whoever reads the first one and whoever reads the last one must not see two models."""
    await proxy.data.post("/v1/completions", data=b'{"model":"chat","prompt":"a","model":"chat","prompt":"b"}')

    assert engine.seen[0].raw.count(b'"model"') == 1
    assert engine.seen[0].body["prompt"] == "b"


async def test_each_event_of_a_stream_goes_on_when_it_comes(proxy: ProxyPorts, engine: CannedEngine) -> None:
    second, third = asyncio.Event(), asyncio.Event()
    engine.usual = stream(HELLO, second, MORE[:10], MORE[10:], third, DONE)
    response = await ask(proxy, stream=True)

    assert response.headers["Content-Type"].startswith("text/event-stream")
    wanted = HELLO.replace(b'"tiny"', b'"chat"')
    assert await response.content.readexactly(len(wanted)) == wanted
    second.set()
    assert await response.content.readuntil(b"\n\n") == MORE.replace(b'"tiny"', b'"chat"')
    third.set()
    assert await response.content.read() == DONE


async def test_a_client_that_does_not_read_stops_the_engine(proxy: ProxyPorts, engine: CannedEngine) -> None:
    """Backpressure: what nobody takes is not read from the engine, however much it would send."""
    size = 64 << 20
    engine.usual = stream(*[event(model=BASE, choices=[{"text": "x" * (1 << 18)}])] * (size >> 18))
    response = await ask(proxy, stream=True)
    seen = await engine.next()
    await seen.begun.wait()

    before = -1
    while seen.sent > before:  # until the engine's own writes wait
        before = seen.sent
        await asyncio.sleep(0.1)
    assert seen.sent < size / 2
    response.close()
    await seen.gone.wait()


async def test_a_client_that_goes_away_ends_the_request_in_the_engine(proxy: ProxyPorts, engine: CannedEngine) -> None:
    never = asyncio.Event()
    engine.usual = stream(HELLO, never)
    response = await ask(proxy, stream=True)
    await response.content.readuntil(b"\n\n")
    assert proxy.flights.running() == 1
    response.close()

    await engine.seen[0].gone.wait()
    async with asyncio.timeout(10):
        while proxy.flights.running() or proxy.world.coordinator.state().lock.readers:
            await asyncio.sleep(0.005)


async def test_a_client_that_goes_away_before_the_head_does_so_too(proxy: ProxyPorts, engine: CannedEngine) -> None:
    engine.usual = Canned(before=asyncio.Event())
    asking = asyncio.create_task(ask(proxy))
    seen = await engine.next()
    asking.cancel()

    await seen.gone.wait()


async def test_a_stream_that_breaks_off_ends_with_an_error_after_whole_events(
    proxy: ProxyPorts, engine: CannedEngine
) -> None:
    engine.usual = stream(HELLO, MORE[:12], cut=True)
    response = await ask(proxy, stream=True)
    events = (await response.text()).split("\n\n")

    assert json.loads(events[0].removeprefix("data: "))["choices"][0]["text"] == "hel"
    error = json.loads(events[1].removeprefix("data: "))["error"]
    assert (error["code"], error["retryable"]) == ("bad_gateway", True)
    assert events[2:] == ["data: [DONE]", ""]


async def test_an_answer_that_breaks_off_is_a_plain_error(proxy: ProxyPorts, engine: CannedEngine) -> None:
    engine.usual = Canned(steps=(b'{"model":"tiny",',), headers={"Content-Length": "1000"}, cut=True)

    assert await error_of(await ask(proxy)) == (502, "bad_gateway")


async def test_a_large_answer_is_passed_on_and_its_break_is_seen(proxy: ProxyPorts, engine: CannedEngine) -> None:
    large = json.dumps({"model": BASE, "choices": [{"text": "x" * (3 << 20)}]}, separators=(",", ":")).encode()
    engine.answers = [Canned(steps=(large,)), Canned(steps=(large[:-5],), cut=True)]

    body = await (await ask(proxy)).json()
    assert (body["model"], len(body["choices"][0]["text"])) == (SERVED, 3 << 20)
    response = await ask(proxy)
    with pytest.raises(Exception, match=r"payload|closed|reset|Transfer"):
        await response.read()


async def test_what_the_engine_refuses_is_passed_on(proxy: ProxyPorts, engine: CannedEngine) -> None:
    engine.usual = Canned(steps=(b"not JSON at all",), status=418, content_type="text/plain")
    response = await ask(proxy)

    assert (response.status, await response.text(), response.content_type) == (418, "not JSON at all", "text/plain")


@pytest.mark.parametrize(
    "path",
    [
        "/pause", "/resume", "/collective_rpc", "/reset_prefix_cache", "/v1/load_lora_adapter", "/adapters",
        "/update_weights", "/sleep", "/generate", "/update_weights_from_disk", "/v1/chat/completions/batch",
        "/v1/../collective_rpc", "/v1/completions/", "//v1/completions", "/v1%2Fcompletions", "/openapi.json", "/docs",
    ],
)  # fmt: skip
async def test_what_is_not_on_the_list_does_not_exist(proxy: ProxyPorts, engine: CannedEngine, path: str) -> None:
    from yarl import URL

    response = await proxy.data.post(URL(proxy.url + path, encoded=True), json={"model": SERVED, "prompt": "x"})

    assert await error_of(response) == (404, "NotFound")
    assert engine.seen == []


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH"])
async def test_other_methods_are_not_let_through(proxy: ProxyPorts, engine: CannedEngine, method: str) -> None:
    response = await proxy.data.request(method, "/v1/completions", json={})

    assert response.status == 405
    assert engine.seen == []


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "BadRequest"),
        (b"[]", "BadRequest"),
        (b'{"model": 7}', "invalid_value"),
        (b'{"model": "chat", "stream": "yes"}', "invalid_value"),
        (b'{"model": "chat", "cache_salt": 7}', "invalid_value"),
        (b'{"model": "chat", "background": true}', "unsupported_parameter"),
        (b'{"model": "chat", "kv_transfer_params": {"a": 1}}', "unsupported_parameter"),
    ],
)
async def test_what_cannot_be_let_through_is_refused(
    proxy: ProxyPorts, engine: CannedEngine, body: bytes, code: str
) -> None:
    assert await error_of(await proxy.data.post("/v1/completions", data=body)) == (400, code)
    assert engine.seen == []


@pytest.mark.parametrize("name", ["other", BASE, "", f"{SERVED}:x", "../tiny"])
async def test_a_name_that_leads_nowhere_is_never_the_base(proxy: ProxyPorts, engine: CannedEngine, name: str) -> None:
    response = await ask(proxy, model=name)

    if name == "":
        assert engine.seen[0].body["model"] == BASE
        return
    assert await error_of(response) == (404, "model_not_found")
    assert engine.seen == []


async def test_a_body_may_not_be_larger_than_allowed(proxy: ProxyPorts, engine: CannedEngine) -> None:
    fitting = await ask(proxy, prompt="x" * (MAX_BODY - 1000))
    assert fitting.status == 200
    assert await error_of(await ask(proxy, prompt="x" * MAX_BODY)) == (413, "TooLarge")
    assert len(engine.seen) == 1


async def test_an_adapter_is_asked_for_by_its_content_and_answers_under_its_name(
    proxy: ProxyPorts, engine: CannedEngine
) -> None:
    loaded = await proxy.load("support-de")
    engine.usual = stream(event(model=loaded.id, choices=[{"text": "a"}]), DONE)
    response = await ask(proxy, model="support-de", stream=True)

    assert engine.seen[0].body["model"] == loaded.id == f"support-de@{loaded.digest[7:19]}"
    assert (await response.text()).startswith('data: {"model":"support-de"')
    assert response.headers["x-modelswap-adapter"] == loaded.id
    assert await error_of(await ask(proxy, model=loaded.id)) == (404, "model_not_found")
    models = await (await proxy.data.get("/v1/models")).json()
    assert [card["id"] for card in models["data"]] == [SERVED, "support-de"]

    await proxy.unload("support-de")
    assert await error_of(await ask(proxy, model="support-de")) == (404, "model_not_found")
    assert len(engine.seen) == 1


async def test_sglang_names_adapters_with_their_base(behind: tuple[CannedEngine, str], tmp_path: Path) -> None:
    engine, url = behind
    async with open_proxy(tmp_path, url, dialect=SGLANG) as proxy:
        loaded = await proxy.load("de")
        for name in ("de", f"{SERVED}:de"):
            await ask(proxy, model=name)
            assert engine.seen[-1].body["model"] == f"{BASE}:{loaded.id}"
            assert engine.seen[-1].body["extra_key"] == proxy.world.one.digest[7:]
        await proxy.data.post("/generate", json={"text": "hi", "lora_path": "de", "extra_key": ["a", None]})
        seen = engine.seen[-1].body
        salt = proxy.world.one.digest[7:]
        assert (seen["lora_path"], seen["extra_key"]) == (loaded.id, [f"{salt}.a", salt])
        assert "model" not in seen
        await proxy.data.post("/generate", json={"text": "hi"})
        assert "lora_path" not in engine.seen[-1].body

        asked = len(engine.seen)
        for fields in ({"lora_path": "x"}, {"lora_path": loaded.id}, {"lora_path": ["de"]}):
            response = await proxy.data.post("/generate", json={"text": "hi", **fields})
            assert response.status in (400, 404)
        for fields in (
            {"lora_path": "de"},
            {"custom_logit_processor": "gASV"},
            {"session_params": {"id": "a"}},
            {"bootstrap_host": "10.0.0.1"},
        ):
            assert await error_of(await ask(proxy, **fields)) == (400, "unsupported_parameter")
        assert len(engine.seen) == asked


async def test_a_version_can_be_demanded(proxy: ProxyPorts, engine: CannedEngine) -> None:
    assert (await ask(proxy, headers={"x-modelswap-require-version": "1.0"})).status == 200
    refused = await ask(proxy, headers={"x-modelswap-require-version": "1.1"})

    assert await error_of(refused) == (409, "version_mismatch")
    assert len(engine.seen) == 1


async def test_a_swap_waits_for_streams_and_new_requests_wait_for_it(proxy: ProxyPorts, engine: CannedEngine) -> None:
    end = asyncio.Event()
    engine.usual = stream(HELLO, end, DONE)
    first = await ask(proxy, stream=True)
    await first.content.readuntil(b"\n\n")
    world = proxy.world
    swapping = asyncio.create_task(world.swap(world.two))
    await world.until(lambda: not world.gate.is_open)
    second = asyncio.create_task(ask(proxy, stream=True))
    await world.until(lambda: world.coordinator.state().gate.queued == 1)
    assert len(engine.seen) == 1
    assert "commit" not in world.ranks[0].calls
    end.set()

    assert (await first.text()).endswith("[DONE]\n\n")
    assert (await swapping).state is SwapState.SERVING
    answer = await second
    await answer.read()
    assert first.headers["x-modelswap-version"] == "1.0"
    assert answer.headers["x-modelswap-version"] == "1.1"
    assert engine.seen[1].body["cache_salt"] == world.two.digest[7:]
    assert engine.seen[0].body["cache_salt"] == world.one.digest[7:]


async def test_abort_ends_streams_and_answers_with_a_retryable_error(proxy: ProxyPorts, engine: CannedEngine) -> None:
    never = asyncio.Event()
    engine.answers = [stream(HELLO, never), Canned(before=never), Canned(before=never)]
    first = await ask(proxy, stream=True)
    await first.content.readuntil(b"\n\n")
    second = asyncio.create_task(ask(proxy))
    await engine.next(2)
    status = await proxy.world.swap(proxy.world.two, traffic=Traffic(mode=TrafficMode.ABORT))

    assert status.state is SwapState.SERVING
    assert status.aborted_requests == 2
    assert '"code":"interrupted"' in (await first.text()).split("\n\n")[0]
    assert await error_of(await second) == (503, "interrupted")
    await engine.seen[0].gone.wait()
    await engine.seen[1].gone.wait()


async def test_nothing_is_passed_on_once_live_tensors_are_wrong(proxy: ProxyPorts, engine: CannedEngine) -> None:
    more = asyncio.Event()
    engine.usual = stream(HELLO, more, MORE, DONE)
    response = await ask(proxy, stream=True)
    await response.content.readuntil(b"\n\n")
    for rank in proxy.world.ranks:
        rank.live["q"] = b"...."
        rank.errors["stage"] = rank_fails()  # so that the repair does not come first
    await proxy.world.coordinator.check(CheckRequest())
    more.set()

    assert '"code":"interrupted"' in await response.text()


def rank_fails() -> Any:
    from modelswap_engine.protocol.errors import Internal

    return Internal("told to fail")


async def test_requests_end_and_none_begins_while_an_engine_is_looked_at(
    proxy: ProxyPorts, engine: CannedEngine
) -> None:
    engine.usual = stream(HELLO, asyncio.Event())
    response = await ask(proxy, stream=True)
    await response.content.readuntil(b"\n\n")
    with proxy.flights.barred():
        assert proxy.flights.end() == 1
        assert '"code":"interrupted"' in await response.text()
        assert await error_of(await ask(proxy)) == (503, "NotReady")
    assert len(engine.seen) == 1


async def test_requests_wait_at_a_closed_gate(proxy: ProxyPorts, engine: CannedEngine) -> None:
    await proxy.world.coordinator.leases.take(PauseRequest(lease_id="l", owner="o", seconds=60))
    waiting = asyncio.create_task(ask(proxy))
    await proxy.world.until(lambda: proxy.world.coordinator.state().gate.queued == 1)
    assert engine.seen == []
    await proxy.world.coordinator.leases.give_back(ResumeRequest(lease_id="l", owner="o"))

    assert (await waiting).status == 200


async def test_places_are_bounded(proxy: ProxyPorts, engine: CannedEngine) -> None:
    free = asyncio.Event()
    engine.usual = Canned(before=free)
    inside = [asyncio.create_task(ask(proxy)) for _ in range(MAX_REQUESTS)]
    await engine.next(MAX_REQUESTS)

    assert await error_of(await ask(proxy)) == (503, "overloaded")
    free.set()
    assert {(await answer).status for answer in inside} == {200}


async def test_an_engine_that_is_away_is_told_and_looked_after(
    behind: tuple[CannedEngine, str], tmp_path: Path
) -> None:
    async with open_proxy(tmp_path, "http://127.0.0.1:9") as proxy:
        assert await error_of(await ask(proxy)) == (503, "WorkerLost")
        assert proxy.lost == ["lost"]
        assert proxy.flights.running() == 0


async def test_an_engine_that_says_nothing_is_given_up(behind: tuple[CannedEngine, str], tmp_path: Path) -> None:
    engine, url = behind
    engine.answers = [Canned(before=asyncio.Event()), stream(HELLO, asyncio.Event())]
    async with open_proxy(tmp_path, url, silent_seconds=0.3) as proxy:
        assert await error_of(await ask(proxy)) == (504, "gateway_timeout")
        assert '"code":"gateway_timeout"' in await (await ask(proxy, stream=True)).text()
        await engine.seen[0].gone.wait()
        await engine.seen[1].gone.wait()


async def test_connections_are_used_again(proxy: ProxyPorts, engine: CannedEngine) -> None:
    for _ in range(5):
        await (await ask(proxy)).read()

    assert len(engine.peers) == 1


async def test_headers_of_one_connection_stay_on_it(proxy: ProxyPorts, engine: CannedEngine) -> None:
    engine.usual = Canned(
        headers={"X-Engine": "1", "Keep-Alive": "timeout=5", "X-Modelswap-Version": "forged", "Server": "uvicorn"}
    )
    response = await ask(
        proxy,
        headers={
            "Connection": "keep-alive, x-secret", "X-Secret": "1", "TE": "trailers", "X-Request-Id": "mine",
            "X-Modelswap-Version": "forged", "Accept-Encoding": "gzip", "X-Data-Parallel-Rank": "3",
            "Authorization": "Bearer k", "X-Custom": "yes",
        },
    )  # fmt: skip
    sent = {name.lower(): value for name, value in engine.seen[0].headers.items()}

    assert sent["x-custom"] == "yes"
    assert sent["authorization"] == "Bearer k"
    assert sent["accept-encoding"] == "identity"
    assert sent["x-request-id"] != "mine"
    assert not {"x-secret", "te", "x-modelswap-version", "x-data-parallel-rank"} & sent.keys()
    assert response.headers["X-Engine"] == "1"
    assert response.headers["x-modelswap-version"] == "1.0"
    assert "Keep-Alive" not in response.headers
    assert response.headers.get("Server") != "uvicorn"


async def test_the_engines_metrics_are_shown(proxy: ProxyPorts, engine: CannedEngine) -> None:
    engine.usual = Canned(steps=(b"vllm:num_requests_running 0\n",), content_type="text/plain")

    assert await (await proxy.data.get("/metrics")).text() == "vllm:num_requests_running 0\n"
    assert engine.seen[0].path == "/metrics"


def test_no_admin_route_is_on_a_list() -> None:
    words = (
        "weight",
        "pause",
        "continue",
        "lora",
        "cache",
        "profile",
        "sleep",
        "wake",
        "rpc",
        "server_info",
        "session",
    )
    for dialect in (VLLM, SGLANG):
        for route in dialect.routes:
            assert not any(word in route.path for word in words), route.path
