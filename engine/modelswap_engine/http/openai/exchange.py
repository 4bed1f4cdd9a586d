"""One request and its answer on the wire: a whole body, or a stream of chunks.

Nothing is sent before the first token, so that whatever fails until then is a plain HTTP error; after that an error
travels as an event in the stream.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from modelswap_engine.backends.port import Generate
from modelswap_engine.http.answers import DISCONNECTED, FAILED, OK, REJECTED
from modelswap_engine.http.bodies import json_response
from modelswap_engine.http.errors import body_of, internal
from modelswap_engine.http.metrics import Metrics
from modelswap_engine.http.openai import bodies
from modelswap_engine.http.openai.answer import Answer, Piece
from modelswap_engine.http.openai.choices import merged
from modelswap_engine.http.sse import EventStream
from modelswap_engine.protocol.codec import encode
from modelswap_engine.protocol.errors import ErrorEnvelope, ModelswapError, WorkerLost
from modelswap_engine.protocol.messages import VersionRef

VERSION_HEADER = "x-modelswap-version"
DIGEST_HEADER = "x-modelswap-digest"
ADAPTER_HEADER = "x-modelswap-adapter"
ADAPTER_DIGEST_HEADER = "x-modelswap-adapter-digest"


def header_value(label: str) -> str:
    """Return a version label as it may stand in a header; people choose labels freely."""
    return "".join(letter if letter.isascii() and letter.isprintable() else "?" for letter in label[:256])


class Outcome:
    """Counts one request exactly once, whatever becomes of it; used as a context around all of it."""

    def __init__(self, metrics: Metrics, *, clock: Callable[[], float], on_lost: Callable[[], None]) -> None:
        self._metrics = metrics
        self._clock = clock
        self._on_lost = on_lost
        self._started = clock()
        self._result = OK
        self._waited: float | None = None
        self.admitted: VersionRef | None = None

    def __enter__(self) -> "Outcome":
        self._metrics.requests_in_flight.inc()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._metrics.requests_in_flight.dec()
        if isinstance(error, ModelswapError):
            self.failed(error)
        elif isinstance(error, asyncio.CancelledError | ConnectionResetError):
            self._result = DISCONNECTED
        elif error is not None:
            self._result = FAILED
        self.sent()
        self._metrics.count_request(self.admitted, self._result)

    def let_in(self, live: VersionRef) -> None:
        """Say which version the request was let in to."""
        self.admitted = live
        self._waited = self._clock() - self._started

    def sent(self) -> None:
        """Say that the engine has the request; what was noted until then is counted now, while it works."""
        if self.admitted is not None and self._waited is not None:
            self._metrics.let_in(self.admitted.version, self._waited)
            self._waited = None

    def first_token(self) -> None:
        """Record the time to the first token."""
        version = self.admitted.version if self.admitted is not None else ""
        self._metrics.first_token(version, self._clock() - self._started)

    def answered(self, status: int) -> None:
        """Count the request as what an engine behind this process answered."""
        if status >= 400:
            self._result = REJECTED if status < 500 else FAILED

    def failed(self, error: ModelswapError) -> None:
        """Count the request as one that got an error, be it as a status or within a stream."""
        self._result = REJECTED if error.status < 500 else FAILED
        if isinstance(error, WorkerLost):
            self._on_lost()


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """What is needed to answer one request.

    Attributes:
        order: what the engine was asked; of several answers the first.
        answers: as many as the client asked for, all to the same prompt.
        adapter_digest: of the LoRA adapter that is used, "" for the base model.
        label: names a version by its digest.
        include_usage: a stream ends with a chunk of token counts.
        write_seconds: how long one write may wait for a client that does not read.
    """

    shape: bodies.Shape
    order: Generate
    answers: Sequence[Answer]
    outcome: Outcome
    model: str
    created: int
    label: Callable[[str], str]
    include_usage: bool
    write_seconds: float
    adapter_digest: str = ""

    async def whole(self) -> web.Response:
        """Answer in one body."""
        texts: list[list[str]] = [[] for _ in self.answers]
        finishes: list[str | None] = [None for _ in self.answers]
        async with aclosing(merged(self.answers)) as pieces:
            async for number, piece in pieces:
                if not any(texts):
                    self.outcome.first_token()
                texts[number].append(piece.text)
                finishes[number] = piece.finish
        ended = enumerate(zip(texts, finishes, strict=True))
        choices = [self.shape.whole("".join(said), finish, index=number) for number, (said, finish) in ended]
        extension = self._extension(range(len(self.answers)))
        body = self._body(self.shape.whole_object, choices, usage=self._usage(), modelswap=extension)
        return json_response(body, headers=self._headers())

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """Answer in server-sent events."""
        async with aclosing(merged(self.answers)) as pieces:
            first = await anext(pieces)
            self.outcome.first_token()
            stream = EventStream(request, headers=self._headers(), write_seconds=self.write_seconds)
            await stream.open()
            try:
                await self._send(stream, first, pieces)
            except ModelswapError as error:
                self.outcome.failed(error)
                await stream.data(encode(ErrorEnvelope(error=body_of(error))))
            except ConnectionResetError:
                raise
            except Exception as error:  # noqa: BLE001 - headers are out, so the error has to travel in the stream
                defect = internal(error, where=request.path)
                self.outcome.failed(defect)
                await stream.data(encode(defect.envelope()))
            await stream.data(b"[DONE]")
            await stream.close()
            return stream.response

    async def _send(
        self, stream: EventStream, first: tuple[int, Piece], rest: AsyncIterator[tuple[int, Piece]]
    ) -> None:
        begun = {first[0]}
        await stream.data(self._chunk(*first, first=True))
        async for number, piece in rest:
            await stream.data(self._chunk(number, piece, first=number not in begun))
            begun.add(number)
        if self.include_usage:
            await stream.data(encode(self._body(self.shape.chunk_object, [], usage=self._usage())))

    def _chunk(self, number: int, piece: Piece, *, first: bool) -> bytes:
        choices = [self.shape.chunk(piece.text, piece.finish, first=first, index=number)]
        extension = self._extension([number]) if piece.finish else None
        return encode(self._body(self.shape.chunk_object, choices, of=number, modelswap=extension))

    def _body(self, kind: str, choices: list[dict[str, Any]], *, of: int | None = None, **more: Any) -> bodies.Body:
        digest = self._digest() if of is None else self.answers[of].digest
        return bodies.Body(
            id=self.order.request_id,
            object=kind,
            created=self.created,
            model=self.model,
            system_fingerprint=f"fp_{digest.removeprefix('sha256:')[:12]}",
            choices=choices,
            **more,
        )

    def _headers(self) -> dict[str, str]:
        digest = self._digest()
        headers = {VERSION_HEADER: header_value(self.label(digest)), DIGEST_HEADER: digest}
        if self.adapter_digest:
            headers |= {ADAPTER_HEADER: self.order.adapter, ADAPTER_DIGEST_HEADER: self.adapter_digest}
        return headers

    def _digest(self) -> str:
        """Return the version that answers; of several the one of the first answer that has begun."""
        return next((answer.digest for answer in self.answers if answer.digest), "")

    def _extension(self, numbers: Sequence[int]) -> bodies.Extension | None:
        spans = [
            bodies.SpanBody(self.label(span.digest), span.digest, span.tokens, number)
            for number in numbers
            for span in self.answers[number].spans
            if self.answers[number].mixed
        ]
        return bodies.Extension(spans=spans) if spans else None

    def _usage(self) -> bodies.Usage:
        prompt, completion = len(self.order.prompt), sum(answer.completion_tokens for answer in self.answers)
        return bodies.Usage(prompt, completion, prompt + completion)
