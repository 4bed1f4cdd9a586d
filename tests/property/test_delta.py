"""Packs are exact whatever the bytes; damaged ones make the right bytes or none; the planned way is the cheapest."""

import contextlib
import hashlib
import itertools
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelswap_engine.checkpoint.manifest import TensorEntry
from modelswap_engine.delta import coding
from modelswap_engine.delta.coding import Coding, Damaged, decode, encode
from modelswap_engine.delta.folder import apply_pack
from modelswap_engine.delta.layout import Header, PackedTensor, Version
from modelswap_engine.delta.local import opened_pack
from modelswap_engine.delta.pack import Step, apply
from modelswap_engine.delta.plan import Route, plan
from modelswap_engine.protocol.errors import DigestMismatch, InvalidDelta, UnsupportedFormat
from tests.support.checkpoints import Tensor
from tests.support.deltas import folder_of, made, opened, pack_of, reader, written
from tests.support.mutations import edited, spliced

REFUSED = (InvalidDelta, UnsupportedFormat, DigestMismatch)
WIDTHS = {"U8": 1, "F8_E4M3": 1, "BF16": 2, "F16": 2, "F32": 4, "I64": 8, "F64": 8, "C64": 8}
# Values where arithmetic and bits disagree: NaNs with payloads, both zeros, infinities, all bits.
ODD = {
    2: [0x7FC1, 0xFFC1, 0x8000, 0x0000, 0x7F80, 0xFFFF, 0x0001],
    4: [0x7FC00001, 0xFFC00001, 0x80000000, 0, 0x7F800000, 0xFFFFFFFF],
    8: [0x7FF8000000000001, 1 << 63, 0, (1 << 64) - 1],
    1: [0x80, 0x00, 0x7F, 0xFF],
}


@st.composite
def pairs(draw: st.DrawFn, width: int, count: int) -> tuple[bytes, bytes]:
    """Two blocks of elements: from the same in all to the same in none."""
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    kind = np.dtype(f"<u{width}")
    old = random.integers(0, 1 << (8 * width), count, dtype=kind)
    if draw(st.booleans()):
        old[random.random(count) < 0.3] = draw(st.sampled_from(ODD[width]))
    new = old.copy()
    where = random.random(count) < draw(st.sampled_from([0.0, 0.001, 0.01, 0.1, 0.49, 0.51, 0.9, 1.0]))
    how = draw(st.sampled_from(["random", "step", "odd", "clustered", "signs", "nibbles"]))
    if how == "random":
        new[where] = random.integers(0, 1 << (8 * width), int(where.sum()), dtype=kind)
    elif how == "step":
        new[where] += random.choice(np.array([1, (1 << (8 * width)) - 1], kind), int(where.sum()))
    elif how == "odd":
        new[where] = draw(st.sampled_from(ODD[width]))
    elif how == "signs":
        new[where] ^= kind.type(1 << (8 * width - 1))
    elif how == "nibbles":  # weights of four bits in words: some of them are others
        shifts = random.integers(0, 2 * width, int(where.sum()), dtype=kind) * kind.type(4)
        new[where] ^= random.integers(1, 16, int(where.sum()), dtype=kind) << shifts
    else:
        begin = draw(st.integers(0, count))
        new[begin : begin + count // 3] ^= kind.type(1)
    return old.tobytes(), new.tobytes()


@settings(max_examples=150, deadline=None)
@given(data=st.data(), width=st.sampled_from([1, 2, 4, 8]), count=st.integers(1, 3000), with_base=st.booleans())
def test_a_block_is_what_it_was(data: st.DataObject, width: int, count: int, with_base: bool) -> None:
    old, new = data.draw(pairs(width, count))
    written = encode(memoryview(new), memoryview(old) if with_base else None, width=width)
    block = bytearray(old if with_base else bytes(len(new)))
    decode(written.coding, memoryview(written.body), memoryview(block), width=width)
    assert bytes(block) == new
    assert len(written.body) <= len(new)
    assert with_base or not written.coding.needs_base
    assert (written.coding is Coding.SAME) == (with_base and old == new)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), width=st.sampled_from([1, 2, 4, 8]), count=st.integers(1, 3000))
