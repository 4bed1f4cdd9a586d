"""The data port over real sockets: bodies, streams, errors, and answers in whose middle something happens."""

import asyncio
import dataclasses
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientResponse
from structlog.testing import capture_logs

from modelswap_engine.backends.port import FinishReason
from modelswap_engine.protocol.assignment import Assignment, EngineRestart
from modelswap_engine.protocol.codec import decode
from modelswap_engine.protocol.engine_state import AnswerCount, EngineState
from modelswap_engine.protocol.errors import SourceUnreadable, WorkerLost
from modelswap_engine.protocol.messages import CheckRequest, PauseRequest, VersionRef
from modelswap_engine.protocol.policy import Traffic, TrafficMode
from modelswap_engine.protocol.states import SwapState
from tests.support.fake_backend import Fault
from tests.support.ports import CONTEXT, MAX_REQUESTS, MODEL, Ports, open_ports
from tests.support.scripted_backend import Script


async def chat(ports: Ports, **fields: Any) -> ClientResponse:
    headers = fields.pop("headers", {})
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 20, **fields}
    return await ports.data.post("/v1/chat/completions", json=body, headers=headers)


async def events(response: ClientResponse) -> list[Any]:
    """Return the payloads of a stream; ``[DONE]`` must be the last event."""
    assert response.status == 200, await response.text()
    assert response.headers["Content-Type"].startswith("text/event-stream")
    payloads = [line[6:] for line in (await response.text()).splitlines() if line.startswith("data: ")]
    assert payloads[-1] == "[DONE]"
    return [json.loads(payload) for payload in payloads[:-1]]


def text_of(chunks: list[Any]) -> str:
    return "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c.get("choices"))


async def test_a_whole_answer(ports: Ports) -> None:
    response = await chat(ports)
    body = await response.json()
    live = ports.coordinator.state().live
    assert live is not None
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "hello", "refusal": None}
    assert body["choices"][0]["finish_reason"] == "length"
    prompt = len("user:hi;>")
    assert body["usage"] == {"prompt_tokens": prompt, "completion_tokens": 5, "total_tokens": prompt + 5}
    assert response.headers["x-modelswap-version"] == "1.0"
    assert response.headers["x-modelswap-digest"] == live.digest
    assert "modelswap" not in body
    assert body["system_fingerprint"] == f"fp_{live.digest[7:19]}"


async def test_a_stream_with_usage(ports: Ports) -> None:
    response = await chat(ports, stream=True, stream_options={"include_usage": True})
    chunks = await events(response)
    assert response.headers["x-modelswap-version"] == "1.0"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": "h"}
    assert text_of(chunks) == "hello"
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 5
    assert len({chunk["id"] for chunk in chunks}) == 1


