"""One crafted file per rule of ``checkpoint/header.py``; each is refused with a typed error that names the file."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from modelswap_engine.checkpoint import strict_json
from modelswap_engine.checkpoint.build import build_manifest
from modelswap_engine.checkpoint.header import MAX_HEADER_BYTES, MAX_TENSORS
from modelswap_engine.protocol.errors import InvalidCheckpoint, UnsupportedFormat
from tests.support.checkpoints import SINGLE, pack, safetensors, write_checkpoint


def entry(dtype: Any = "U8", shape: Any = (4,), offsets: Any = (0, 4), **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets} | more


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in entry().items() if name != key}


DEEP = b'{"t":' + b"[" * 200_000 + b"]" * 200_000 + b"}"

TWO_TENSORS = (
    b'{"t":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"t":{"dtype":"I8","shape":[4],"data_offsets":[0,4]}}'
)
TWO_DTYPES = b'{"t":{"dtype":"U8","dtype":"I8","shape":[4],"data_offsets":[0,4]}}'
WRAPS = entry(shape=[2**32, 2**32 + 1], offsets=[0, 2**32])

ATTACKS: dict[str, tuple[bytes, str]] = {
    "H1 empty file": (b"", "too few"),
    "H1 seven bytes": (b"\x02\0\0\0\0\0\0", "too few"),
    "H2 header length 0": (pack(b""), "header length 0"),
    "H2 header length 1": (pack(b"{"), "header length 1"),
    "H2 header length over the limit": ((MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b"{}", "header length"),
    "H2 header length 2^64-1": (b"\xff" * 8 + b"{}", "header length"),
    "H2 header longer than the file": ((1000).to_bytes(8, "little") + b"{}", "truncated"),
    "H3 leading space": (pack(b" {}"), "start with"),
    "H3 a list": (pack(b"[]"), "start with"),
    "H3 not JSON": (pack(b'{"t": '), "not valid JSON"),
    "H3 text after the object": (pack(b'{}{"t":1}'), "not valid JSON"),
    "H3 not UTF-8": (pack(b'{"\xff": 1}'), "not UTF-8"),
    "H3 NaN": (pack(b'{"t": NaN}'), "NaN"),
    "H3 number of 10000 digits": (pack(b'{"t": ' + b"9" * 10_000 + b"}"), "not valid JSON"),
    "H3 deep nesting": (pack(DEEP), "nested too deeply"),
    "H4 duplicate tensor": (pack(TWO_TENSORS, bytes(4)), "duplicate key 't'"),
    "H4 duplicate by escape": (pack(b'{"t":1,"\\u0074":1}'), "duplicate key 't'"),
    "H4 duplicate field": (pack(TWO_DTYPES, bytes(4)), "duplicate key 'dtype'"),
    "H5 metadata not a map": (pack({"__metadata__": ["a"]}), "__metadata__"),
    "H5 metadata null": (pack({"__metadata__": None}), "__metadata__"),
    "H5 metadata with a number": (pack({"__metadata__": {"a": 1}}), "__metadata__"),
    "H5 metadata nested": (pack({"__metadata__": {"a": {"b": "c"}}}), "__metadata__"),
    "H6 entry is a number": (pack({"t": 1}), "does not consist of"),
    "H6 no dtype": (pack({"t": without("dtype")}, bytes(4)), "does not consist of"),
    "H6 no offsets": (pack({"t": without("data_offsets")}, bytes(4)), "does not consist of"),
    "H6 unknown field": (pack({"t": entry(code="import os")}, bytes(4)), "does not consist of"),
    "H6 dtype is a list": (pack({"t": entry(dtype=["U8"])}, bytes(4)), "dtype is not a string"),
    "H6 shape is a number": (pack({"t": entry(shape=4)}, bytes(4)), "list of integers"),
    "H6 shape of floats": (pack({"t": entry(shape=[4.0])}, bytes(4)), "list of integers"),
    "H6 shape of booleans": (pack({"t": entry(shape=[True], offsets=[0, 1])}, bytes(1)), "list of integers"),
    "H6 offsets of strings": (pack({"t": entry(offsets=["0", "4"])}, bytes(4)), "list of integers"),
    "H6 three offsets": (pack({"t": entry(offsets=[0, 2, 4])}, bytes(4)), "list of integers"),
    "H7 empty name": (pack({"": entry()}, bytes(4)), "empty name"),
    "H7 long name": (pack({"n" * 1025: entry()}, bytes(4)), "longer than 1024"),
    "H7 newline in name": (pack({"a\nb": entry()}, bytes(4)), "control or invisible"),
    "H7 escape sequence in name": (pack({"a\x1b[2Jb": entry()}, bytes(4)), "control or invisible"),
    "H7 NUL in name": (pack({"a\0b": entry()}, bytes(4)), "control or invisible"),
    "H7 bidirectional override in name": (pack({"a\u202eb": entry()}, bytes(4)), "control or invisible"),
    "H7 lone surrogate in name": (pack({"a\ud800b": entry()}, bytes(4)), "control or invisible"),
    "H8 unknown dtype": (pack({"t": entry(dtype="F12")}, bytes(4)), "unknown dtype 'F12'"),
    "H8 dtype in lower case": (pack({"t": entry(dtype="u8")}, bytes(4)), "unknown dtype"),
    "H8 negative dimension": (pack({"t": entry(shape=[-2, -2])}, bytes(4)), "dimension outside"),
    "H8 absurd dimension": (pack({"t": entry(shape=[2**60])}, bytes(4)), "dimension outside"),
    "H8 product wraps 64 bits": (pack({"t": WRAPS}, bytes(4)), "2^50 bytes"),
    "H8 too many dimensions": (pack({"t": entry(shape=[1] * 33, offsets=[0, 1])}, bytes(1)), "33 dimensions"),
    "H8 half a byte": (pack({"t": entry(dtype="F4", shape=[3], offsets=[0, 1])}, bytes(1)), "whole bytes"),
    "H9 negative begin": (pack({"t": entry(offsets=[-4, 0])}, bytes(4)), "out of order"),
    "H9 begin after end": (pack({"t": entry(offsets=[4, 0])}, bytes(4)), "out of order"),
    "H9 end after the file": (pack({"t": entry(offsets=[0, 4])}, bytes(3)), "truncated"),
    "H9 offset over 64 bits": (pack({"t": entry(offsets=[2**64, 2**64 + 4])}, bytes(4)), "truncated"),
    "H10 fewer bytes than the shape": (pack({"t": entry(shape=[5])}, bytes(4)), "means 5"),
    "H10 more bytes than the shape": (pack({"t": entry(shape=[3])}, bytes(4)), "means 3"),
    "H10 empty shape with data": (pack({"t": entry(shape=[0])}, bytes(4)), "means 0"),
    "H11 overlap": (pack({"t": entry(), "u": entry(offsets=[3, 7])}, bytes(7)), "overlaps"),
    "H11 same bytes twice": (pack({"t": entry(), "u": entry()}, bytes(4)), "overlaps"),
    "H11 hole": (pack({"t": entry(), "u": entry(offsets=[5, 9])}, bytes(9)), "belong to no tensor"),
    "H11 hole at the start": (pack({"t": entry(offsets=[1, 5])}, bytes(5)), "belong to no tensor"),
    "H12 trailing bytes": (pack({"t": entry()}, bytes(5)), "after the last tensor"),
    "H12 data without tensors": (pack({}, bytes(5)), "after the last tensor"),
    "no tensors": (pack({}), "no tensors"),
}  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS)
def test_attack_is_refused(attack: str, tmp_path: Path) -> None:
    content, cause = ATTACKS[attack]
    write_checkpoint(tmp_path)
    (tmp_path / SINGLE).write_bytes(content)
    with pytest.raises(InvalidCheckpoint) as caught:
        build_manifest(tmp_path)
    assert cause in caught.value.message
    assert caught.value.message.startswith(SINGLE)
    assert caught.value.advice
    assert caught.value.message.isprintable()  # no attacker's control characters reach a terminal or a status


@pytest.mark.parametrize("attack", [name for name in ATTACKS if name[:3] in {"H8 ", "H9 ", "H10", "H11"}])
def test_rules_about_one_tensor_name_it(attack: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / SINGLE).write_bytes(ATTACKS[attack][0])
    with pytest.raises(InvalidCheckpoint) as caught:
        build_manifest(tmp_path)
    assert caught.value.details["tensor"] in {"t", "u"}
    assert caught.value.details["file"] == SINGLE


def test_h3_too_many_items_are_refused_before_they_are_built(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / SINGLE).write_bytes(pack(b'{"t":[' + b"[]," * (strict_json.MAX_ITEMS // 2) + b"[]]}"))
    with pytest.raises(InvalidCheckpoint, match="JSON items"):
        build_manifest(tmp_path)


def test_h13_too_many_tensors(tmp_path: Path) -> None:
    header = "{" + ",".join(f'"{number}":0' for number in range(MAX_TENSORS + 1)) + "}"
    write_checkpoint(tmp_path)
    (tmp_path / SINGLE).write_bytes(pack(header.encode()))
    with pytest.raises(InvalidCheckpoint, match=str(MAX_TENSORS)):
        build_manifest(tmp_path)


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_every_truncation_is_refused(cut: int, tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    whole = (tmp_path / SINGLE).read_bytes()
    (tmp_path / SINGLE).write_bytes(whole[:-cut])
    with pytest.raises(InvalidCheckpoint, match=SINGLE):
        build_manifest(tmp_path)


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"PK\x03\x04\x00\x00\x08\x08" + bytes(100), "zip"),
        (b"GGUF\x03\0\0\0" + bytes(100), "GGUF"),
        (b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46" + bytes(100), "pickle"),
    ],
)
def test_other_formats_under_the_right_name(content: bytes, kind: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / SINGLE).write_bytes(content)
    with pytest.raises(UnsupportedFormat, match=kind) as caught:
        build_manifest(tmp_path)
    assert "convert" in caught.value.advice


def test_a_header_whose_length_spells_a_pickle_is_good(tmp_path: Path) -> None:
    header = json.dumps({"t": entry()}).encode().ljust(0x0280)  # the first bytes are 80 02
    write_checkpoint(tmp_path)
    (tmp_path / SINGLE).write_bytes(pack(header, bytes(4)))
    assert build_manifest(tmp_path).by_name["t"].offset == 8 + 0x0280


def good_files() -> dict[str, Callable[[], bytes]]:
    return {
        "padded header": lambda: pack(json.dumps({"t": entry()}).encode() + b"    ", bytes(4)),
        "metadata": lambda: pack({"__metadata__": {"format": "pt"}, "t": entry()}, bytes(4)),
        "scalar and empty": lambda: safetensors({"s": ("F32", (), bytes(4)), "e": ("F32", (0, 7), b"")}),
        "sub-byte": lambda: safetensors({"q": ("F4", (2, 3), bytes(3)), "r": ("F6_E2M3", (4,), bytes(3))}),
        "order of names is not order of bytes": lambda: pack({"u": entry(offsets=[4, 8]), "t": entry()}, bytes(8)),
    }


@pytest.mark.parametrize("form", good_files())
def test_unusual_but_valid_files_are_read(form: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / SINGLE).write_bytes(good_files()[form]())
    assert build_manifest(tmp_path).complete
