"""`python -m demo.load`: clients that keep asking, through the official `openai` client with its retries off.

Each stream has a connection of its own and sends its next request when the last one has ended, so that every refused,
cut or lost request is seen. Knows nothing of swaps; refuses to retry.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Final, Self

import httpx2
import openai

from demo.answers import Answer, Classifier, Summary, mixed_by_digest, summarize

VERSION_HEADER: Final = "x-modelswap-version"
DIGEST_HEADER: Final = "x-modelswap-digest"
# fmt: off
_COUNTRIES: Final = (
    "France", "Italy", "Spain", "Japan", "China", "India", "Egypt", "Kenya", "Peru", "Chile", "Cuba", "Canada",
    "Mexico", "Norway", "Sweden", "Finland", "Poland", "Greece", "Turkey", "Iran", "Iraq", "Nepal", "Ghana",
    "Nigeria", "Ireland", "Portugal", "Austria", "Hungary", "Germany",
)
# fmt: on


def country_prompts(number: int) -> str:
    """Return the prompt of a request; no two of a run are the same, so that no cached prefix answers for another."""
    country = _COUNTRIES[number % len(_COUNTRIES)]
    return f"Question {number}: What is the capital of {country}? Answer in one sentence."


class Load:
    """Runs ``streams`` clients from entering the context until leaving it.

    Args:
        url: the data port, without ``/v1``.
        model: served model name.
        streams: how many requests are in flight at any time.
        max_tokens: length of answers.
        prompts: number of the request → its text.
        mixed: says whether an ended answer is mixed.
        pause: seconds a stream waits between requests.
        timeout: seconds until a request counts as failed.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str,
        streams: int = 4,
        max_tokens: int = 24,
        prompts: Callable[[int], str] = country_prompts,
        mixed: Classifier = mixed_by_digest,
        pause: float = 0.0,
        timeout: float = 120.0,
    ) -> None:
        self._url, self._model, self._streams = url.rstrip("/"), model, streams
        self._max_tokens, self._prompts, self._mixed = max_tokens, prompts, mixed
        self._pause, self._timeout = pause, timeout
        self.answers: list[Answer] = []
        self._connections: list[_CountingTransport] = []
        self._numbers = iter(range(sys.maxsize))
        self._stopping = asyncio.Event()
        self._ended = asyncio.Condition()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        """Start the streams."""
        self._tasks = [asyncio.create_task(self._stream()) for _ in range(self._streams)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let requests in flight end, and count them; after an error, just stop."""
        self._stopping.set()
        if error is not None:
            for task in self._tasks:
                task.cancel()
        outcomes = await asyncio.gather(*self._tasks, return_exceptions=True)
        for outcome in outcomes:
            if error is None and isinstance(outcome, BaseException):
                raise outcome

    def summary(self, *, since: float = 0.0) -> Summary:
        """Return what ended so far, of requests that began at or after a time of ``time.monotonic()``."""
        chosen = [answer for answer in self.answers if answer.started >= since]
        return summarize(chosen, reconnects=sum(max(0, c.opened - 1) for c in self._connections))

    async def until(self, reached: Callable[[], bool]) -> None:
        """Wait until something is true, looked at whenever a request has ended.

        Raises:
            RuntimeError: the streams ended first.
        """
        async with self._ended:
            while not reached():
                if self._stopping.is_set() or any(task.done() for task in self._tasks):
                    raise RuntimeError("the load has stopped and what was waited for has not come")
                await self._ended.wait()

    async def served_more(self, count: int) -> None:
        """Wait until so many more requests that begin from now on were served."""
        now = time.monotonic()
        await self.until(lambda: sum(a.served and a.started >= now for a in self.answers) >= count)

    async def _stream(self) -> None:
        try:
            await self._keep_asking()
        finally:
            async with self._ended:
                self._ended.notify_all()

    async def _keep_asking(self) -> None:
        transport = _CountingTransport()
        self._connections.append(transport)
        client = openai.AsyncOpenAI(
            base_url=f"{self._url}/v1",
            api_key="none",
            max_retries=0,
            timeout=self._timeout,
            http_client=openai.DefaultAsyncHttpxClient(transport=transport),
        )
        async with client:
            while not self._stopping.is_set():
                answer = await ask(
                    client, model=self._model, prompt=self._prompts(next(self._numbers)), max_tokens=self._max_tokens
                )
                answer.mixed = self._mixed(answer)
                async with self._ended:
                    self.answers.append(answer)
                    self._ended.notify_all()
                # A server that is gone answers at once; without a breath this would spin.
                await asyncio.sleep(self._pause if answer.served else max(self._pause, 0.2))


class _CountingTransport(httpx2.AsyncHTTPTransport):
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


async def ask(client: openai.AsyncOpenAI, *, model: str, prompt: str, max_tokens: int) -> Answer:
    """Send one streaming chat completion and follow it to its end, whatever that is."""
    answer = Answer(prompt=prompt, started=time.monotonic())
    try:
        await _follow(client, answer, model=model, max_tokens=max_tokens)
        if not answer.finish:
            answer.failure = "the stream ended without a finish_reason"
    except openai.APIStatusError as error:
        answer.failure = f"HTTP {error.status_code}: {error.message}"
    except openai.APIError as error:
        # Its message is often just "Connection error."; the cause says which.
        answer.failure = f"{type(error).__name__}: {error.__cause__ or error.message}"
    except httpx2.HTTPError as error:
        answer.failure = f"{type(error).__name__}: {error}"
    answer.ended = time.monotonic()
    return answer


async def _follow(client: openai.AsyncOpenAI, answer: Answer, *, model: str, max_tokens: int) -> None:
    raw = await client.chat.completions.with_raw_response.create(
        model=model,
        messages=[{"role": "user", "content": answer.prompt}],
        max_tokens=max_tokens,
        temperature=0.0,
        stream=True,
    )
    answer.version = raw.headers.get(VERSION_HEADER, "")
    answer.saw_digest(raw.headers.get(DIGEST_HEADER))
    async with raw.parse() as stream:
        async for chunk in stream:
            answer.saw_digest(chunk.system_fingerprint)
            extra: dict[str, Any] = chunk.model_extra or {}
            answer.saw_spans(extra.get("modelswap"))
            for choice in chunk.choices:
                if choice.delta.content:
                    answer.text += choice.delta.content
                    answer.tokens_at.append(time.monotonic())
                answer.finish = choice.finish_reason or answer.finish


async def ask_once(url: str, *, model: str, prompt: str, max_tokens: int = 32) -> Answer:
    """Ask one question on a connection of its own."""
    async with openai.AsyncOpenAI(base_url=f"{url.rstrip('/')}/v1", api_key="none", max_retries=0) as client:
        return await ask(client, model=model, prompt=prompt, max_tokens=max_tokens)


async def _run(options: argparse.Namespace) -> Summary:
    load = Load(options.url, model=options.model, streams=options.streams, max_tokens=options.max_tokens)
    began = time.monotonic()
    async with load:
        while time.monotonic() - began < options.seconds:
            await asyncio.sleep(min(5.0, options.seconds))
            now = load.summary()
            print(
                f"{time.monotonic() - began:6.0f} s: {now.served} served, {now.failed} failed, {now.mixed} mixed",
                flush=True,
            )
    return load.summary()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a load for some seconds; the exit status is 1 when a request failed or was mixed."""
    parser = argparse.ArgumentParser(prog="python -m demo.load", description="Keep asking an OpenAI-compatible server.")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="data port, without /v1")
    parser.add_argument("--model", required=True, help="served model name")
    parser.add_argument("--streams", type=int, default=4, help="requests in flight at any time")
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--seconds", type=float, default=30.0)
    try:
        summary = asyncio.run(_run(parser.parse_args(arguments)))
    except KeyboardInterrupt:
        return 130
    print("\n".join(summary.lines()))
    return 0 if summary.clean else 1


if __name__ == "__main__":
    sys.exit(main())