def test_each_coding_makes_the_same_bits_whichever_is_the_shortest(data: st.DataObject, width: int, count: int) -> None:
    old, new = data.draw(pairs(width, count))
    before, after = (np.frombuffer(each, f"<u{width}") for each in (old, new))
    bodies = {
        Coding.RAW: new,
        Coding.PLANES: coding._planes(after),
        Coding.DIFFERENCE: coding._planes(coding._folded(after, before)),
        Coding.XOR: coding._planes(after ^ before),
    }
    if len(places := np.flatnonzero(after != before)):
        bodies[Coding.SPARSE] = coding._sparse(places, coding._folded(after[places], before[places]))
    for one, body in bodies.items():
        block = bytearray(old)
        decode(one, memoryview(body), memoryview(block), width=width)
        assert bytes(block) == new, one


@settings(max_examples=150, deadline=None)
@given(data=st.data(), one=st.sampled_from(Coding), width=st.sampled_from([1, 2, 4, 8]))
def test_any_bytes_are_a_block_or_refused(data: st.DataObject, one: Coding, width: int) -> None:
    old, new = data.draw(pairs(width, 64))
    written = encode(memoryview(new), memoryview(old), width=width)
    body = data.draw(st.one_of(edited(written.body), spliced(written.body)) if written.body else st.binary(max_size=40))
    block = bytearray(old)
    try:
        decode(one, memoryview(body), memoryview(block), width=width)
    except Damaged:
        return
    assert len(block) == len(old)


