"""Calls that vLLM passes on to all its ranks, one at a time.

Once one of them has failed, answers to later ones may belong to it: then nobody is asked any more before the engine has
been started again.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from modelswap_engine.backends.vllm.client import VllmClient, bounded, said
from modelswap_engine.protocol.errors import BadRequest, NotReady, WorkerLost

T = TypeVar("T")


class RankCalls:
    """The ranks of one vLLM server.

    Args:
        client: leads there.

    Attributes:
        count: how many there are.
    """

    def __init__(self, client: VllmClient) -> None:
        self.count = 1
        self._client = client
        self._calling = asyncio.Lock()
        self._mixed_up = False

    def started_again(self) -> None:
        """No rank remembers an earlier call."""
        self._mixed_up = False

    def mixed_up(
        self, why: str, *, advice: str = "restart the engine: later answers may belong to this call"
    ) -> WorkerLost:
        """Ask no rank any more, and return the error that says why."""
        self._mixed_up = True
        return WorkerLost(why, advice=advice)

    async def collective(self, call: dict[str, Any], *, seconds: float) -> list[object]:
        """Call a method of every worker, and return their results in order.

        Raises:
            NotReady, WorkerLost: not all of them answered, or an earlier call was left without its answers.
        """
        answer = await self.ask("/collective_rpc", {**call, "timeout": seconds}, seconds=seconds)
        results = answer.get("results")
        return results if isinstance(results, list) else []

    async def ask(self, path: str, body: dict[str, Any], *, seconds: float) -> dict[str, Any]:
        """Post to a route that asks all ranks, and return its answer; raises as :meth:`collective` does."""
        return await self._to_its_end(self._answer(path, body, seconds=seconds))

    async def _answer(self, path: str, body: dict[str, Any], *, seconds: float) -> dict[str, Any]:
        async with self._alone():
            try:
                async with bounded("calling all ranks", seconds):
                    return await self._client.ask("POST", path, json=body)
            except (NotReady, BadRequest):
                raise
            except BaseException:
                self._mixed_up = True
                raise

    async def request(self, verb: str, path: str, *, seconds: float, **options: Any) -> tuple[int, str]:
        """Make a request that vLLM itself turns into a call to all ranks; return its status and text.

        Raises:
            NotReady, WorkerLost: as :meth:`collective`; also where one of several refused, for the others' answers
                stay behind.
        """
        return await self._to_its_end(self._request(verb, path, seconds=seconds, **options))

    async def _request(self, verb: str, path: str, *, seconds: float, **options: Any) -> tuple[int, str]:
        async with self._alone():
            try:
                async with bounded(f"{verb} {path}", seconds):
                    status, text = await self._client.send(verb, path, **options)
            except NotReady:
                raise
            except BaseException:
                self._mixed_up = True
                raise
            if status not in {200, 400} and self.count > 1:
                raise self.mixed_up(
                    f"a rank of {self.count} refused {verb} {path}: {said(text)}", advice="restart the engine"
                )
            return status, text

    async def _to_its_end(self, call: Coroutine[Any, Any, T]) -> T:
        """Have a call to the ranks answered also where whoever waits for it gives up, as a check does for a swap.

        A call that is broken off leaves answers behind, and costs a restart of the engine.
        """
        return await asyncio.shield(self._client.in_background(call))

    @contextlib.asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        async with self._calling:
            if self._mixed_up:
                raise WorkerLost(
                    "an earlier call to vLLM's ranks failed; answers to later ones may belong to it",
                    advice="restart the engine",
                )
            yield
