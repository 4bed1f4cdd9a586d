"""Whatever an index says, reading it ends in a typed refusal, or in exactly the tensors of its shards."""

import json
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from modelswap_engine.checkpoint.index import join_shards, parse_index
from modelswap_engine.checkpoint.manifest import TensorEntry
from modelswap_engine.protocol.errors import InvalidCheckpoint
from tests.support.mutations import edited, spliced

SHARDS = ("a.safetensors", "b.safetensors")
NAMES = ("p", "q", "r")
GOOD = json.dumps({"metadata": {"total_size": 6}, "weight_map": dict(zip(NAMES, SHARDS * 2, strict=False))}).encode()


def read(data: bytes) -> dict[str, str] | None:
    """Return what the index says, None when it is refused as it must be; anything else is a failure."""
    try:
        return parse_index(data)
    except InvalidCheckpoint:
        return None


def check(data: bytes) -> None:
    """What is accepted is what any reader of JSON sees, and names plain files only."""
    found = read(data)
    if found is None:
        return
    assert found == json.loads(data)["weight_map"]
    for tensor, shard in found.items():
        assert tensor
        assert shard.endswith(".safetensors")
        assert not {"/", "\\", "\0"} & set(shard)


def test_the_unharmed_index_is_accepted() -> None:
    assert read(GOOD) is not None
    check(GOOD)


@settings(max_examples=300, deadline=None)
@given(file=edited(GOOD))
def test_edited_bytes(file: bytes) -> None:
    check(file)


@settings(max_examples=200, deadline=None)
@given(file=spliced(GOOD))
def test_spliced_bytes(file: bytes) -> None:
    check(file)


words = st.sampled_from([*SHARDS, "../a.safetensors", "/a.safetensors", "a.bin", ".safetensors", "", "a\0.safetensors"])
odd = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=6), words),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4) | words, inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(document=st.dictionaries(st.sampled_from(["weight_map", "metadata", "x"]), odd, max_size=3) | odd)
@example(document={"weight_map": {}})
@example(document={"weight_map": {"\ud800": "a.safetensors"}})
@example(document={"weight_map": {"p": "a.safetensors\n"}})
def test_odd_documents(document: Any) -> None:
    check(json.dumps(document).encode())


def entry(name: str, file: str) -> TensorEntry:
    return TensorEntry(name=name, dtype="U8", shape=(1,), nbytes=1, sha256="0" * 64, file=file, offset=0)


placed = st.dictionaries(st.sampled_from(NAMES), st.sampled_from(SHARDS))


@settings(max_examples=300, deadline=None)
@given(listed=placed, held=st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(SHARDS)), max_size=5))
def test_shards_that_disagree_with_the_index(listed: dict[str, str], held: list[tuple[str, str]]) -> None:
    shards = [(shard, [entry(name, shard) for name, file in held if file == shard]) for shard in SHARDS]
    try:
        found = join_shards(shards, listed)
    except InvalidCheckpoint:
        assert sorted(listed.items()) != sorted(held)
    else:
        assert sorted(listed.items()) == sorted(held)
        assert {name: item.file for name, item in found.items()} == listed
