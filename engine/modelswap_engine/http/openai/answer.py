"""One answer as it unfolds: the engine's tokens become text, counts, and the versions that made them.

Knows the backend port and text, no HTTP. Whoever stops iterating ends the generation in the engine.
"""

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from modelswap_engine.backends.port import FinishReason, Tokens, TokenStream
from modelswap_engine.http.openai.errors import Interrupted
from modelswap_engine.http.openai.text import TextStream
from modelswap_engine.protocol.errors import VersionRequired


@dataclass(frozen=True)
class Span:
    """Consecutive tokens of one version."""

    digest: str
    tokens: int


@dataclass(frozen=True)
class Piece:
    """Text to send on; the last one carries ``finish`` (``stop`` or ``length``)."""

    text: str
    finish: str | None = None


class Answer:
    """Consumes the engine's stream once and remembers what came of it.

    Args:
        tokens: the engine's stream.
        text: makes text of them.
        eos: ids that end a text and are not shown.
        required_digest: the only version that may have a part in it, None for any.
        trusted: asked before anything is passed on; says no once the engine's weights failed their hash.
    """

    def __init__(
        self,
        tokens: TokenStream,
        *,
        text: TextStream,
        eos: frozenset[int],
        required_digest: str | None,
        trusted: Callable[[], bool],
    ) -> None:
        self._tokens = tokens
        self._text = text
        self._eos = eos
        self._required = required_digest
        self._trusted = trusted
        self._spans: list[Span] = []
        self.digest = ""

    @property
    def completion_tokens(self) -> int:
        """Tokens generated so far."""
        return sum(span.tokens for span in self._spans)

    @property
    def mixed(self) -> bool:
        """True when more than one version had a part in it."""
        return len(self._spans) > 1

    @property
    def spans(self) -> tuple[Span, ...]:
        """Who made how many tokens, in order."""
        return tuple(self._spans)

    async def pieces(self) -> AsyncGenerator[Piece]:
        """Yield the text; the first piece comes with the first token, even when it is empty.

        Raises:
            Interrupted: the engine ended the generation; retrying may succeed.
            VersionRequired: the client demanded a version, and another one took over.
            WorkerLost: from the backend.
        """
        async for item in self._tokens:
            if not self._trusted():
                raise Interrupted(
                    "the live weights are not those of the version they should be", advice="send it again"
                )
            first = not self._spans
            self._account(item)
            if item.finish in (FinishReason.ABORT, FinishReason.ERROR):
                raise Interrupted(
                    f"the generation was ended by the server: {item.error or item.finish}", advice="send it again"
                )
            piece = self._piece(item)
            if piece.text or piece.finish or first:
                yield piece
            if piece.finish:
                return
        raise Interrupted("the engine closed the stream without an end", advice="send it again")

    def _piece(self, item: Tokens) -> Piece:
        text, stopped = self._text.push(self._visible(item))
        if stopped:
            return Piece(text, finish="stop")
        if item.finish is None:
            return Piece(text)
        rest, stopped = self._text.flush()
        return Piece(text + rest, finish="stop" if stopped else item.finish.value)

    def _account(self, item: Tokens) -> None:
        if self._required is not None and item.digest and item.digest != self._required:
            raise VersionRequired("another version became live during this answer", advice="send it again")
        if not item.tokens:
            if not self._spans:
                self.digest = item.digest
            return
        self.digest = item.digest
        if self._spans and self._spans[-1].digest == item.digest:
            item_count = self._spans[-1].tokens + len(item.tokens)
            self._spans[-1] = Span(item.digest, item_count)
        else:
            self._spans.append(Span(item.digest, len(item.tokens)))

    def _visible(self, item: Tokens) -> tuple[int, ...]:
        """The tokens without the end-of-text one that stopped the generation."""
        if item.finish is FinishReason.STOP and item.tokens and item.tokens[-1] in self._eos:
            return item.tokens[:-1]
        return item.tokens
