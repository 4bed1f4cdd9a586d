"""One answer of the engine on its way to the client: streamed as it comes, or whole.

A stream is never gathered: each event goes on when it is whole, and no more is read than the client takes. An answer
that is no stream is gathered up to a bound, so that what goes wrong meanwhile is a plain HTTP error.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final

from aiohttp import web

from modelswap_engine.http.errors import body_of, internal
from modelswap_engine.http.openai.errors import Interrupted
from modelswap_engine.http.openai.exchange import Outcome
from modelswap_engine.http.proxy.events import Cutter
from modelswap_engine.http.proxy.flights import Flight
from modelswap_engine.http.proxy.headers import to_client
from modelswap_engine.http.proxy.rewriting import Renamer
from modelswap_engine.http.proxy.upstream import Answer
from modelswap_engine.protocol.codec import encode
from modelswap_engine.protocol.errors import ErrorEnvelope, ModelswapError

_EVENTS: Final = "text/event-stream"
GATHERED: Final = 1 << 20
"""Bytes of an answer that is no stream which are held until it is whole; a larger one is passed on as it comes."""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """What is needed to pass one answer on.

    Attributes:
        flight: the request, while the engine has it.
        outcome: counts it.
        renamer: gives the model the client's name.
        headers: of ours, in the answer.
        trusted: asked before anything is passed on; says no once the engine's weights failed their hash.
        write_seconds: how long one write may wait for a client that does not read.
    """

    flight: Flight
    outcome: Outcome
    renamer: Renamer
    headers: Mapping[str, str]
    trusted: Callable[[], bool]
    write_seconds: float

    async def answer(self, request: web.Request, found: Answer) -> web.StreamResponse:
        """Pass the answer on."""
        self.outcome.answered(found.status)
        if found.headers.get("Content-Type", "").partition(";")[0].strip().lower() == _EVENTS:
            return await self._events(request, found)
        return await self._whole(request, found)

    async def _whole(self, request: web.Request, found: Answer) -> web.StreamResponse:
        gathered = bytearray()
        async with self.flight:
            while len(gathered) <= GATHERED:
                piece = await found.piece()
                gathered += self.renamer.feed(piece) if piece else self.renamer.finish()
                if not piece:
                    self._check()
                    return web.Response(status=found.status, headers=self._headers(found), body=bytes(gathered))
        return await self._large(request, found, bytes(gathered))

    async def _large(self, request: web.Request, found: Answer, begun: bytes) -> web.StreamResponse:
        response = web.StreamResponse(status=found.status, headers=self._headers(found))
        await response.prepare(request)
        try:
            async with self.flight:
                await self._write(request, response, begun)
                while piece := await found.piece():
                    await self._write(request, response, self.renamer.feed(piece))
                await self._write(request, response, self.renamer.finish())
        except ModelswapError as error:
            # A body of which the head is out has no place for an error but its missing end.
            self.outcome.failed(error)
            _break_off(request)
        return response

    async def _events(self, request: web.Request, found: Answer) -> web.StreamResponse:
        response = web.StreamResponse(status=found.status, headers=self._headers(found))
        await response.prepare(request)
        try:
            async with self.flight:
                await self._pass_on(request, response, found)
        except ModelswapError as error:
            await self._tell(request, response, error)
        except (ConnectionResetError, asyncio.CancelledError):
            raise
        except Exception as error:  # noqa: BLE001 - headers are out, so the error has to travel in the stream
            await self._tell(request, response, internal(error, where=request.path))
        await self._bounded(request, response.write_eof())
        return response

    async def _pass_on(self, request: web.Request, response: web.StreamResponse, found: Answer) -> None:
        cutter, first = Cutter(), True
        while piece := await found.piece():
            self._check()
            events = cutter.feed(piece)
            await self._write(request, response, self.renamer.feed(events))
            if first and events:
                self.outcome.first_token()
                first = False
        await self._write(request, response, self.renamer.feed(cutter.finish()) + self.renamer.finish())

    async def _tell(self, request: web.Request, response: web.StreamResponse, error: ModelswapError) -> None:
        self.outcome.failed(error)
        event = b"data: " + encode(ErrorEnvelope(error=body_of(error))) + b"\n\ndata: [DONE]\n\n"
        await self._write(request, response, event)

    def _check(self) -> None:
        if not self.trusted():
            raise Interrupted("the live weights are not those of the version they should be", advice="send it again")

    def _headers(self, found: Answer) -> Mapping[str, str]:
        headers = to_client(found.headers)
        headers.update(self.headers)
        return headers

    async def _write(self, request: web.Request, response: web.StreamResponse, data: bytes) -> None:
        if not data:
            return
        if _has_room(request.transport, len(data)):
            await response.write(data)  # waits for nobody, and a bound costs more than all of it
        else:
            await self._bounded(request, response.write(data))

    async def _bounded(self, request: web.Request, writing: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(self.write_seconds):
                await writing
        except TimeoutError:
            _break_off(request)
            raise ConnectionResetError("the client stopped reading") from None


def _has_room(transport: asyncio.Transport | None, size: int) -> bool:
    """Say whether a connection takes so many bytes and still lies below the mark at which writers go on."""
    if transport is None:
        return False
    low, _ = transport.get_write_buffer_limits()
    return transport.get_write_buffer_size() + size <= low


def _break_off(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()