@st.composite
def checkpoints(draw: st.DrawFn) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Two versions: tensors that are the same, changed, reshaped, retyped, added or removed; empty ones and scalars."""
    old, new = dict[str, Tensor](), dict[str, Tensor]()
    for number in range(draw(st.integers(1, 5))):
        name = f"layer.{number}"
        dtype = draw(st.sampled_from(sorted(WIDTHS)))
        shape = draw(st.sampled_from([(), (0,), (3, 0, 2), (1,), (7, 3), (40, 30)]))
        before, after = draw(pairs(WIDTHS[dtype], int(np.prod(shape)))) if 0 not in shape else (b"", b"")
        fate = draw(st.sampled_from(["kept", "changed", "changed", "reshaped", "retyped", "added", "removed"]))
        if fate != "added":
            old[name] = dtype, shape, before
        if fate == "kept":
            new[name] = dtype, shape, before
        elif fate == "retyped":
            new[name] = "U8", (*shape, WIDTHS[dtype]), after
        elif fate != "removed":
            new[name] = dtype, (*shape, 1) if fate == "reshaped" else shape, after
    return old | {"always": ("U8", (1,), b"a")}, new | {"always": ("U8", (1,), b"a")}


@settings(max_examples=40, deadline=None)
@given(content=checkpoints(), shards=st.integers(1, 2))
def test_a_pack_makes_the_other_version_and_leaves_its_base(content, shards) -> None:  # type: ignore[no-untyped-def]
    old, new = content
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        pack = pack_of(place / "packed", old, new)
        base = written(place / "base", old, shards=min(shards, len(old)))
        before = {file: (base.contents.directory / file).read_bytes() for file in base.contents.paths}
        with opened_pack(place / "packed/pack") as source:
            promised = apply_pack(source, base, place / "made", shard_bytes=2000)
        target = folder_of(place / "packed/new").manifest
        assert promised.digest == folder_of(place / "made").manifest.digest == target.digest
        assert {file: (base.contents.directory / file).read_bytes() for file in before} == before
        for entry in opened(pack).header.tensors:
            assert made(opened(pack), entry.name, old[entry.name][2] if entry.base else None) == new[entry.name][2]


OLD: dict[str, Tensor] = {
    "a": ("BF16", (300,), bytes(600)),
    "b": ("F32", (40,), bytes(range(160))),
    "c": ("U8", (9,), b"unchanged"),
}
NEW: dict[str, Tensor] = {
    "a": ("BF16", (300,), bytes(400) + b"\x01\x80" * 3 + bytes(194)),
    "b": ("F32", (40,), bytes(range(1, 161))),
    "c": OLD["c"],
    "d": ("U8", (500,), b"added" * 100),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return pack_of(tmp_path_factory.mktemp("good") / "pack", OLD, NEW)


def check(data: bytes) -> None:
    """Make all that a pack has: what it makes is right, or it is refused with a typed error."""
    try:
        pack = opened(data)
    except REFUSED:
        return
    for entry in pack.header.tensors:
        try:
            result = made(pack, entry.name, OLD[entry.name][2] if entry.base else None)
        except REFUSED:
            continue
        assert result == NEW[entry.name][2]


def test_each_flipped_bit_is_refused_or_harmless(good: bytes) -> None:
    check(good)
    for position in range(len(good)):
        damaged = bytearray(good)
        damaged[position] ^= 1 << (position % 8)
        check(bytes(damaged))


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_edited_and_spliced_packs_are_refused_or_harmless(good: bytes, data: st.DataObject) -> None:
    check(data.draw(st.one_of(edited(good), spliced(good))))


@settings(max_examples=15, deadline=None)
@given(versions=st.lists(st.binary(min_size=64, max_size=64), min_size=2, max_size=5, unique=True))
def test_a_chain_makes_what_its_steps_make_one_by_one(versions: list[bytes]) -> None:
    with tempfile.TemporaryDirectory() as name:
        packs = [
            opened(pack_of(Path(name, str(number)), {"t": ("U8", (64,), old)}, {"t": ("U8", (64,), new)}))
            for number, (old, new) in enumerate(itertools.pairwise(versions))
        ]
    result = bytearray()
    apply([Step(pack, pack.entries["t"]) for pack in packs], base=reader(versions[0]), write=result.extend)
    assert bytes(result) == versions[-1]
    result.clear()
    with contextlib.suppress(DigestMismatch):
        apply([Step(pack, pack.entries["t"]) for pack in packs], base=reader(bytes(63) + b"?"), write=result.extend)
        assert bytes(result) == versions[-1]


# The planner, against trying everything.

HASHES = [hashlib.sha256(bytes([number])).hexdigest() for number in range(4)]
ENTRIES = st.builds(
    lambda base, target, size, nbytes: PackedTensor(
        name="t", dtype="U8", shape=(nbytes,), nbytes=nbytes, sha256=target, base=base, offset=0, size=size
    ),
    st.sampled_from(["", *HASHES]),
    st.sampled_from(HASHES),
    st.sampled_from([10, 10, 20, 30, 50, 90, 100]),
    st.sampled_from([100, 100, 100, 99]),
).filter(lambda entry: entry.base != entry.sha256)
SOME = Version(digest="sha256:" + HASHES[0], bytes=100)


def every_way(
    wanted: str, held: frozenset[str], entries: Mapping[int, PackedTensor], steps: int
) -> Iterator[list[int]]:
    if steps:
        for key, entry in entries.items():
            if entry.sha256 == wanted and entry.nbytes == 100:
                if not entry.base or entry.base in held:
                    yield [key]
                else:
                    yield from ([*way, key] for way in every_way(entry.base, held, entries, steps - 1))


@settings(max_examples=300, deadline=None)
@given(
    found=st.lists(ENTRIES, max_size=9),
    held=st.frozensets(st.sampled_from(HASHES), max_size=2),
    steps=st.integers(0, 4),
    step_cost=st.sampled_from([0, 10]),
)
def test_the_planned_way_is_the_cheapest_of_all(
    found: list[PackedTensor], held: frozenset[str], steps: int, step_cost: int
) -> None:
    entries = dict(enumerate(found))
    packs = {key: Header(base=SOME, target=SOME, tensors=(entry,)) for key, entry in entries.items()}
    wanted = TensorEntry(name="w", dtype="U8", shape=(100,), nbytes=100, file="f", offset=0, sha256=HASHES[0])
    routes = plan([wanted], held=held, packs=packs, most_steps=steps, step_cost=step_cost)
    route: Route[int] = routes[HASHES[0]]
    ways = list(every_way(HASHES[0], held, entries, steps))
    costs = [sum(entries[key].size + step_cost for key in way) for way in ways]
    assert route.held == (HASHES[0] in held)
    assert route.cost == (0 if route.held else min([100, *costs]))
    assert len(route.links) <= steps
    if route.links:
        assert route.cost < wanted.nbytes
        assert [link.pack for link in route.links] in ways
        cheapest = [way for way, cost in zip(ways, costs, strict=True) if cost == route.cost]
        assert len(route.links) == min(map(len, cheapest))
