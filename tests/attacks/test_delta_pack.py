"""One crafted pack per rule of ``delta/layout.py`` and of frames; each is refused with an error that says where."""

import hashlib
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zstandard

from modelswap_engine.delta import layout
from modelswap_engine.delta.coding import BLOCK_BYTES, Coding, Damaged, decode
from modelswap_engine.delta.folder import apply_pack
from modelswap_engine.delta.layout import FRAME, PREAMBLE_BYTES, Header, PackedFile, encode_header
from modelswap_engine.delta.pack import Step, apply, open_pack
from modelswap_engine.protocol.errors import DigestMismatch, InvalidCheckpoint, InvalidDelta, UnsupportedFormat
from tests.support.checkpoints import CONFIG, Tensor
from tests.support.deltas import MemoryRanges, first, made, opened, pack_of, resealed, written

BASE = bytes(range(200))
OLD: dict[str, Tensor] = {"t": ("U8", (200,), BASE), "gone": ("U8", (2,), b"xy")}
NEW: dict[str, Tensor] = {"t": ("U8", (200,), BASE[:-1] + b"!"), "u": ("U8", (4,), b"new!")}
HASH = "0" * 64


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return pack_of(tmp_path_factory.mktemp("good") / "pack", OLD, NEW)


def replaced(**lies: Any) -> Callable[[Header], Header]:
    return lambda header: msgspec.structs.replace(header, **lies)


def of_first(**lies: Any) -> Callable[[Header], Header]:
    return lambda header: first(header, **lies)


def version(digest: str) -> layout.Version:
    return layout.Version(digest=digest, bytes=0)


def side(**lies: Any) -> PackedFile:
    honest = PackedFile(name="config.json", size=9, sha256=HASH, canonical_sha256=HASH)
    return msgspec.structs.replace(honest, **lies)


def twice(header: Header) -> Header:
    return msgspec.structs.replace(header, tensors=(header.tensors[0], *header.tensors))


