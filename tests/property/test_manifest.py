"""The content digest depends on content and on nothing else; a manifest survives its file; a diff is exact."""

import tempfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelswap_engine.checkpoint import manifest as manifests
from modelswap_engine.checkpoint.build import build_manifest
from modelswap_engine.checkpoint.diff import Diff, diff
from modelswap_engine.checkpoint.manifest import Manifest, SideFile, TensorEntry, make_manifest
from modelswap_engine.protocol.errors import InvalidCheckpoint, ManifestMismatch
from tests.support.checkpoints import CONFIG, Tensor, write_checkpoint

NAMES = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=1, max_size=12).filter(
    lambda name: name != "__metadata__"
)
ITEM = {"U8": 1, "BF16": 2, "F32": 4, "I64": 8}


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(sorted(ITEM)))
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    count = ITEM[dtype]
    for size in shape:
        count *= size
    return dtype, shape, draw(st.binary(min_size=count, max_size=count))


CHECKPOINTS = st.dictionaries(NAMES, tensors(), min_size=1, max_size=6)


@settings(max_examples=40, deadline=None)
@given(content=CHECKPOINTS, shards=st.integers(1, 4), order=st.randoms(use_true_random=False), note=st.text(max_size=5))
def test_sharding_order_and_metadata_do_not_count(content, shards, order, note) -> None:  # type: ignore[no-untyped-def]
    shuffled = list(content.items())
    order.shuffle(shuffled)
    with tempfile.TemporaryDirectory() as folder:
        one = build_manifest(write_checkpoint(Path(folder, "one"), content))
        many = build_manifest(
            write_checkpoint(Path(folder, "many"), dict(shuffled), shards=shards, metadata={"note": note})
        )
    assert one.digest == many.digest
    assert diff(one, many).empty
    assert {entry.name for entry in many.tensors} == content.keys()