async def test_completions_take_text_and_tokens(ports: Ports) -> None:
    for prompt in ("ab", ["ab"], [1, 2], [[1, 2]]):
        body = {"model": MODEL, "prompt": prompt, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": 1}
        response = await ports.data.post("/v1/completions", json=body)
        answer = await response.json()
        assert answer["choices"][0]["text"] == "hello"
        assert answer["usage"]["prompt_tokens"] == 2
    order = ports.backend.asked[-1]
    assert (order.sampling.temperature, order.sampling.top_p, order.sampling.top_k, order.sampling.seed) == (
        0.5, 0.9, 5, 1,
    )  # fmt: skip
    assert order.max_new_tokens == 16
    assert order.eos == (0,)


async def test_characters_are_never_torn(ports: Ports) -> None:
    ports.backend.script = Script(["grüße 🙂!".encode()])
    chunks = await events(await chat(ports, stream=True))
    assert text_of(chunks) == "grüße 🙂!"
    assert not any("\ufffd" in json.dumps(chunk, ensure_ascii=False) for chunk in chunks)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_the_answer_and_the_generation(ports: Ports, stream: bool) -> None:
    ports.backend.script = Script([b"one two STOP three"])
    response = await chat(ports, stop=["STOP"], stream=stream)
    if stream:
        chunks = await events(response)
        text, finish = text_of(chunks), chunks[-1]["choices"][0]["finish_reason"]
    else:
        choice = (await response.json())["choices"][0]
        text, finish = choice["message"]["content"], choice["finish_reason"]
    assert (text, finish) == ("one two ", "stop")
    assert ports.backend.aborted == [ports.backend.asked[-1].request_id]
    assert ports.backend.running() == 0


async def test_models(ports: Ports) -> None:
    listed = await (await ports.data.get("/v1/models")).json()
    assert [entry["id"] for entry in listed["data"]] == [MODEL]
    assert (await (await ports.data.get(f"/v1/models/{MODEL}")).json())["version"] == "1.0"
    assert (await ports.data.get("/v1/models/other")).status == 404
    assert (await ports.data.get("/health")).status == 200


@pytest.mark.parametrize(
    ("fields", "status", "code", "param"),
    [
        ({"model": "other"}, 404, "model_not_found", "model"),
        ({"n": 0}, 400, "invalid_value", "n"),
        ({"n": 17}, 400, "invalid_value", "n"),
        ({"n": 2, "best_of": 3}, 400, "unsupported_parameter", "best_of"),
        ({"messages": []}, 400, "invalid_value", "messages"),
        ({"temperature": 3}, 400, "invalid_value", "temperature"),
        ({"max_tokens": CONTEXT}, 400, "context_length_exceeded", "messages"),
        ({"messages": [{"role": "user", "content": "x" * 100}]}, 400, "context_length_exceeded", "messages"),
        ({"max_tokens": "many"}, 400, "BadRequest", None),
        ({"messages": "hello"}, 400, "BadRequest", None),
    ],
)
async def test_bad_requests_get_openai_errors(
    ports: Ports, fields: dict[str, Any], status: int, code: str, param: str | None
) -> None:
    for stream in (False, True):
        response = await chat(ports, stream=stream, **fields)
        error = (await response.json())["error"]
        assert (response.status, error["code"], error.get("param")) == (status, code, param), error
        assert error["type"] == "invalid_request_error"
        assert error["message"]
    assert not ports.backend.asked


async def test_echo_is_refused_by_name(ports: Ports) -> None:
    response = await ports.data.post("/v1/completions", json={"model": MODEL, "prompt": "a", "echo": True})
    assert (await response.json())["error"]["param"] == "echo"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b"9" * 100_000, b'"x"'])
@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
async def test_what_is_no_request_is_a_bad_one(ports: Ports, body: bytes, route: str) -> None:
    response = await ports.data.post(route, data=body)
    assert response.status == 400
    assert "error" in await response.json()


async def test_unknown_routes_and_methods_and_sizes_are_typed(ports: Ports) -> None:
    for method, route, status in (
        ("GET", "/nothing", 404),
        ("GET", "/v1/completions", 405),
        ("POST", "/modelswap/v1/swaps", 404),
    ):
        response = await ports.data.request(method, route)
        assert response.status == status
        assert (await response.json())["error"]["message"]
    response = await ports.data.post("/v1/completions", data=b" " * (9 * 1024 * 1024))
    assert (response.status, (await response.json())["error"]["code"]) == (413, "TooLarge")


@pytest.mark.parametrize("finish", [FinishReason.ABORT, FinishReason.ERROR])
async def test_an_answer_the_engine_ends_is_a_retryable_error(ports: Ports, finish: FinishReason) -> None:
    ports.backend.script = Script([b"hel"], finish=finish, error="the worker is gone")
    whole = await chat(ports)
    error = (await whole.json())["error"]
    assert (whole.status, error["code"], error["retryable"]) == (503, "interrupted", True)
    assert whole.headers["Retry-After"] == "1"
    chunks = await events(await chat(ports, stream=True))
    assert text_of(chunks) == "hel"
    assert chunks[-1]["error"]["code"] == "interrupted"
    assert chunks[-1]["error"]["retryable"] is True
    assert "worker is gone" in chunks[-1]["error"]["message"]