LIES: dict[str, tuple[Callable[[Header], Header], str]] = {
    "D3 a tensor twice": (twice, "not sorted and unique"),
    "D3 unsorted": (lambda header: replaced(tensors=header.tensors[::-1])(header), "not sorted and unique"),
    "D3 empty name": (of_first(name=""), "empty name"),
    "D3 control characters": (of_first(name="\x1b[2J"), "control or invisible"),
    "D3 removed and there": (replaced(removed=("t",)), "removed, and there"),
    "D3 removed twice": (replaced(removed=("gone", "gone")), "not sorted and unique"),
    "D4 unknown dtype": (of_first(dtype="F12"), "unknown dtype"),
    "D4 absurd shape": (of_first(shape=(2**60,)), "dimension outside"),
    "D4 bytes and shape disagree": (of_first(nbytes=201), "201 bytes stated, 200"),
    "D4 more than 2^50 bytes": (of_first(shape=(2**40, 2**40)), "2^50 bytes"),
    "D5 no hash": (of_first(sha256="A" * 64), "not a hash"),
    "D5 base is no hash": (of_first(base="0"), "not a hash"),
    "D5 digest without its kind": (replaced(base=version(HASH)), "a digest is not"),
    "D5 digest with a newline": (replaced(target=version(f"sha256:{HASH}\n")), "a digest is not"),
    "D6 negative offset": (of_first(offset=-1), "begins at byte -1"),
    "D6 overlap": (lambda header: of_first(size=header.tensors[0].size + 1)(header), "the one before ends"),
    "D6 hole": (lambda header: of_first(size=header.tensors[0].size - 1)(header), "the one before ends"),
    "D6 beyond the file": (lambda header: replaced(tensors=header.tensors[:1])(header), "the file has"),
    "D7 no room for a frame": (of_first(size=4), "cannot be the blocks"),
    "D7 negative size": (of_first(size=-5), "cannot be the blocks"),
    "D7 larger than it could be": (of_first(size=206), "cannot be the blocks"),
    "D7 a thousand gigabytes": (of_first(shape=(2**40,), nbytes=2**40), "cannot be the blocks"),
    "D8 side file outside the folder": (replaced(side_files=(side(name="../config.json"),)), "is none"),
    "D8 side file nobody knows": (replaced(side_files=(side(name="run.py"),)), "is none"),
    "D8 side file twice": (replaced(side_files=(side(), side())), "not sorted and unique"),
    "D8 side file of a gigabyte": (replaced(side_files=(side(size=2**30),)), "cannot be those"),
    "D8 side file longer than packed": (replaced(side_files=(side(packed=10),)), "cannot be those"),
    "unknown coding": (of_first(coding="pickle"), "coding is not known"),
    "negative count": (of_first(changed=-1), "negative number"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies_with_a_right_hash_is_refused(good: bytes, lie: str) -> None:
    change, cause = LIES[lie]
    with pytest.raises(InvalidDelta) as caught:
        opened(resealed(good, change))
    assert cause in caught.value.message
    assert caught.value.message.startswith("pack: ")
    assert caught.value.message.isprintable()


def sealed(text: bytes) -> bytes:
    return struct.pack("<8sIQ32s", b"MSWDELTA", 1, len(text), hashlib.sha256(text).digest()) + text


FILES: dict[str, tuple[bytes, str]] = {
    "D1 empty": (b"", "not a delta pack"),
    "D1 another file": (b"PK\x03\x04" * 30, "not a delta pack"),
    "D1 cut in the preamble": (sealed(b"{}")[: PREAMBLE_BYTES - 1], "not a delta pack"),
    "D1 header longer than the file": (struct.pack("<8sIQ32s", b"MSWDELTA", 1, 99, bytes(32)), "truncated"),
    "D2 header of 2^63 bytes": (struct.pack("<8sIQ32s", b"MSWDELTA", 1, 1 << 63, bytes(32)), "header length"),
    "D2 header of no bytes": (struct.pack("<8sIQ32s", b"MSWDELTA", 1, 0, bytes(32)), "header length"),
    "D2 wrong hash": (sealed(b"{}")[:-2] + b"[]", "the header is damaged"),
    "D2 a list": (sealed(b"[]"), "not the header"),
    "D2 not UTF-8": (sealed(b'{"\xff":1}'), "not the header"),
    "D2 deep nesting": (sealed(b'{"x":' + b"[" * 200_000 + b"]" * 200_000 + b"}"), "not the header"),
    "D2 a number of 1000 digits": (sealed(b'{"from":{"digest":"","bytes":' + b"9" * 1000 + b"}}"), "not the header"),
}


@pytest.mark.parametrize("attack", FILES)
def test_a_file_that_is_no_pack_is_refused(attack: str) -> None:
    data, cause = FILES[attack]
    with pytest.raises(InvalidDelta, match=cause):
        opened(data)


def test_a_later_version_says_what_to_do(good: bytes) -> None:
    for version in (0, 3):
        with pytest.raises(UnsupportedFormat, match=f"version {version}") as caught:
            opened(good[:8] + bytes([version]) + good[9:])
        assert caught.value.advice == "update modelswap"


def test_packs_of_the_first_version_are_read(good: bytes) -> None:
    assert good[8] == 2
    assert made(opened(good[:8] + b"\x01" + good[9:]), "t", BASE) == NEW["t"][2]


def test_too_many_tensors(good: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "MAX_TENSORS", 1)
    with pytest.raises(InvalidDelta, match="2 tensors; at most 1"):
        opened(good)


@pytest.mark.parametrize("count", [1, 5, 40])
def test_a_truncated_pack_is_refused_by_its_header(good: bytes, count: int) -> None:
    with pytest.raises(InvalidDelta, match="the file has"):
        opened(good[:-count])


# Frames.


def framed(coding: int, body: bytes, *, length: int | None = None) -> bytes:
    return FRAME.pack(coding, len(body) if length is None else length) + body


def with_frames(good: bytes, frames: bytes, **more: Any) -> bytes:
    """Return the pack with other frames for its first tensor; sizes and hashes are right."""
    pack = opened(good)
    entry, other = pack.header.tensors
    rest = good[pack.data + entry.size :]
    moved = msgspec.structs.replace(other, offset=len(frames))
    changed = msgspec.structs.replace(entry, size=len(frames), **more)
    return encode_header(msgspec.structs.replace(pack.header, tensors=(changed, moved))) + frames + rest


BOMB = zstandard.ZstdCompressor(level=19).compress(bytes(1 << 30))
LIAR = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(200))

ZEROS = zstandard.ZstdCompressor(write_content_size=True).compress(bytes(200))

FRAMES: dict[str, tuple[bytes, str]] = {
    "unknown coding": (framed(9, b""), "a block of coding 9"),
    "longer than the block": (framed(1, bytes(200), length=201), "201 bytes for a block of 200"),
    "longer than what is there": (framed(1, b"x", length=100), "100 bytes for a block"),
    "shorter than the block": (framed(1, b"x" * 100), "100 bytes for a block of 200"),
    "bytes after the last block": (framed(0, b"") + b"?", "1 bytes after its end"),
    "a block that is the same, with a body": (framed(0, b"x"), "1 bytes after its end"),
    "bytes of another tensor": (framed(1, BASE), "does not make the bytes"),
    "a bomb": (framed(2, struct.pack("<I", len(BOMB[:150])) + BOMB[:150]), "a zstd frame of 1073741824 bytes"),
    "a frame that does not say its size": (framed(2, struct.pack("<I", len(LIAR)) + LIAR), "where 200 are due"),
    "no frame at all": (framed(2, struct.pack("<I", 50) + b"\xff" * 50), "zstd"),
    "a stream longer than it can be": (framed(2, struct.pack("<I", 201)), "a stream of 201 bytes for 200"),
    "a stream cut short": (framed(2, struct.pack("<I", 200)), "ends 200 bytes early"),
    "no stream": (framed(2, b"\x01"), "ends 3 bytes early"),
    "an exclusive or of one plane, cut short": (framed(5, struct.pack("<I", 200) + bytes(99)), "ends 101 bytes early"),
    "an exclusive or of two planes": (framed(5, struct.pack("<I", 2) + b"ab"), "zstd"),
    "a bomb as exclusive or": (framed(5, struct.pack("<I", 150) + BOMB[:150]), "a zstd frame of 1073741824 bytes"),
    "something after an exclusive or": (
        framed(5, struct.pack("<I", len(ZEROS)) + ZEROS + b"?"),
        "1 bytes after its end",
    ),
    "two streams": (framed(3, struct.pack("<I", 4) + b"abcd"), "not a zstd frame"),
}


@pytest.mark.parametrize("attack", FRAMES)
def test_frames_that_lie_are_refused_with_their_place(good: bytes, attack: str) -> None:
    frames, cause = FRAMES[attack]
    data = with_frames(good, frames)
    with pytest.raises(InvalidDelta) as caught:
        made(opened(data), "t", BASE)
    begin = opened(data).data
    assert cause in caught.value.message
    assert caught.value.details["tensor"] == "t"
    assert begin <= int(caught.value.details["bytes"].partition("-")[0]) <= begin + len(frames)


def test_a_tensor_made_from_nothing_may_not_ask_for_a_base(good: bytes) -> None:
    for coding in (Coding.SAME, Coding.DIFFERENCE, Coding.SPARSE, Coding.XOR):
        with pytest.raises(InvalidDelta, match=f"a block of coding {coding:d}"):
            made(opened(with_frames(good, framed(coding, b""), base="")), "t")


PLANES: dict[str, tuple[bytes, str]] = {
    "the second plane is missing": (struct.pack("<I", 10) + bytes(10), "ends 4 bytes early"),
    "the second plane is longer": (
        b"\n\0\0\0" + bytes(10) + b"\x0b\0\0\0" + bytes(11),
        "of 11 bytes",
    ),
    "a third plane": ((struct.pack("<I", 10) + bytes(10)) * 3, "14 bytes after its end"),
    "the first plane claims all": (struct.pack("<I", 2**32 - 1) + bytes(20), "4294967295 bytes for 10"),
}


@pytest.mark.parametrize("attack", PLANES)
@pytest.mark.parametrize("coding", [Coding.PLANES, Coding.DIFFERENCE, Coding.XOR])
def test_planes_that_do_not_fit_are_refused_before_anything_is_written(coding: Coding, attack: str) -> None:
    body, cause = PLANES[attack]
    block = bytearray(b"before" * 3 + b"..")
    with pytest.raises(Damaged, match=cause):
        decode(coding, memoryview(body), memoryview(block), width=2)
    assert block == b"before" * 3 + b".."


@pytest.mark.parametrize("coding", [Coding.PLANES, Coding.DIFFERENCE, Coding.XOR])
def test_a_bomb_takes_no_more_memory_than_the_block(coding: Coding) -> None:
    body = struct.pack("<I", len(BOMB)) + BOMB
    block = memoryview(bytearray(1 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(Damaged, match="1073741824 bytes where 1048576 are due"):
            decode(coding, memoryview(body), block, width=1)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def sparse(count: int, gaps: bytes, values: bytes, *, length: int | None = None) -> bytes:
    head = struct.pack("<II", count, len(gaps) if length is None else length)
    return head + struct.pack("<I", len(gaps)) + gaps + struct.pack("<I", len(values)) + values


CHANGES: dict[str, tuple[bytes, str]] = {
    "no change": (sparse(0, b"", b""), "0 changes"),
    "more changes than gaps": (sparse(2, b"\x01", b"ab"), "2 changes in 1 gaps"),
    "more gaps than elements": (sparse(1, b"\x01" * 11, b"a"), "in 11 gaps of 10"),
    "gaps that end in a skip": (sparse(1, b"\x01\xff", b"a"), "not those of 1 changes"),
    "fewer changes than it says": (sparse(2, b"\xff\x01", b"ab"), "not those of 2 changes"),
    "a place after the block": (sparse(2, b"\x05\x05", b"ab"), "element 11 of a block of 10"),
    "a skip after the block": (sparse(1, b"\xff\x00", b"a"), "element 255"),
    "values too many": (sparse(1, b"\x01", b"ab"), "a stream of 2 bytes for 1"),
    "values missing": (sparse(1, b"\x01", b""), "zstd"),
    "something after the values": (sparse(1, b"\x01", b"a") + b"?", "1 bytes after its end"),
    "four thousand million changes": (sparse(2**32 - 1, b"\x01", b"a"), "4294967295 changes"),
}


@pytest.mark.parametrize("attack", CHANGES)
def test_changes_that_lie_outside_are_refused_before_anything_is_written(attack: str) -> None:
    body, cause = CHANGES[attack]
    block = bytearray(10)
    with pytest.raises(Damaged, match=cause):
        decode(Coding.SPARSE, memoryview(body), memoryview(block), width=1)
    assert block == bytes(10)


def test_no_read_is_larger_than_a_window_whatever_a_tensor_claims(good: bytes) -> None:
    """A tensor of a hundred blocks that are all the same: five bytes each, and each makes two megabytes."""
    size = 100 * BLOCK_BYTES
    frames = framed(0, b"") * 99 + framed(7, b"")
    ranges = MemoryRanges(with_frames(good, frames, shape=(size,), nbytes=size))
    asked: list[int] = []
    pack = open_pack(ranges)
    with pytest.raises(InvalidDelta, match="coding 7"):
        apply([Step(pack, pack.entries["t"])], base=lambda _, view: asked.append(len(view)), write=len)
    assert max(asked) == BLOCK_BYTES
    assert max(count for _, count in ranges.read[2:]) <= len(frames)


# Whole folders.


def test_a_pack_that_lists_another_version_than_it_promises(good: bytes, tmp_path: Path) -> None:
    base = written(tmp_path / "base", OLD)
    lies = {
        "it promises": replaced(removed=()),
        f"it promises sha256:{HASH}": replaced(target=version(f"sha256:{HASH}")),
        "the base has none": replaced(removed=("other",)),
        "the base has not what it is made from": of_first(base=HASH),
    }
    for cause, lie in lies.items():
        with pytest.raises(InvalidDelta, match=cause):
            apply_pack(opened(resealed(good, lie)), base, tmp_path / "made")
    assert {entry.name for entry in tmp_path.iterdir()} == {"base"}


def test_side_files_that_are_not_what_is_listed(tmp_path: Path) -> None:
    data = pack_of(tmp_path / "pack", OLD, OLD)
    base = written(tmp_path / "base", OLD)
    (listed,) = opened(data).header.side_files
    other = msgspec.structs.replace(listed, sha256=HASH)
    with pytest.raises(DigestMismatch, match="the one of the base is another"):
        apply_pack(opened(resealed(data, replaced(side_files=(other,)))), base, tmp_path / "made")
    for content, size in ((b"{", 1), (str(CONFIG).encode(), 99), (b"\x28\xb5\x2f\xfd" + bytes(20), 1 << 20)):
        hashed = hashlib.sha256(content).hexdigest()
        packed = msgspec.structs.replace(listed, sha256=hashed, size=size, packed=len(content))
        with pytest.raises((InvalidDelta, InvalidCheckpoint)):
            apply_pack(opened(resealed(data, replaced(side_files=(packed,))) + content), base, tmp_path / "made")
    assert {entry.name for entry in tmp_path.iterdir()} == {"base", "pack"}
