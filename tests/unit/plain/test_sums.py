"""What SGLang's checksums must be, and what is made of a difference."""

import hashlib
from collections.abc import Sequence

from modelswap_engine.backends.external.plain.sums import Parameters, after, judge, worked_out
from modelswap_engine.backends.external.plain.sums import parameters as made_of
from modelswap_engine.backends.port import TensorRange

LAYER = "model.layers.0"
RUNTIME = [
    "model.embed_tokens.weight",
    f"{LAYER}.self_attn.qkv_proj.weight",
    f"{LAYER}.self_attn.o_proj.weight",
    f"{LAYER}.mlp.gate_up_proj.weight",
    "rotary.cos_sin_cache",
]
CHECKPOINT = [
    "model.embed_tokens.weight",
    *(f"{LAYER}.self_attn.{part}_proj.weight" for part in "qkvo"),
    f"{LAYER}.mlp.gate_proj.weight",
    f"{LAYER}.mlp.up_proj.weight",
]


def parameters(runtime: Sequence[str], checkpoint: Sequence[str], *, rows: int = 64) -> Parameters:
    tensors = {
        name: TensorRange(name=name, dtype="BF16", shape=(rows, 3), path="", offset=0, nbytes=rows * 6, sha256="")
        for name in checkpoint
    }
    return made_of(runtime, tensors)


def test_fused_parameters_are_found_by_their_names() -> None:
    made = parameters(RUNTIME, CHECKPOINT)
    assert made.sources[f"{LAYER}.self_attn.qkv_proj.weight"] == tuple(
        f"{LAYER}.self_attn.{part}_proj.weight" for part in "qkv"
    )
    assert made.own == {"rotary.cos_sin_cache"}
    assert made.unread == frozenset()
    assert (f"{LAYER}.mlp.gate_proj.weight", f"{LAYER}.mlp.up_proj.weight") in made.groups


def test_a_part_of_a_fused_parameter_is_not_taken_for_it() -> None:
    lacking = [name for name in CHECKPOINT if "k_proj" not in name]
    made = parameters(RUNTIME, lacking)
    assert f"{LAYER}.self_attn.qkv_proj.weight" in made.own
    assert made.unread == {f"{LAYER}.self_attn.q_proj.weight", f"{LAYER}.self_attn.v_proj.weight"}


def test_tensors_that_no_parameter_shows_are_named() -> None:
    expert = "model.layers.0.block_sparse_moe.experts.0.w1.weight"
    made = parameters([*RUNTIME, "model.layers.0.block_sparse_moe.experts.w13_weight"], [*CHECKPOINT, expert])
    assert made.unread == {expert}


def test_a_tied_head_is_one_with_the_embedding_on_either_side() -> None:
    both = parameters(RUNTIME, [*CHECKPOINT, "lm_head.weight"])
    assert both.tied == (("lm_head.weight", "model.embed_tokens.weight"),)
    assert ("lm_head.weight", "model.embed_tokens.weight") in both.groups
    alias = parameters([*RUNTIME, "lm_head.weight"], CHECKPOINT)
    assert alias.sources["lm_head.weight"] == ("model.embed_tokens.weight",)
    assert alias.touched(["model.embed_tokens.weight"]) == {"lm_head.weight", "model.embed_tokens.weight"}


def test_checksums_are_worked_out_from_hashes() -> None:
    made = parameters(RUNTIME, CHECKPOINT)
    joined = {name: hashlib.sha256(name.encode()).hexdigest() for name in made.joins}
    hashes = {name: hashlib.sha256(b"x" + name.encode()).hexdigest() for name in CHECKPOINT}
    known = worked_out(made, hashes, joined, digits=16)
    assert known.keys() == made.sources.keys()
    assert known["model.embed_tokens.weight"] == hashes["model.embed_tokens.weight"][:16]
    fused = f"{LAYER}.self_attn.qkv_proj.weight"
    assert known[fused] == joined[fused][:16]


def test_vocabularies_end_in_zeros_up_to_a_multiple_of_64_rows() -> None:
    made = parameters([*RUNTIME, "lm_head.weight"], [*CHECKPOINT, "lm_head.weight"], rows=70)
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        assert (made.joins[name].names, made.joins[name].zeros) == ((name,), 58 * 6)
    assert f"{LAYER}.self_attn.o_proj.weight" not in made.joins
    known = worked_out(made, dict.fromkeys(made.sources, "0" * 64), {"lm_head.weight": "1" * 64}, digits=16)
    assert known["lm_head.weight"] == "1" * 16
    assert "model.embed_tokens.weight" not in known


def test_what_differs_is_wrong_and_what_is_not_known_is_unseen() -> None:
    verdict = judge({"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "9", "c": ""})
    assert (verdict.wrong, verdict.unseen, verdict.right) == (("b",), ("c",), False)
    assert judge({"a": "1"}, {"a": "1"}).right


def test_a_parameter_that_is_missing_or_new_is_wrong() -> None:
    assert judge({"a": "1"}, {"a": "1", "b": ""}).wrong == ("b",)
    assert judge({"a": "1", "b": "2"}, {"a": "1"}).wrong == ("b",)


def test_after_an_exchange_only_what_was_touched_may_have_changed() -> None:
    live = {"a": "1", "b": "2", "c": "3"}
    assert after(live, touched={"b", "c"}, known={"b": "9"}) == {"a": "1", "b": "9", "c": ""}