async def test_before_the_first_token_an_error_is_a_plain_status(ports: Ports) -> None:
    ports.backend.script = Script([], finish=FinishReason.ERROR, error="x")
    response = await chat(ports, stream=True)
    assert response.status == 503
    ports.backend.script = Script(refuses=WorkerLost("the worker is gone"))
    response = await chat(ports, stream=True)
    assert (response.status, (await response.json())["error"]["code"]) == (503, "WorkerLost")


@pytest.mark.parametrize("items", [[], [b"hel"]], ids=["before", "within"])
async def test_a_defect_is_a_reference_and_no_traceback(ports: Ports, items: list[bytes]) -> None:
    ports.backend.script = Script(list(items), raises=RuntimeError("secret detail"))
    for stream in (False, True):
        with capture_logs() as logs:
            response = await chat(ports, stream=stream)
            text = await response.text()
        (entry,) = logs
        assert entry["reference"] in text
        assert "secret detail" in str(entry["exc_info"])
        assert "secret" not in text
        assert "Traceback" not in text
        assert response.status == (200 if stream and items else 500)


async def test_a_stream_without_an_end_is_an_error(ports: Ports) -> None:
    ports.backend.script = Script([b"hel"], finish=None)
    assert (await events(await chat(ports, stream=True)))[-1]["error"]["code"] == "interrupted"


async def test_a_client_that_goes_away_ends_the_generation(ports: Ports) -> None:
    for stream in (True, False):
        never = asyncio.Event()
        reached = asyncio.Event()

        async def hold(reached: asyncio.Event = reached, never: asyncio.Event = never) -> None:
            reached.set()
            await never.wait()

        ports.backend.script = Script([b"x", hold])
        request = asyncio.create_task(chat(ports, stream=stream))
        await reached.wait()
        if stream:
            (await request).close()
        else:
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)
        while not ports.backend.streams[-1].closed or ports.coordinator.state().gate.in_flight:
            await asyncio.sleep(0.01)
        assert ports.backend.aborted[-1] == ports.backend.asked[-1].request_id


async def test_a_client_may_demand_a_version(ports: Ports) -> None:
    live = ports.coordinator.state().live
    assert live is not None
    for wanted in ("1.0", live.digest):
        assert (await chat(ports, headers={"x-modelswap-require-version": wanted})).status == 200
    response = await chat(ports, headers={"x-modelswap-require-version": "1.1"})
    error = (await response.json())["error"]
    assert (response.status, error["code"], error["retryable"]) == (409, "version_mismatch", True)


async def swapped_within(ports: Ports) -> Script:
    """Return an answer in whose middle version 1.1 becomes live."""
    target = ports.publish("1.1", norm=b"N" * 2)

    async def swap() -> None:
        status = await ports.swap(target, "op-1", traffic=Traffic(mode=TrafficMode.RECOMPUTE))
        assert status.state is SwapState.SERVING, status.error

    return Script([b"old", swap, b"newer"])


@pytest.mark.parametrize("stream", [False, True])
async def test_a_mixed_answer_says_who_made_what(ports: Ports, stream: bool) -> None:
    old = ports.coordinator.state().live
    ports.backend.script = await swapped_within(ports)
    response = await chat(ports, stream=stream)
    if stream:
        chunks = await events(response)
        assert text_of(chunks) == "oldnewer"
        assert not any("modelswap" in chunk for chunk in chunks[:-1])
        spans = chunks[-1]["modelswap"]["spans"]
        assert response.headers["x-modelswap-version"] == "1.0"
    else:
        body = await response.json()
        spans = body["modelswap"]["spans"]
        assert response.headers["x-modelswap-version"] == "1.1"
    new = ports.coordinator.state().live
    assert old is not None
    assert new is not None
    assert spans == [
        {"version": "1.0", "digest": old.digest, "tokens": 3},
        {"version": "1.1", "digest": new.digest, "tokens": 5},
    ]


async def test_who_demanded_a_version_gets_no_mixed_answer(ports: Ports) -> None:
    ports.backend.script = await swapped_within(ports)
    chunks = await events(await chat(ports, stream=True, headers={"x-modelswap-require-version": "1.0"}))
    assert text_of(chunks) == "old"
    assert chunks[-1]["error"]["code"] == "version_mismatch"


