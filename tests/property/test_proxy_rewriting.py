"""Renaming what streams by: whatever pieces it comes in, the outcome is that of the whole; nothing else is changed."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict

from modelswap_engine.http.proxy import rewriting
from modelswap_engine.http.proxy.connection import head_of
from modelswap_engine.http.proxy.dialects import SGLANG, VLLM, Dialect, Naming
from modelswap_engine.http.proxy.events import Cutter
from modelswap_engine.http.proxy.headers import to_client, to_engine
from modelswap_engine.http.proxy.rewriting import Renamer
from modelswap_engine.protocol.errors import BadRequest

NAMES = st.text(min_size=1, max_size=6)
PARTS = st.lists(
    st.one_of(
        st.binary(max_size=8),
        st.sampled_from(
            [b"\n", b'"model":', b'"model": ', b'"tiny"', b'"', b'"mod', b'"model":"tiny"', b'"model": "tiny"']
        ),
    ),
    max_size=12,
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(), inner, max_size=3)),
    max_leaves=8,
)


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({cut % (len(data) + 1) for cut in cuts})
    return [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]


@given(parts=PARTS, cuts=st.lists(st.integers(min_value=0), max_size=8))
def test_pieces_do_not_matter(parts: list[bytes], cuts: list[int]) -> None:
    data = b"".join(parts)
    whole, cut = Renamer(engine="tiny", client="chat"), Renamer(engine="tiny", client="chat")

    wanted = whole.feed(data) + whole.finish()
    found = b"".join(map(cut.feed, pieces(data, cuts))) + cut.finish()

    assert found == wanted
    assert b'"model":"tiny"' not in wanted


@given(engine=NAMES, client=NAMES, text=st.text(max_size=20), cuts=st.lists(st.integers(min_value=0), max_size=8))
def test_only_the_model_is_renamed(engine: str, client: str, text: str, cuts: list[int]) -> None:
    body = {"id": engine, "model": engine, "choices": [{"text": text, "note": f'"model":"{engine}"'}]}
    data = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    renamer = Renamer(engine=engine, client=client)

    found = b"".join(map(renamer.feed, pieces(data, cuts))) + renamer.finish()

    assert json.loads(found) == body | {"model": client}


@given(parts=PARTS, cuts=st.lists(st.integers(min_value=0), max_size=8))
def test_an_event_is_not_held_back(parts: list[bytes], cuts: list[int]) -> None:
    renamer = Renamer(engine="tiny", client="chat")
    for piece in pieces(b"".join(parts) + b"\n\n", cuts):
        renamer.feed(piece)

    assert renamer.finish() == b""


@given(
    data=st.lists(st.sampled_from([b"data: a", b"\n", b"\n\n", b"\r\n", b"\r\n\r\n", b": c", b"x"]), max_size=20),
    cuts=st.lists(st.integers(min_value=0), max_size=8),
)
def test_events_are_cut_and_nothing_is_lost(data: list[bytes], cuts: list[int]) -> None:
    whole, cutter = b"".join(data), Cutter()
    passed = [cutter.feed(piece) for piece in pieces(whole, cuts)]

    assert all(not part or part.endswith((b"\n\n", b"\r\n\r\n")) for part in passed)
    assert b"".join(passed) + cutter.finish() == whole


@given(
    fields=st.dictionaries(st.text(), VALUES, max_size=6),
    dialect=st.sampled_from([VLLM, SGLANG]),
    number=st.integers(min_value=0, max_value=6),
)
def test_a_request_keeps_all_that_is_not_ours(fields: dict[str, Any], dialect: Dialect, number: int) -> None:
    route = dialect.routes[number]
    ours = {"model", "stream", "lora_path", dialect.salt, *dialect.refused}
    fields = {key: value for key, value in fields.items() if key not in ours}
    asked = rewriting.read(json.dumps(fields | {"model": "chat"}).encode(), route, dialect)
    found = json.loads(rewriting.write(asked, route, dialect, base="tiny", adapter="a@1", salt="s"))

    changed = {key: found.pop(key, None) for key in ("model", "lora_path", dialect.salt)}
    assert found == fields
    assert changed[dialect.salt] == ("s" if route.salted else None)
    if route.naming is Naming.MODEL:
        assert changed["model"] == ("tiny:a@1" if dialect.prefixed else "a@1")
    else:
        assert changed["lora_path"] == "a@1"


HEADER = st.from_regex(r"[A-Za-z][A-Za-z0-9-]{0,20}", fullmatch=True)


@given(headers=st.dictionaries(HEADER, st.text(alphabet="abc, -", max_size=20), max_size=8))
def test_no_header_of_one_connection_or_of_ours_passes(headers: dict[str, str]) -> None:
    named = {
        token.strip().lower()
        for key, value in headers.items()
        if key.lower() == "connection"
        for token in value.split(",")
    }
    came = CIMultiDict(headers)
    for passed in (to_client(came), dict(to_engine(came, request_id="r"))):
        kept = {key.lower() for key in passed} - {"accept-encoding", "content-type", "x-request-id"}
        assert not kept & (named | {"connection", "transfer-encoding", "content-length", "upgrade", "te"})
        assert not any(key.startswith("x-modelswap-") for key in kept)
        assert kept <= {key.lower() for key in headers}


@given(headers=st.lists(st.tuples(HEADER, st.text(alphabet="ab: \t\r\n\0\x7f\xe9", max_size=6)), max_size=4))
def test_a_head_has_the_lines_it_was_made_of_or_is_refused(headers: list[tuple[str, str]]) -> None:
    """Whatever stands in a header, it is neither another header nor the end of the head."""
    try:
        head = head_of("POST", "/v1/completions", host="engine", headers=headers, length=3)
    except BadRequest:
        assert any(not letter.isprintable() for _, value in headers for letter in value)
        return
    lines = head.decode("utf-8", "surrogateescape").split("\r\n")
    wanted = ["Host: engine", "Content-Length: 3", *(f"{name}: {value}" for name, value in headers)]
    assert lines == ["POST /v1/completions HTTP/1.1", *wanted, "", ""]
    assert head.count(b"\n") == len(wanted) + 2