@settings(max_examples=40, deadline=None)
@given(content=CHECKPOINTS, data=st.data())
def test_one_flipped_bit_changes_the_digest_and_names_its_tensor(content, data) -> None:  # type: ignore[no-untyped-def]
    name = data.draw(st.sampled_from(sorted(content)))
    dtype, shape, raw = content[name]
    if not raw:
        return
    bit = data.draw(st.integers(0, len(raw) * 8 - 1))
    flipped = bytearray(raw)
    flipped[bit // 8] ^= 1 << (bit % 8)
    with tempfile.TemporaryDirectory() as folder:
        before = build_manifest(write_checkpoint(Path(folder, "a"), content))
        after = build_manifest(write_checkpoint(Path(folder, "b"), content | {name: (dtype, shape, bytes(flipped))}))
    assert before.digest != after.digest
    assert diff(before, after) == Diff(changed=(name,))


@st.composite
def manifest_values(draw: st.DrawFn) -> Manifest:
    # Few names, shapes and hashes, so that two draws have much in common.
    entries = {}
    for name in draw(st.sets(st.sampled_from("abcdef"), min_size=1)):
        dtype = draw(st.sampled_from(["U8", "I8"]))
        size = draw(st.integers(0, 2))
        entries[name] = TensorEntry(
            name=name, dtype=dtype, shape=(size,), nbytes=size, file="model.safetensors",
            offset=draw(st.integers(10, 20)), sha256=draw(st.sampled_from("0123")) * 64,
        )  # fmt: skip
    sides = {
        name: SideFile(name=name, size=1, sha256="0" * 64, canonical_sha256=draw(st.sampled_from("0123")) * 64)
        for name in draw(st.sets(st.sampled_from(["config.json", "tokenizer.json", "merges.txt"])))
    }
    return make_manifest(entries, sides, architecture=draw(st.sampled_from(["", "LlamaForCausalLM"])))


def apply(live: Manifest, change: Diff, target: Manifest) -> Manifest:
    """Carry out a diff literally: take from the target what the diff names, and nothing else."""
    entries = {name: entry for name, entry in live.by_name.items() if name not in change.removed}
    for name in (*change.changed, *change.added, *change.reshaped, *change.retyped):
        entries[name] = target.by_name[name]
    sides = {side.name: side for side in live.side_files if side.name not in change.side_changed}
    sides |= {side.name: side for side in target.side_files if side.name in change.side_changed}
    return make_manifest(entries, sides, architecture=target.architecture)


@settings(max_examples=150)
@given(live=manifest_values(), target=manifest_values())
def test_applying_a_diff_gives_the_target(live: Manifest, target: Manifest) -> None:
    assert apply(live, diff(live, target), target).digest == target.digest


@settings(max_examples=150)
@given(live=manifest_values(), target=manifest_values())
def test_diff_names_nothing_that_is_equal(live: Manifest, target: Manifest) -> None:
    found = diff(live, target)
    assert found.empty == (live.digest == target.digest)
    for name in (*found.changed, *found.reshaped, *found.retyped):
        old, new = live.by_name[name], target.by_name[name]
        assert (old.dtype, old.shape, old.sha256) != (new.dtype, new.shape, new.sha256)
    assert not set(found.changed) & {*found.reshaped, *found.retyped, *found.added, *found.removed}
    assert found.same_layout == (
        {(e.name, e.dtype, e.shape) for e in live.tensors} == {(e.name, e.dtype, e.shape) for e in target.tensors}
    )
    back = diff(target, live)
    assert (back.added, back.removed, back.changed) == (found.removed, found.added, found.changed)


@settings(max_examples=100)
@given(value=manifest_values())
def test_a_manifest_survives_its_file(value: Manifest) -> None:
    data = manifests.encode(value)
    assert manifests.decode(data) == value
    assert manifests.encode(manifests.decode(data)) == data


@settings(max_examples=100)
@given(value=manifest_values(), data=st.data())
def test_a_damaged_manifest_file_is_refused_or_means_the_same(value: Manifest, data: st.DataObject) -> None:
    good = bytearray(manifests.encode(value))
    position = data.draw(st.integers(0, len(good) - 1))
    good[position] = data.draw(st.integers(0, 255))
    try:
        read = manifests.decode(bytes(good))
    except (InvalidCheckpoint, ManifestMismatch):
        return
    assert read.digest == value.digest  # only what the digest leaves out could change: file, offset, side file sizes


@settings(max_examples=100)
@given(junk=st.one_of(st.binary(max_size=200), st.text(max_size=50).map(str.encode)))
def test_junk_is_a_typed_error(junk: bytes) -> None:
    with pytest.raises(InvalidCheckpoint, match=r"modelswap\.manifest\.json"):
        manifests.decode(junk)


def test_unknown_fields_are_ignored_and_newer_formats_refused(tmp_path: Path) -> None:
    value = build_manifest(write_checkpoint(tmp_path))
    document = msgspec.json.decode(manifests.encode(value))
    assert manifests.decode(msgspec.json.encode(document | {"signedBy": "somebody"})) == value
    with pytest.raises(InvalidCheckpoint, match="format 2 is not known"):
        manifests.decode(msgspec.json.encode(document | {"format": 2}))


def test_an_incomplete_manifest_has_no_digest() -> None:
    entry = TensorEntry(name="t", dtype="U8", shape=(1,), nbytes=1, file="model.safetensors", offset=9)
    value = make_manifest({"t": entry}, {}, architecture="")
    assert not value.complete
    with pytest.raises(ValueError, match="no digest"):
        _ = value.digest


def test_the_digest_is_the_documented_one(tmp_path: Path) -> None:
    import hashlib
    import json

    write_checkpoint(tmp_path, {"t": ("U8", (2,), b"\x01\x02")}, side_files={"config.json": CONFIG, "merges.txt": b"x"})
    config = json.dumps(CONFIG, sort_keys=True, separators=(",", ":"))
    content = [
        "modelswap.digest/1",
        [["t", "U8", [2], 2, hashlib.sha256(b"\x01\x02").hexdigest()]],
        [
            ["config.json", hashlib.sha256(config.encode()).hexdigest()],
            ["merges.txt", hashlib.sha256(b"x").hexdigest()],
        ],
    ]
    expected = hashlib.sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()
    assert build_manifest(tmp_path).digest == f"sha256:{expected}"
