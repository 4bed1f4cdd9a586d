"""The engine in memory, taught to generate: what it says, when, and how it ends is the test's script.

For contract tests of the data port; the swap half is that of :mod:`tests.support.fake_backend`.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

from modelswap_engine.backends.port import FinishReason, Generate, TensorRange, Tokens
from modelswap_engine.protocol.errors import ModelswapError, NotReady
from tests.support.fake_backend import FakeBackend


@dataclass
class Script:
    """One answer.

    Attributes:
        items: what is said, token by token; a callable is awaited in between (to hold the stream, to swap).
        finish: how it ends; None closes the stream without an end.
        error: the reason that goes with ``finish``.
        raises: raised instead of an end.
        refuses: raised by ``generate`` itself.
    """

    items: list[bytes | Callable[[], Awaitable[object]]] = field(default_factory=list)
    finish: FinishReason | None = FinishReason.LENGTH
    error: str = ""
    raises: Exception | None = None
    refuses: ModelswapError | None = None


class ScriptedStream:
    """An answer that follows its script; every byte is one token."""

    def __init__(self, backend: "ScriptedBackend", request: Generate, script: Script) -> None:
        self._backend = backend
        self._request = request
        self._items = self._play(script)
        self.closed = False
        self.ended = False

    def __aiter__(self) -> AsyncIterator[Tokens]:
        return self

    async def __anext__(self) -> Tokens:
        item = await anext(self._items)
        self.ended = item.finish is not None
        if self.ended:
            self._backend.requests -= 1
        return item

    async def aclose(self) -> None:
        if not self.closed and not self.ended:
            self._backend.aborted.append(self._request.request_id)
            self._backend.requests -= 1
        self.closed = True

    async def _play(self, script: Script) -> AsyncIterator[Tokens]:
        for item in script.items:
            if isinstance(item, bytes):
                for byte in item:
                    yield self._tokens((self._backend.token_of(byte),))
            else:
                await item()
        if script.raises is not None:
            raise script.raises
        if script.finish is not None:
            yield self._tokens((), finish=script.finish, error=script.error)

    def _tokens(self, tokens: tuple[int, ...], *, finish: FinishReason | None = None, error: str = "") -> Tokens:
        return Tokens(
            request_id=self._request.request_id,
            tokens=tokens,
            digest=self._backend.digest,
            finish=finish,
            error=error,
        )


class ScriptedBackend(FakeBackend):
    """See the module.

    Attributes:
        script: what the next answers are.
        asked: every order so far.
        aborted: ids of the answers that were closed before their end.
        refuse_after: how many more answers are begun, -1 for all.
    """

    def __init__(self, *, read: Callable[[TensorRange], bytes], token_of: Callable[[int], int]) -> None:
        super().__init__(read=read, ranks=1)
        self.token_of = token_of
        self.script = Script([b"hello"])
        self.asked: list[Generate] = []
        self.aborted: list[str] = []
        self.refuse_after = -1
        self.streams: list[ScriptedStream] = []

    def generate(self, request: Generate) -> ScriptedStream:
        if self.script.refuses is not None:
            raise self.script.refuses
        if self.refuse_after == 0:
            raise NotReady("no more of them")
        self.refuse_after -= 1
        self.asked.append(request)
        self.requests += 1
        self.streams.append(ScriptedStream(self, request, self.script))
        return self.streams[-1]
