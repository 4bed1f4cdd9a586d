"""Tar archives that lie: what is found lies in them, whatever they say, and what cannot be is refused by name."""

import tarfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelswap_engine.protocol.errors import InvalidCheckpoint
from modelswap_engine.sources.oci.tar import BLOCK, MAX_EXTENSION_BYTES, MAX_HEADERS, Member, members
from tests.support.tars import packed

FORMS = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]
parts = st.text("abü-_.0", min_size=1, max_size=60).filter(lambda part: part not in {".", ".."})
paths = st.lists(parts, min_size=1, max_size=5).map("/".join)


async def walked(data: bytes) -> tuple[Member, ...]:
    async def read(start: int, stop: int) -> bytes:
        assert 0 <= start < stop <= len(data)
        return data[start:stop]

    return await members(read, len(data), name="layer")


@given(st.dictionaries(paths, st.binary(max_size=2000), max_size=8), st.sampled_from(FORMS[1:]))
@settings(max_examples=50, deadline=None)
async def test_what_was_packed_is_found_where_it_is(files: dict[str, bytes], form: int) -> None:
    data = packed(files, form=form)
    assert {m.path: data[m.offset : m.offset + m.size] for m in await walked(data)} == files


@pytest.mark.parametrize("form", FORMS)
async def test_only_regular_files_inside_it_count(form: int) -> None:
    files = {"./a": b"1", "b/./c": b"2", "../d": b"3", "/e": b"4", "f/../g": b"5", "h\u202e": b"6"}
    found = await walked(packed(files, form=form, links={"config.json": "/etc/passwd"}))
    assert [member.path for member in found] == ["a", "b/c"]


@given(st.binary(min_size=1, max_size=40), st.integers(0, 4 * BLOCK), st.integers(0, 8 * BLOCK), st.sampled_from(FORMS))
@settings(max_examples=200, deadline=None)
async def test_damage_is_refused_or_leaves_what_lies_in_it(junk: bytes, at: int, cut: int, form: int) -> None:
    whole = packed({"a" * 90: b"1" * 700, f"{'b/' * 40}c": b"2", "d": b""}, form=form)
    data = (whole[:at] + junk + whole[at + len(junk) :])[: max(1, len(whole) - cut)]
    try:
        found = await walked(data)
    except InvalidCheckpoint:
        return
    assert all(0 <= m.offset <= m.offset + m.size <= len(data) for m in found)


def header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    return info.tobuf(tarfile.GNU_FORMAT)


def extended(records: bytes) -> bytes:
    return header("x", len(records), tarfile.XHDTYPE) + records.ljust(BLOCK, b"\0") + header("a", 1) + b"1" * BLOCK


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"\x1f\x8b" + b"x" * BLOCK, "not an uncompressed tar"),
        (b"short", "not an uncompressed tar"),
        (header("a", 10**15), "are said to be in it, it has 512"),
        (header("a", -1), "of no size"),
        (header("a", 5, tarfile.GNUTYPE_SPARSE), "sparse"),
        (header("x", MAX_EXTENSION_BYTES + 1, tarfile.XHDTYPE), "at most"),
        (header("", 0) * (MAX_HEADERS + 1), f"more than {MAX_HEADERS} headers"),
        (extended(b"999 path=a\n"), "cannot be read"),
        (extended(b"0 path=a\n"), "cannot be read"),
        (extended(b"12 size=-12\n"), "bad size"),
        (extended(b"29 size=99999999999999999999\n"), "bad size"),
        (extended(b"17 size=10000000\n"), "are said to be in it"),
        (extended(b"22 GNU.sparse.major=1\n"), "sparse"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_lies_are_refused(data: bytes, match: str) -> None:
    with pytest.raises(InvalidCheckpoint, match=match):
        await walked(data)
