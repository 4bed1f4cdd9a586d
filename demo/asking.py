"""One request and its answer, through the official `openai` client with its retries off.

Refuses to know why it is asked: a load, a demo and a test see the same answer.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any, Final

import httpx2
import openai

from demo.answers import Answer

VERSION_HEADER: Final = "x-modelswap-version"
DIGEST_HEADER: Final = "x-modelswap-digest"
TIMEOUT_SECONDS: Final = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A chat completion to ask for; with ``ignore_eos`` the answer has its full length, whatever the model says."""

    model: str
    prompt: str = "hello"
    max_tokens: int = 32
    ignore_eos: bool = False


class CountingTransport(httpx2.AsyncHTTPTransport):
    """HTTP over one connection at a time, counting how often it had to be opened."""

    def __init__(self) -> None:
        super().__init__(limits=httpx2.Limits(max_connections=1, max_keepalive_connections=1))
        self.opened = 0

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        request.extensions = {**request.extensions, "trace": self._trace}
        return await super().handle_async_request(request)

    async def _trace(self, event: str, _: object) -> None:
        if event == "connection.connect_tcp.complete":
            self.opened += 1


def client_of(url: str, *, transport: CountingTransport, timeout: float = TIMEOUT_SECONDS) -> openai.AsyncOpenAI:
    """Return a client of a data port (its URL without ``/v1``)."""
    return openai.AsyncOpenAI(
        base_url=f"{url.rstrip('/')}/v1",
        api_key="none",
        max_retries=0,
        timeout=timeout,
        http_client=openai.DefaultAsyncHttpxClient(transport=transport),
    )


async def ask(client: openai.AsyncOpenAI, question: Question, *, begun: asyncio.Event | None = None) -> Answer:
    """Stream an answer to its end, whatever that is; ``begun`` is set when its first text is there, or none will be."""
    answer = Answer(prompt=question.prompt, started=time.monotonic())
    try:
        await _follow(client, question, answer, begun)
        if not answer.finish:
            answer.failure = "the stream ended without a finish_reason"
    except openai.APIError as error:
        status = f"HTTP {error.status_code}" if isinstance(error, openai.APIStatusError) else type(error).__name__
        # The message of a lost connection is often just "Connection error."; the cause says which.
        answer.failure = f"{status}: {error.__cause__ or error.message}"
        answer.error = error.body if isinstance(error.body, dict) else {}
    except httpx2.HTTPError as error:
        answer.failure = f"{type(error).__name__}: {error}"
    answer.ended = time.monotonic()
    if begun is not None:
        begun.set()  # nobody may wait for the beginning of what has ended
    return answer


async def _follow(client: openai.AsyncOpenAI, question: Question, answer: Answer, begun: asyncio.Event | None) -> None:
    raw = await client.chat.completions.with_raw_response.create(
        model=question.model,
        messages=[{"role": "user", "content": question.prompt}],
        max_tokens=question.max_tokens,
        temperature=0.0,
        stream=True,
        extra_body={"ignore_eos": True} if question.ignore_eos else None,
    )
    answer.version = raw.headers.get(VERSION_HEADER, "")
    answer.saw_digest(raw.headers.get(DIGEST_HEADER))
    async with raw.parse() as stream:
        async for chunk in stream:
            answer.saw_fingerprint(chunk.system_fingerprint)
            extra: dict[str, Any] = chunk.model_extra or {}
            answer.saw_spans(extra.get("modelswap"))
            for choice in chunk.choices:
                if choice.delta.content:
                    answer.text += choice.delta.content
                    answer.tokens_at.append(time.monotonic())
                    if begun is not None:
                        begun.set()
                answer.finish = choice.finish_reason or answer.finish


async def ask_once(url: str, question: Question, *, begun: asyncio.Event | None = None) -> Answer:
    """Ask one question on a connection of its own."""
    async with client_of(url, transport=CountingTransport()) as client:
        return await ask(client, question, begun=begun)
