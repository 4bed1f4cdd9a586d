"""The official client against the data port: what its users see, without retries."""

import openai
import pytest

from modelswap_engine.backends.port import FinishReason
from modelswap_engine.protocol.messages import PauseRequest
from tests.support.ports import MODEL, Ports
from tests.support.scripted_backend import Script

HELLO = [{"role": "user", "content": "hi"}]


def client_of(ports: Ports) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{ports.data_url}/v1", api_key="unused", max_retries=0)


async def test_chat_completions_and_models(ports: Ports) -> None:
    async with client_of(ports) as client:
        answer = await client.chat.completions.create(model=MODEL, messages=HELLO, max_completion_tokens=10)
        assert answer.choices[0].message.content == "hello"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 5
        completion = await client.completions.create(model=MODEL, prompt="a", max_tokens=10)
        assert completion.choices[0].text == "hello"
        assert [entry.id async for entry in client.models.list()] == [MODEL]


async def test_streams(ports: Ports) -> None:
    async with client_of(ports) as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "hello"
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.total_tokens > 5
        pieces = await client.completions.create(model=MODEL, prompt="a", stream=True)
        assert "".join([piece.choices[0].text async for piece in pieces]) == "hello"


async def test_errors_arrive_as_the_clients_own_types(ports: Ports) -> None:
    async with client_of(ports) as client:
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model="other", messages=HELLO)
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as long:
            await client.completions.create(model=MODEL, prompt="x" * 500)
        assert long.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError) as several:
            await client.completions.create(model=MODEL, prompt="x", best_of=2)
        assert several.value.param == "best_of"


async def test_an_error_within_a_stream_is_raised(ports: Ports) -> None:
    ports.backend.script = Script([b"hel"], finish=FinishReason.ABORT, error="the traffic mode says so")
    async with client_of(ports) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
        heard = [(await anext(stream)).choices[0].delta.content for _ in "hel"]
        with pytest.raises(openai.APIError, match="traffic mode"):
            await anext(stream)
        assert heard == ["h", "e", "l"]


async def test_a_full_gate_is_an_error_that_may_be_retried(ports: Ports) -> None:
    ports.coordinator._core.gate._max_queue = 0
    await ports.coordinator.leases.take(PauseRequest(lease_id="l", seconds=30))
    async with client_of(ports) as client:
        with pytest.raises(openai.InternalServerError) as paused:
            await client.chat.completions.create(model=MODEL, messages=HELLO)
        assert paused.value.code == "paused"
        assert paused.value.response.headers["Retry-After"] == "10"  # the lease may well be given back before its end
