"""From tokens to text, a piece at a time.

Two things must not happen to a client of a stream: half of a character (tokens may split UTF-8 sequences), and
text beyond a stop string (which may straddle tokens). Both are prevented by holding back the smallest possible
tail. Pure: no I/O, no clock.
"""

from collections.abc import Callable, Sequence
from typing import Final

Decode = Callable[[Sequence[int]], str]

MAX_HELD_TOKENS: Final = 6
"""A character has at most four bytes, hence four byte tokens; what is still broken after six never heals."""

_BROKEN: Final = "\ufffd"


class IncrementalDecoder:
    """Decodes a growing list of tokens; the pieces joined are the decoding of the whole.

    Tokens are decoded together with a few before them, because spaces and multi-byte characters depend on the
    neighbours; only the difference is new.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._context: list[int] = []
        self._pending: list[int] = []

    def push(self, tokens: Sequence[int]) -> str:
        """Return the text that became certain."""
        pieces = []
        for token in tokens:
            self._pending.append(token)
            piece = self._difference()
            if not piece:
                self._pending.pop()  # a special token: it says nothing and joins nothing
            elif not piece.endswith(_BROKEN) or len(self._pending) >= MAX_HELD_TOKENS:
                pieces.append(self._settle(piece))
        return "".join(pieces)

    def flush(self) -> str:
        """Return what was held back; the stream has ended."""
        return self._settle(self._difference()) if self._pending else ""

    def _difference(self) -> str:
        before = self._decode(self._context)
        return self._decode([*self._context, *self._pending])[len(before) :]

    def _settle(self, piece: str) -> str:
        self._context, self._pending = self._pending, []
        return piece


class StopMatcher:
    """Cuts a stream of text at the first stop string, wherever the pieces are cut."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""

    def push(self, piece: str) -> tuple[str, bool]:
        """Return the text that may go out, and whether a stop string was met (nothing goes out after it)."""
        text = self._held + piece
        found = min((at for stop in self._stops if (at := text.find(stop)) >= 0), default=-1)
        if found >= 0:
            self._held = ""
            return text[:found], True
        keep = self._tail(text)
        self._held = text[len(text) - keep :] if keep else ""
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """Return what was held back; the stream has ended without a stop string."""
        held, self._held = self._held, ""
        return held

    def _tail(self, text: str) -> int:
        """Length of the longest end of ``text`` that a stop string could begin with."""
        longest = min(len(text), max((len(stop) for stop in self._stops), default=1) - 1)
        for length in range(longest, 0, -1):
            end = text[len(text) - length :]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0


class TextStream:
    """Both together: tokens in, text that may be sent out, and whether a stop string was met."""

    def __init__(self, decode: Decode, stops: Sequence[str]) -> None:
        self._decoder = IncrementalDecoder(decode)
        self._matcher = StopMatcher(stops)

    def push(self, tokens: Sequence[int]) -> tuple[str, bool]:
        """Take tokens."""
        return self._matcher.push(self._decoder.push(tokens))

    def flush(self) -> tuple[str, bool]:
        """Take the end of the generation; what was held back comes out."""
        text, stopped = self._matcher.push(self._decoder.flush())
        return (text, True) if stopped else (text + self._matcher.flush(), False)
