"""Whatever the bytes, reading a header ends in a typed refusal or in tensors that lie inside the file.

The reference reader is the differential oracle: what we accept, it must accept too, with the same tensors.
"""

import json
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import deserialize

from modelswap_engine.checkpoint.header import PREFIX_BYTES, header_length, parse_header
from modelswap_engine.checkpoint.manifest import TensorEntry
from modelswap_engine.protocol.errors import InvalidCheckpoint, UnsupportedFormat
from tests.support.checkpoints import TENSORS, pack, safetensors
from tests.support.mutations import edited, spliced

GOOD = safetensors(TENSORS, metadata={"format": "pt"})


def read(file: bytes) -> tuple[TensorEntry, ...] | None:
    """Return the tensors, or None when the file is refused with a typed error; anything else is a failure."""
    try:
        length = header_length(file[:PREFIX_BYTES], file_size=len(file), file="f")
        return parse_header(file[PREFIX_BYTES : PREFIX_BYTES + length], file_size=len(file), file="f")
    except (InvalidCheckpoint, UnsupportedFormat):
        return None


def check(file: bytes) -> None:
    entries = read(file)
    if entries is None:
        return
    reference = dict(deserialize(file))
    assert {entry.name for entry in entries} == reference.keys()
    for entry in entries:
        facts = reference[entry.name]
        assert (entry.dtype, list(entry.shape)) == (facts["dtype"], list(facts["shape"]))
        assert file[entry.offset : entry.offset + entry.nbytes] == bytes(facts["data"])


def test_the_unharmed_file_is_accepted() -> None:
    assert read(GOOD) is not None
    check(GOOD)


@settings(max_examples=200, deadline=None)
@given(file=edited(GOOD))
def test_edited_bytes(file: bytes) -> None:
    check(file)


@settings(max_examples=100, deadline=None)
@given(file=spliced(GOOD))
def test_spliced_bytes(file: bytes) -> None:
    check(file)


NUMBERS = st.one_of(st.integers(-3, 12), st.sampled_from([2**31, 2**32, 2**53, 2**63, 2**64, -(2**63)]))
JUNK = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.floats(allow_nan=False), st.text(max_size=3)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=6,
)
ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.one_of(st.sampled_from(["U8", "BF16", "F4", "F32", "nope"]), JUNK),
        "shape": st.one_of(st.lists(NUMBERS, max_size=3), JUNK),
        "data_offsets": st.one_of(st.lists(NUMBERS, min_size=2, max_size=2), JUNK),
    }
)


@settings(max_examples=200, deadline=None)
@given(
    header=st.dictionaries(st.text(max_size=3), st.one_of(ENTRY, ENTRY, JUNK), max_size=3), data=st.binary(max_size=16)
)
@example(header={"t": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}, data=b"")
def test_well_formed_json_with_odd_values(header: dict[str, Any], data: bytes) -> None:
    check(pack(json.dumps(header).encode(), data))
