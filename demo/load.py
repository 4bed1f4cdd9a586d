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
from typing import Final, Self

from demo.answers import Answer, Classifier, Summary, mixed_by_digest, summarize
from demo.asking import TIMEOUT_SECONDS, CountingTransport, Question, ask, client_of

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
        ignore_eos: answers always have their full length.
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
        ignore_eos: bool = False,
        pause: float = 0.0,
        timeout: float = TIMEOUT_SECONDS,
    ) -> None:
        self._url, self._model, self._streams = url.rstrip("/"), model, streams
        self._max_tokens, self._prompts, self._mixed = max_tokens, prompts, mixed
        self._ignore_eos, self._pause, self._timeout = ignore_eos, pause, timeout
        self.answers: list[Answer] = []
        self._connections: list[CountingTransport] = []
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

    def _question(self, number: int) -> Question:
        return Question(
            model=self._model,
            prompt=self._prompts(number),
            max_tokens=self._max_tokens,
            ignore_eos=self._ignore_eos,
        )

    async def _stream(self) -> None:
        try:
            await self._keep_asking()
        finally:
            async with self._ended:
                self._ended.notify_all()

    async def _keep_asking(self) -> None:
        transport = CountingTransport()
        self._connections.append(transport)
        async with client_of(self._url, transport=transport, timeout=self._timeout) as client:
            while not self._stopping.is_set():
                answer = await ask(client, self._question(next(self._numbers)))
                answer.mixed = self._mixed(answer)
                async with self._ended:
                    self.answers.append(answer)
                    self._ended.notify_all()
                # A server that is gone answers at once; without a breath this would spin.
                await asyncio.sleep(self._pause if answer.served else max(self._pause, 0.2))


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
