"""Clients that keep asking, and a judge of their answers.

The official `openai` client without retries: a request that fails has failed. Against the pair of models with
disjoint vocabularies (1.0 says lower-case letters only, 1.1 upper-case ones) mixing shows in the text.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import openai

VERSION_HEADER = "x-modelswap-version"


@dataclass
class Answer:
    """One answer as its client saw it."""

    text: str = ""
    version: str = ""
    finish: str | None = None
    error: str = ""
    error_body: dict[str, Any] = field(default_factory=dict)
    spans: list[dict[str, Any]] = field(default_factory=list)

    @property
    def makers(self) -> set[str]:
        """Versions that show in the text."""
        return {"1.0" if letter.islower() else "1.1" for letter in self.text if letter.isalpha()}

    @property
    def mixed(self) -> bool:
        """True when more than one version shows in the text."""
        return len(self.makers) > 1

    @property
    def honest(self) -> bool:
        """True when the answer says itself which versions made it."""
        return self.makers <= ({span["version"] for span in self.spans} if self.spans else {self.version})


async def ask(
    client: openai.AsyncOpenAI, *, tokens: int = 32, prompt: str = "hello", begun: asyncio.Event | None = None
) -> Answer:
    """Stream one chat completion; a failure is an answer too. ``begun`` is set when its first token is there."""
    answer = Answer()
    try:
        stream = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": prompt}],
            max_tokens=tokens,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        answer.version = stream.response.headers.get(VERSION_HEADER, "")
        async for chunk in stream:
            if begun is not None:
                begun.set()
            if chunk.choices:
                answer.text += chunk.choices[0].delta.content or ""
                answer.finish = chunk.choices[0].finish_reason or answer.finish
            extension = getattr(chunk, "modelswap", None)
            if extension:
                answer.spans = extension["spans"]
        if answer.finish is None:
            answer.error = "the stream ended without a finish reason"
    except openai.OpenAIError as error:
        answer.error = f"{type(error).__name__}: {error}"
        body = getattr(error, "body", None)
        answer.error_body = body if isinstance(body, dict) else {}
    return answer


@dataclass
class Load:
    """Several clients asking all the time."""

    answers: list[Answer] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def failed(self) -> list[Answer]:
        """Answers that failed."""
        return [answer for answer in self.answers if answer.error]

    @property
    def mixed(self) -> list[Answer]:
        """Answers in which more than one version shows."""
        return [answer for answer in self.answers if answer.mixed]

    async def more(self, count: int) -> None:
        """Return when so many more answers have come."""
        wanted = len(self.answers) + count
        while len(self.answers) < wanted:
            self.arrived.clear()
            await self.arrived.wait()


@contextlib.asynccontextmanager
async def load(base_url: str, *, clients: int = 4, tokens: int = 32) -> AsyncIterator[Load]:
    """Keep a load on a data port while the context lasts; requests in flight at the end are finished."""
    under_load = Load()
    async with openai.AsyncOpenAI(base_url=base_url, api_key="unused", max_retries=0, timeout=120) as client:
        ending = asyncio.Event()

        async def keep_asking(number: int) -> None:
            turn = 0
            while not ending.is_set():
                under_load.answers.append(await ask(client, tokens=tokens, prompt=f"client {number} turn {turn}"))
                under_load.arrived.set()
                turn += 1

        tasks = [asyncio.create_task(keep_asking(number)) for number in range(clients)]
        try:
            yield under_load
        finally:
            ending.set()
            await asyncio.gather(*tasks)
