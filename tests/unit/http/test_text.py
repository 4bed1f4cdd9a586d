"""Tokens to text: whole characters only, nothing beyond a stop string, wherever the pieces are cut."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelswap_engine.http.openai.text import IncrementalDecoder, StopMatcher, TextStream


def decode_bytes(ids: Sequence[int]) -> str:
    """A byte-level tokenizer: ids from 256 on are special and silent."""
    return bytes(number for number in ids if number < 256).decode("utf-8", "replace")


def decode_words(ids: Sequence[int]) -> str:
    """A tokenizer like SentencePiece: each word brings its space, the first one loses it."""
    return "".join(f" w{number}" for number in ids)[1:]


def cut(items: Sequence[int], sizes: list[int]) -> list[Sequence[int]]:
    pieces, start = [], 0
    for size in sizes:
        pieces.append(items[start : start + size])
        start += size
    return [*pieces, items[start:]]


@given(st.text(), st.lists(st.integers(1, 5)))
def test_the_pieces_joined_are_the_text_and_each_is_whole(text: str, sizes: list[int]) -> None:
    decoder = IncrementalDecoder(decode_bytes)
    ids = list(text.encode("utf-8", "replace"))
    pieces = [decoder.push(part) for part in cut(ids, sizes)] + [decoder.flush()]
    assert "".join(pieces) == decode_bytes(ids)
    assert not any("\ufffd" in piece for piece in pieces) or "\ufffd" in text


@given(st.lists(st.integers(0, 9)), st.lists(st.integers(1, 3)))
def test_spaces_between_words_survive_the_cuts(ids: list[int], sizes: list[int]) -> None:
    decoder = IncrementalDecoder(decode_words)
    assert "".join([*(decoder.push(part) for part in cut(ids, sizes)), decoder.flush()]) == decode_words(ids)


def test_bytes_that_never_become_a_character_are_not_held_for_ever() -> None:
    decoder = IncrementalDecoder(decode_bytes)
    sent = [decoder.push([0x80]) for _ in range(20)]
    assert sum(map(len, sent)) >= 14


def test_special_tokens_say_nothing_and_tear_nothing() -> None:
    decoder = IncrementalDecoder(decode_bytes)
    assert [decoder.push([number]) for number in (0xC3, 300, 0xA9, 300, 65)] == ["", "", "é", "", "A"]


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.data())
def test_output_ends_right_before_the_first_stop_string(text: str, stops: list[str], data: st.DataObject) -> None:
    matcher = StopMatcher(stops)
    out, position, stopped = "", 0, False
    while position < len(text) and not stopped:
        size = data.draw(st.integers(1, 4))
        piece, stopped = matcher.push(text[position : position + size])
        out += piece
        position += size
        if not stopped:
            assert not any(stop in out for stop in stops)
    if not stopped:
        out += matcher.flush()
    # Whatever the cuts: the output is a beginning of the text, free of stop strings, and as long as can be.
    ends = [text.find(stop) for stop in stops if stop in text]
    assert text.startswith(out)
    assert stopped == bool(ends)
    assert not any(stop in out for stop in stops)
    if not ends:
        assert out == text


@pytest.mark.parametrize(("stop", "held"), [("END", "EN"), ("\n\nUser:", "\n\nUs")])
def test_only_what_could_become_a_stop_string_is_held_back(stop: str, held: str) -> None:
    matcher = StopMatcher([stop])
    assert matcher.push(f"answer{held}") == ("answer", False)
    assert matcher.push("x") == (f"{held}x", False)


def test_a_stop_string_across_tokens() -> None:
    stream = TextStream(decode_bytes, ["stop!"])
    assert stream.push(b"go st") == ("go ", False)
    assert stream.push(b"op") == ("", False)
    assert stream.push(b"! and more") == ("", True)


def test_held_text_comes_out_at_the_end() -> None:
    stream = TextStream(decode_bytes, ["stop!"])
    assert stream.push(b"go sto") == ("go ", False)
    assert stream.push([0xC3]) == ("", False)
    assert stream.flush() == ("sto\ufffd", False)