async def test_a_strange_label_breaks_no_header(ports: Ports) -> None:
    target = ports.publish("1.1", norm=b"N" * 2)
    odd = VersionRef(version="1.1\r\nx-evil: ü\x00", uri=target.uri, digest=target.digest)
    assert (await ports.swap(odd, "op-1")).state is SwapState.SERVING
    for stream in (False, True):
        response = await chat(ports, stream=stream)
        assert response.status == 200
        assert response.headers["x-modelswap-version"] == "1.1??x-evil: ??"
        assert "x-evil" not in response.headers
        await response.read()


async def test_requests_wait_at_the_gate_and_too_many_are_told_when_to_come_back(ports: Ports) -> None:
    await ports.coordinator.leases.take(PauseRequest(lease_id="test", seconds=30))
    waiting = [asyncio.create_task(chat(ports)) for _ in range(4)]
    while ports.coordinator.state().gate.queued < 4:
        await asyncio.sleep(0.01)
    response = await chat(ports)
    assert (response.status, (await response.json())["error"]["code"]) == (503, "paused")
    assert int(response.headers["Retry-After"]) >= 1
    ports.coordinator._core.gate.end_lease("test", owner="")
    assert [answer.status for answer in await asyncio.gather(*waiting)] == [200] * 4


async def test_places_inside_are_bounded(ports: Ports) -> None:
    release = asyncio.Event()
    ports.backend.script = Script([release.wait, b"x"])
    inside = [asyncio.create_task(chat(ports)) for _ in range(MAX_REQUESTS)]
    while len(ports.backend.asked) < MAX_REQUESTS:
        await asyncio.sleep(0.01)
    response = await chat(ports)
    assert (response.status, (await response.json())["error"]["code"]) == (503, "overloaded")
    assert response.headers["Retry-After"] == "1"
    release.set()
    assert {answer.status for answer in await asyncio.gather(*inside)} == {200}
    assert (await chat(ports)).status == 200


async def test_while_it_leaves_connections_are_closed(ports: Ports) -> None:
    draining = asyncio.create_task(ports.coordinator.drain(5))
    await asyncio.sleep(0)
    response = await chat(ports)
    assert response.headers.get("Connection") == "close"
    await draining
    response = await chat(ports)
    assert (response.status, (await response.json())["error"]["code"]) == (503, "NotReady")
    assert (await ports.control.get("/livez")).status == 200
    assert (await ports.control.get("/readyz")).status == 503


async def test_the_state_tells_how_the_requests_of_each_version_ended(ports: Ports) -> None:
    async def answers() -> list[AnswerCount] | None:
        async with ports.control.get("/modelswap/v1/state") as response:
            return decode(await response.read(), EngineState).answers

    live = ports.coordinator.state().live
    assert live is not None
    assert await answers() == []
    await (await chat(ports)).read()
    await (await chat(ports, model="other")).read()  # never let in
    ports.backend.script = Script([b"x"], finish=FinishReason.ERROR)
    await (await chat(ports, stream=True)).read()
    await (await chat(ports, max_tokens=1000)).read()
    assert await answers() == [AnswerCount(digest=live.digest, answered=1, failed=1, rejected=1)]


async def test_requests_are_counted_by_version_and_outcome(ports: Ports) -> None:
    await (await chat(ports)).read()
    await (await chat(ports, model="other")).read()
    ports.backend.script = Script([b"x"], finish=FinishReason.ERROR)
    await (await chat(ports, stream=True)).read()
    await (await chat(ports, max_tokens=1000)).read()
    text = await (await ports.control.get("/metrics")).text()
    for line in (
        'modelswap_requests_total{outcome="ok",version="1.0"} 1.0',
        'modelswap_requests_total{outcome="failed",version="1.0"} 1.0',
        'modelswap_requests_total{outcome="rejected",version="1.0"} 1.0',
        'modelswap_time_to_first_token_seconds_count{version="1.0"} 2.0',
        'modelswap_gate_wait_seconds_count{version="1.0"} 3.0',
        "modelswap_http_requests_in_flight 0.0",
    ):
        assert line in text


