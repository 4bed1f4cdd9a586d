"""Several answers to one prompt, and that everything a request holds is given back once, however it ends."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import openai
import pytest
from aiohttp import ClientConnectionError, ClientResponse

from modelswap_engine.backends.port import FinishReason
from modelswap_engine.protocol.errors import NotReady
from modelswap_engine.protocol.version import CONTROL_PREFIX
from tests.support.ports import MAX_REQUESTS, MODEL, POD, Ports
from tests.support.scripted_backend import Script


async def chat(ports: Ports, *, model: str = MODEL, **fields: Any) -> ClientResponse:
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 20, **fields}
    return await ports.data.post("/v1/chat/completions", json=body)


async def events(response: ClientResponse) -> list[dict[str, Any]]:
    lines = [line[6:] for line in (await response.text()).splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def test_as_many_answers_as_asked_for_in_one_body(ports: Ports) -> None:
    body = await (await chat(ports, n=3, seed=7)).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert {choice["message"]["content"] for choice in body["choices"]} == {"hello"}
    assert {choice["finish_reason"] for choice in body["choices"]} == {"length"}
    assert body["usage"]["completion_tokens"] == 15
    # One prompt, counted once; each answer is a request of its own to the engine, and draws from a seed of its own.
    assert body["usage"]["prompt_tokens"] == len(ports.backend.asked[0].prompt)
    assert len({order.prompt for order in ports.backend.asked}) == 1
    assert len({order.request_id for order in ports.backend.asked}) == 3
    assert [order.sampling.seed for order in ports.backend.asked] == [7, 8, 9]


async def test_as_many_answers_in_one_stream(ports: Ports) -> None:
    chunks = await events(await chat(ports, n=2, stream=True, stream_options={"include_usage": True}))
    pieces = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    for index in (0, 1):
        own = [piece for piece in pieces if piece["index"] == index]
        assert own[0]["delta"]["role"] == "assistant"
        assert not any("role" in piece["delta"] for piece in own[1:])
        assert "".join(piece["delta"].get("content", "") for piece in own) == "hello"
        assert [piece["finish_reason"] for piece in own if piece["finish_reason"]] == ["length"]
    assert chunks[-1]["usage"]["completion_tokens"] == 10
    assert len({chunk["id"] for chunk in chunks}) == 1


async def test_the_official_client_reads_them(ports: Ports) -> None:
    async with openai.AsyncOpenAI(base_url=f"{ports.data_url}/v1", api_key="unused", max_retries=0) as client:
        answer = await client.completions.create(model=MODEL, prompt="a", n=2)
        assert [choice.text for choice in answer.choices] == ["hello", "hello"]


async def test_each_answer_takes_a_place(ports: Ports) -> None:
    response = await chat(ports, n=MAX_REQUESTS + 1)
    assert (response.status, (await response.json())["error"]["code"]) == (503, "overloaded")
    assert ports.backend.asked == []
    assert (await chat(ports, n=MAX_REQUESTS)).status == 200


Path = Callable[[Ports, dict[str, Any]], Awaitable[None]]


async def to_the_end(ports: Ports, fields: dict[str, Any]) -> None:
    await (await chat(ports, **fields)).read()


async def an_error_of_the_engine(ports: Ports, fields: dict[str, Any]) -> None:
    ports.backend.script = Script([b"he"], finish=FinishReason.ERROR, error="broken")
    await (await chat(ports, **fields)).read()


async def ended_by_a_mode(ports: Ports, fields: dict[str, Any]) -> None:
    ports.backend.script = Script([b"he"], finish=FinishReason.ABORT, error="the model version changed")
    await (await chat(ports, **fields)).read()


async def refused_by_the_engine(ports: Ports, fields: dict[str, Any]) -> None:
    ports.backend.script = Script(refuses=NotReady("not now"))
    assert (await chat(ports, **fields)).status == 503


async def refused_at_the_last_answer(ports: Ports, fields: dict[str, Any]) -> None:
    ports.backend.refuse_after = fields.get("n", 1) - 1
    assert (await chat(ports, **fields)).status == 503


async def a_prompt_that_is_too_long(ports: Ports, fields: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": "x" * 500}]
    assert (await chat(ports, **fields, messages=messages)).status == 400


async def the_client_goes_away(ports: Ports, fields: dict[str, Any]) -> None:
    ports.backend.script = Script([b"he", asyncio.Event().wait])
    request = asyncio.create_task(chat(ports, **fields))
    while ports.backend.running() < fields.get("n", 1):
        await asyncio.sleep(0.01)
    if fields["stream"]:
        (await request).close()
    else:
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)


async def the_connection_breaks(ports: Ports, fields: dict[str, Any]) -> None:
    ports.backend.script = Script([b"x" * 60, asyncio.Event().wait])
    request = asyncio.create_task(chat(ports, **fields))
    while ports.backend.running() < fields.get("n", 1):
        await asyncio.sleep(0.01)
    assert ports.data.connector is not None
    await ports.data.connector.close()
    outcome = (await asyncio.gather(request, return_exceptions=True))[0]
    assert isinstance(outcome, ClientResponse | ClientConnectionError)


PATHS: list[Path] = [
    to_the_end, an_error_of_the_engine, ended_by_a_mode, refused_by_the_engine, refused_at_the_last_answer,
    a_prompt_that_is_too_long, the_client_goes_away, the_connection_breaks,
]  # fmt: skip


@pytest.mark.parametrize("way", PATHS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
async def test_all_is_given_back_once(ports: Ports, way: Path, number: int, stream: bool) -> None:
    uri = ports.opener.put("file:///adapters/one", "one")
    fence = {"podUid": POD, "ownerUid": "owner-1", "epoch": 1, "revision": 1}
    order = {"fence": fence, "source": {"name": "support", "uri": uri}}
    async with ports.control.post(f"{CONTROL_PREFIX}/adapters", json=order) as response:
        assert response.status == 200
    left: list[str] = []
    lock = ports.coordinator._core.lock
    enter = lock.enter

    async def watched(request_id: str = "") -> Any:
        reader = await enter(request_id)
        leave = reader.leave
        assert reader in lock.readers()

        class Watched:
            """Notes that the reader left while it was still inside."""

            def __getattr__(self, name: str) -> Any:
                return getattr(reader, name)

            def __setattr__(self, name: str, value: Any) -> None:
                setattr(reader, name, value)

            def leave(self) -> None:
                left.append(request_id if reader in lock.readers() else "left twice")
                leave()

        return Watched()

    lock.enter = watched
    await way(ports, {"model": "support", "n": number, "stream": stream})
    async with asyncio.timeout(20):
        while ports.coordinator.state().lock.readers or ports.backend.running():
            await asyncio.sleep(0.01)
    assert len(left) == 1
    assert left[0].startswith("chatcmpl-")
    assert all(stream.closed or stream.ended for stream in ports.backend.streams)
    assert len(ports.backend.aborted) == len(set(ports.backend.aborted))
    # The registry refuses to be given back what nobody took.
    adapters = ports.coordinator.state().adapters
    assert adapters is not None
    assert [adapter.references for adapter in adapters.adapters] == [0]
