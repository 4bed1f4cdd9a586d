"""The front's side of generations: one queue of tokens per open request.

Knows no process; whoever owns the streams delivers to them and is told when a consumer gives up.
"""

import asyncio
from collections.abc import AsyncIterator, Callable

from modelswap_engine.backends.embedded.wire import request_key
from modelswap_engine.backends.port import FinishReason, Generate, Tokens


class TokenStream(AsyncIterator[Tokens]):
    """The answer to one request; the item with ``finish`` is the last. Closing it early ends the generation."""

    def __init__(self, request: Generate, *, abandoned: Callable[["TokenStream"], None]) -> None:
        self.request_id = request.request_id
        self._queue: asyncio.Queue[Tokens] = asyncio.Queue()
        self._abandoned = abandoned
        self._finished = False
        self.last_digest = ""

    def put(self, tokens: Tokens) -> None:
        """Add what the engine produced."""
        self.last_digest = tokens.digest or self.last_digest
        self._queue.put_nowait(tokens)

    async def __anext__(self) -> Tokens:
        if self._finished:
            raise StopAsyncIteration
        tokens = await self._queue.get()
        self._finished = tokens.finish is not None
        return tokens

    async def aclose(self) -> None:
        """End the generation if it still runs; idempotent."""
        if not self._finished:
            self._finished = True
            self._abandoned(self)


class Streams:
    """All open streams, by the id under which the worker knows them.

    That id is never reused, so what is still under way for an aborted request cannot reach a later one that its
    client gave the same id.
    """

    def __init__(self) -> None:
        self._open: dict[str, TokenStream] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._open)

    def open(self, request: Generate, *, abort: Callable[[str], None]) -> tuple[str, TokenStream]:
        """Open a stream; return the worker's id for it and the stream. ``abort`` is called when it is abandoned."""
        self._count += 1
        key = request_key(self._count, request.adapter)

        def abandoned(_: TokenStream) -> None:
            if self._open.pop(key, None) is not None:
                abort(key)

        stream = TokenStream(request, abandoned=abandoned)
        self._open[key] = stream
        return key, stream

    def deliver(self, tokens: Tokens) -> None:
        """Hand tokens to their stream; those of an abandoned one are dropped."""
        stream = self._open.get(tokens.request_id)
        if stream is None:
            return
        if tokens.finish is not None:
            del self._open[tokens.request_id]
        stream.put(
            Tokens(
                request_id=stream.request_id,
                tokens=tokens.tokens,
                digest=tokens.digest,
                finish=tokens.finish,
                error=tokens.error,
            )
        )

    def fail_all(self, error: str) -> None:
        """End every stream with an error."""
        for key, stream in list(self._open.items()):
            self.deliver(
                Tokens(request_id=key, tokens=(), digest=stream.last_digest, finish=FinishReason.ERROR, error=error)
            )
