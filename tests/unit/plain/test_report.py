"""Checksums of an engine as hashes of checkpoint tensors."""

from pathlib import Path

from modelswap_engine.backends.external.plain.live import Held
from modelswap_engine.backends.external.plain.report import hashes
from modelswap_engine.backends.external.plain.sums import parameters
from modelswap_engine.backends.port import TensorRange

NAMES = ["x.gate_proj.weight", "x.up_proj.weight", "norm.weight", "model.embed_tokens.weight", "lm_head.weight"]
TENSORS = {
    name: TensorRange(name=name, dtype="BF16", shape=(64,), path="/f", offset=0, nbytes=2, sha256=f"hash of {name}")
    for name in NAMES
}
MADE = parameters(["x.gate_up_proj.weight", "norm.weight", "model.embed_tokens.weight"], TENSORS)
SUMS = {"x.gate_up_proj.weight": "1", "norm.weight": "2", "model.embed_tokens.weight": "3"}
HELD = Held(digest="d", directory=Path("/d"), tensors=TENSORS, sums={0: SUMS, 1: SUMS})


def test_right_parameters_prove_the_tensors_that_they_are_made_of() -> None:
    found = hashes(HELD, MADE, {0: SUMS, 1: SUMS}, pattern="*", seconds=0.5)
    assert found.tensors == {name: f"hash of {name}" for name in NAMES}
    assert (found.bytes, found.runtime, found.unverifiable) == (10, (), ())


def test_a_pattern_chooses_tensors() -> None:
    found = hashes(HELD, MADE, {0: SUMS, 1: SUMS}, pattern="*.up_proj.*", seconds=0.5)
    assert set(found.tensors) == {"x.up_proj.weight"}


def test_one_wrong_rank_is_enough() -> None:
    wrong = {**SUMS, "x.gate_up_proj.weight": "9"}
    found = hashes(HELD, MADE, {0: SUMS, 1: wrong}, pattern="*", seconds=0.5)
    assert found.tensors.keys() == {"norm.weight", "model.embed_tokens.weight", "lm_head.weight"}
    (item,) = found.runtime
    assert (item.name, item.expected, item.actual) == ("x.gate_up_proj.weight", "1", "9")
    assert item.sources == ("x.gate_proj.weight", "x.up_proj.weight")


def test_what_cannot_be_seen_is_never_right() -> None:
    unseen = {**SUMS, "norm.weight": ""}
    held = Held(digest="d", directory=Path("/d"), tensors=TENSORS, sums={0: unseen})
    found = hashes(held, MADE, {0: SUMS}, pattern="*", seconds=0.5)
    assert "norm.weight" not in found.tensors
    assert found.unverifiable == ("norm.weight",)


def test_versions_are_judged_on_every_rank() -> None:
    assert HELD.judge({0: SUMS, 1: SUMS}).right
    assert HELD.judge({0: SUMS}).wrong == ("ranks",)
    assert HELD.judge({0: SUMS, 1: {**SUMS, "norm.weight": "9"}}).wrong == ("norm.weight",)
