"""Requests to one vLLM server, and what its answers and its silence mean; which routes there are is not known here."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Coroutine
from typing import Any, Final, TypeVar

import aiohttp

from modelswap_engine.protocol.errors import BadRequest, NotReady, WorkerLost

T = TypeVar("T")

_UNBOUNDED: Final = aiohttp.ClientTimeout(total=None)
"""The caller bounds a request. A limit of the session's would end long loads; and where it is over in the moment of a
cancellation, aiohttp tells of the one, and swallows the other."""

DEVELOPMENT: Final = "start vLLM with VLLM_SERVER_DEV_MODE=1, on a loopback address"


class VllmClient:
    """One vLLM server.

    Args:
        url: where it listens.
        session: used for all requests, and by nobody else; closed with the client.

    Attributes:
        away: True once it could not be reached; whoever has learnt why may say otherwise.
    """

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.away = False
        self._url = url.rstrip("/")
        self._session = session
        self._under_way: set[asyncio.Future[Any]] = set()

    async def send(self, verb: str, path: str, **options: Any) -> tuple[int, str]:
        """Make one request, and return its status and text; the caller bounds it."""
        # A connection that was kept may be closed just as it is used again; then nobody knows whether the call arrived.
        options |= {"headers": {"Connection": "close"}, "timeout": _UNBOUNDED}
        try:
            async with self._session.request(verb, f"{self._url}{path}", **options) as answer:
                return answer.status, await answer.text()
        except aiohttp.ClientConnectorError as error:
            self.away = True
            raise NotReady(f"vLLM does not listen at {self._url}: {error}", advice="see the engine's log") from error
        except (aiohttp.ClientError, UnicodeDecodeError) as error:
            self.away = True
            raise WorkerLost(
                f"vLLM broke off {verb} {path}: {str(error) or type(error).__name__}", advice="see the engine's log"
            ) from error

    async def ask(self, verb: str, path: str, **options: Any) -> dict[str, Any]:
        """Make one request, and return the object that it is answered with; the caller bounds it.

        Raises:
            BadRequest: there is no such route, or it does not take this.
            NotReady, WorkerLost: there is no usable answer.
        """
        status, text = await self.send(verb, path, **options)
        if status in {400, 404, 405, 422}:
            raise BadRequest(f"vLLM refuses {verb} {path}: {status} {said(text)}", advice=DEVELOPMENT)
        if status != 200:
            raise WorkerLost(f"vLLM answers {verb} {path} with {status}: {said(text)}", advice="see the engine's log")
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        return found if isinstance(found, dict) else {}

    async def development(self, path: str, **params: str) -> dict[str, Any] | None:
        """Return the answer of a route that may not be there."""
        try:
            return await self.ask("GET", path, params=params)
        except BadRequest:
            return None

    async def text(self, path: str) -> str:
        """Return what a route says in plain text, "" where it does not answer."""
        status, text = await self.send("GET", path)
        return text if status == 200 else ""

    def in_background(self, call: Coroutine[Any, Any, T]) -> "asyncio.Future[T]":
        """Make a call that goes on when whoever waits for it gives up; the client's end is its end."""
        task = asyncio.ensure_future(call)
        self._under_way.add(task)
        task.add_done_callback(self._over)
        return task

    def _over(self, task: asyncio.Future[Any]) -> None:
        self._under_way.discard(task)
        if not task.cancelled():
            task.exception()  # looked at: nobody may be left who waits for it

    async def close(self) -> None:
        """Give up calls that nobody waits for any more, and close the session."""
        for task in self._under_way:
            task.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)
        await self._session.close()


@contextlib.asynccontextmanager
async def bounded(doing: str, seconds: float) -> AsyncIterator[None]:
    """Give several requests a time; to run out of it is to have no usable answer."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as late:
        raise WorkerLost(f"{doing}: vLLM gave no answer within {seconds:g} s", advice="see the engine's log") from late


def said(text: str) -> str:
    """Return what an error of vLLM's says, without what is around it."""
    try:
        return str(json.loads(text)["error"]["message"])[:300]
    except (ValueError, KeyError, TypeError):
        return text[:300]
