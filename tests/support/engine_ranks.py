"""Drives a swap inside a real engine from a test: the messages that the sidecar sends, over the engine's own routes."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import aiohttp

from modelswap_engine.backends.external.control import EngineControl
from modelswap_engine.backends.inprocess import wire
from modelswap_engine.backends.port import Stage
from tests.support.orders import digest_of, load_order, stage_order

SECONDS = 60.0
PROMPTS = ("one", "two words", "a third, longer prompt than the others", "4")
LONG = "the same beginning " * 18  # more than one block of vLLM's prefix cache
LongCall = wire.AdoptCall | wire.StageCall | wire.VerifyCall | wire.HashesCall


class Client:
    """Asks an engine's server as its users do, greedily."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session, self._url = session, url

    async def text(self, prompt: str, *, tokens: int = 24) -> str:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        async with self._session.post(f"{self._url}/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            return str((await answer.json())["choices"][0]["text"])

    async def ids(self, prompt: str, *, tokens: int = 24, model: str = "tiny") -> list[int]:
        """Return the tokens themselves, which vLLM tells when asked."""
        body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        async with self._session.post(f"{self._url}/v1/completions", json={**body, "return_token_ids": True}) as answer:
            assert answer.status == 200, await answer.text()
            return [int(token) for token in (await answer.json())["choices"][0]["token_ids"]]

    async def texts(self) -> list[str]:
        """Ask all prompts at once, which takes the steps of one."""
        return list(await asyncio.gather(*(self.text(prompt) for prompt in (*PROMPTS, LONG))))

    async def stream(self, prompt: str, *, tokens: int) -> AsyncGenerator[str, None]:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        async with self._session.post(f"{self._url}/v1/completions", json={**body, "stream": True}) as answer:
            assert answer.status == 200
            async for line in answer.content:
                data = line.decode().removeprefix("data: ").strip()
                if data and data != "[DONE]":
                    yield json.loads(data)["choices"][0]["text"]

    async def collect(self, prompt: str, *, tokens: int = 200) -> str:
        """Return a whole stream."""
        return "".join([piece async for piece in self.stream(prompt, tokens=tokens)])


class Ranks:
    """Our half in every rank of an engine."""

    def __init__(self, control: EngineControl) -> None:
        self.control = control
        self._numbers = itertools.count(1)
        self._works = itertools.count(1)

    async def call(self, call: wire.Call) -> list[wire.Answer]:
        """Call all ranks; their answers are to this call, in their order."""
        number = next(self._numbers)
        texts = await self.control.call_all(wire.encode_call(number, call), seconds=SECONDS)
        answers = [wire.decode_answer(text) for text in texts]
        assert [answer.number for answer in answers] == [number] * len(answers)
        assert [answer.reply.rank for answer in answers] == list(range(len(answers)))
        return answers

    async def outcome(self, call: LongCall) -> list[wire.Answer]:
        """Make a long call and return its outcome."""
        answers = await self.call(call)
        while any(answer.running for answer in answers):
            await asyncio.sleep(0.01)  # the engine says it in no other way
            answers = await self.call(wire.ProgressCall(work=call.work))
        return answers

    def work(self) -> str:
        """Return an id that was not used."""
        return f"work-{next(self._works)}-{id(self)}"

    async def adopt(self, folder: Path) -> list[wire.Answer]:
        """Take over what the engine has loaded."""
        return await self.outcome(wire.AdoptCall(work=self.work(), order=load_order(folder)))

    async def groups(self) -> Sequence[Sequence[str]]:
        """Return the fusion groups."""
        layout = (await self.call(wire.LayoutCall()))[0].layout
        assert layout is not None
        return layout.groups

    async def stage(self, old: Path, new: Path, operation: str) -> list[wire.Answer]:
        """Stage what differs between two versions."""
        order = stage_order(old, new, operation_id=operation, groups=await self.groups())
        return await self.stage_this(order)

    async def stage_this(self, order: Stage) -> list[wire.Answer]:
        """Stage an order."""
        return await self.outcome(wire.StageCall(work=self.work(), order=order))

    async def exchange(self, operation: str, *, strict: bool = True) -> list[list[wire.Answer]]:
        """Prepare, commit and prove what is staged; the answers to each step."""
        return [
            await self.call(wire.PrepareCall(operation_id=operation)),
            await self.call(wire.CommitCall(operation_id=operation)),
            await self.verify(operation, strict=strict),
        ]

    async def verify(self, operation: str, *, strict: bool = True) -> list[wire.Answer]:
        """Prove what is live."""
        return await self.outcome(wire.VerifyCall(work=self.work(), operation_id=operation, strict=strict))


async def reload(control: EngineControl, folder: Path) -> None:
    """Have the engine load a version as it would do by itself: what a swap must be equal to."""
    await control.load_full(str(folder), digest_of(folder), seconds=SECONDS)
    assert await control.flush(seconds=SECONDS)


def good(answers: Sequence[wire.Answer]) -> wire.Answer:
    """Return the first of answers of which none is an error."""
    assert [answer.reply.error for answer in answers] == [None] * len(answers)
    return answers[0]


def codes(answers: Sequence[wire.Answer]) -> set[str]:
    """Return how ranks failed; "" where they did not."""
    return {answer.reply.error.code if answer.reply.error else "" for answer in answers}