async def test_a_prompt_is_not_run_on_a_version_that_did_not_tokenize_it(ports: Ports) -> None:
    inside, go_on = threading.Event(), threading.Event()
    model = ports.resources.of(ports.template.digest)

    class Slow:
        def __getattr__(self, name: str) -> Any:
            return getattr(model.tokenizer, name)

        def encode(self, text: str, *, add_special_tokens: bool) -> object:
            inside.set()
            assert go_on.wait(20)
            return model.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    ports.resources._models[ports.template.digest] = dataclasses.replace(model, tokenizer=Slow())  # type: ignore[arg-type]
    asking = asyncio.create_task(chat(ports))
    await asyncio.to_thread(inside.wait, 20)
    ports.sources.errors[ports.template.uri] = SourceUnreadable("the volume is away")
    ports.backend.kill()
    while ports.coordinator.live is not None:
        await asyncio.sleep(0.01)
    other = ports.publish("1.1", norm=b"N" * 2)
    assert (await ports.swap(other, "op-1")).state is SwapState.SERVING
    go_on.set()
    response = await asking
    assert (response.status, (await response.json())["error"]["code"]) == (503, "NotReady")
    assert ports.backend.asked == []
    assert (await chat(ports)).status == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_from_weights_that_failed_their_hash_is_ended(ports: Ports, stream: bool) -> None:
    async def damage() -> None:
        ports.backend.live["norm"] = b"!!"
        assert not (await ports.coordinator.check(CheckRequest())).ok

    ports.backend.script = Script([b"good", damage, b"bad"])
    response = await chat(ports, stream=stream)
    if stream:
        chunks = await events(response)
        assert text_of(chunks) == "good"
        error = chunks[-1]["error"]
    else:
        assert response.status == 503
        error = (await response.json())["error"]
    assert error["retryable"] is True
    assert ports.backend.aborted


async def test_a_quarantined_process_asks_to_be_restarted_and_readiness_tells_no_details(tmp_path: Path) -> None:
    async with open_ports(tmp_path, repair_attempts=0) as ports:
        ports.backend.live["norm"] = b"!!"
        await ports.coordinator.check(CheckRequest())
        assert (await ports.control.get("/livez")).status == 503
        ready = await ports.control.get("/readyz")
        assert (ready.status, await ready.text()) == (503, "not ready: Quarantined\n")
        for restart, status in ((EngineRestart.NEVER, 200), (EngineRestart.ALLOWED, 503), (None, 503)):
            ports.assigned = Assignment(owner_uid="owner", engine_restart=restart)
            assert (await ports.control.get("/livez")).status == status
        assert (await ports.swap(ports.publish("1.1", norm=b"N" * 2), "op-1")).state is SwapState.SERVING
        assert (await ports.control.get("/livez")).status == 200
        await ports.coordinator.leases.take(PauseRequest(lease_id="a", seconds=30))
        assert (await ports.control.get("/livez")).status == 200


async def test_requests_wait_until_damaged_tensors_are_repaired(ports: Ports) -> None:
    ports.backend.live["norm"] = b"!!"
    ports.backend.faults["stage"] = Fault.ERROR  # the first attempt fails, or it would be over before anybody looked
    metrics = await (await ports.control.get("/metrics")).text()
    assert "modelswap_repairs 0.0" in metrics
    await ports.coordinator.check(CheckRequest())
    ready = await ports.control.get("/readyz")
    assert (ready.status, await ready.text()) == (503, "not ready: Drifted\n")
    assert (await ports.control.get("/livez")).status == 200
    assert (await chat(ports)).status == 200
    assert (await ports.control.get("/readyz")).status == 200
    metrics = await (await ports.control.get("/metrics")).text()
    assert "modelswap_repairs 1.0" in metrics
    assert "modelswap_drifted_tensors 0.0" in metrics
    assert "modelswap_cold_restart_advised 0.0" in metrics
