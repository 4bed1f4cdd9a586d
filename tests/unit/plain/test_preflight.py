"""What is refused before SGLang is touched."""

import msgspec
import pytest

from modelswap_engine.backends.external.plain.preflight import check_fit, check_understood, check_whole
from modelswap_engine.backends.external.plain.sums import Parameters, parameters
from modelswap_engine.backends.port import TensorRange
from modelswap_engine.backends.sglang.answers import ServerInfo
from modelswap_engine.backends.sglang.support import refusal
from modelswap_engine.protocol.errors import IncompatibleModel, InvalidCheckpoint, ModelswapError, UnsupportedChange

TENSOR = TensorRange(name="a", dtype="BF16", shape=(2, 3), path="/f", offset=0, nbytes=12, sha256="0" * 64)
ON_CPU = ServerInfo(version="0.5.23", device="cpu", dtype="auto")

MISFITS = {
    "foreign": (msgspec.structs.replace(TENSOR, name="b"), IncompatibleModel, "not part of"),
    "another shape": (msgspec.structs.replace(TENSOR, shape=(3, 2)), IncompatibleModel, r"shape \[3, 2\]"),
    "another dtype": (msgspec.structs.replace(TENSOR, dtype="F16"), IncompatibleModel, "dtype F16"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_a_tensor_that_does_not_fit_is_named(case: str) -> None:
    tensor, error, words = MISFITS[case]
    with pytest.raises(error, match=words):
        check_fit([tensor], {"a": TENSOR})


def test_nothing_and_twice_the_same_are_refused() -> None:
    with pytest.raises(UnsupportedChange, match="no tensor"):
        check_fit([], {"a": TENSOR})
    with pytest.raises(InvalidCheckpoint, match="twice"):
        check_fit([TENSOR, TENSOR], {"a": TENSOR})
    check_fit([TENSOR], {"a": TENSOR})


def test_a_part_of_a_fused_parameter_is_refused() -> None:
    tensors = dict.fromkeys(["x.gate_proj.weight", "x.up_proj.weight", "n"], TENSOR)
    made = parameters(["x.gate_up_proj.weight", "n"], tensors)
    with pytest.raises(IncompatibleModel, match=r"up_proj.* missing"):
        check_whole(made, ["x.gate_proj.weight", "n"])
    check_whole(made, ["n"])


def test_a_model_with_tensors_that_are_not_shown_is_refused() -> None:
    with pytest.raises(UnsupportedChange, match="expert"):
        check_understood(Parameters(sources={}, own=frozenset(), unread=frozenset({"expert.w1"})))


STARTS = {
    "quantised": msgspec.structs.replace(ON_CPU, quantization="fp8"),
    "draft model": msgspec.structs.replace(ON_CPU, speculative_algorithm="EAGLE"),
    "prefill only": msgspec.structs.replace(ON_CPU, disaggregation_mode="prefill"),
    "several tokenizers": msgspec.structs.replace(ON_CPU, tokenizer_worker_num=2),
}
UNTESTED = {
    "a GPU": msgspec.structs.replace(ON_CPU, device="cuda"),
    "two ranks": msgspec.structs.replace(ON_CPU, tp_size=2),
    "another version": msgspec.structs.replace(ON_CPU, version="0.6.0"),
}


@pytest.mark.parametrize("case", STARTS)
def test_starts_that_are_known_to_go_wrong_are_refused_always(case: str) -> None:
    assert refusal(STARTS[case], "LlamaForCausalLM", experimental=True)


@pytest.mark.parametrize("case", UNTESTED)
def test_starts_that_could_not_be_run_are_a_choice(case: str) -> None:
    assert "experimental" in refusal(UNTESTED[case], "LlamaForCausalLM", experimental=False)
    assert not refusal(UNTESTED[case], "LlamaForCausalLM", experimental=True)


def test_what_was_run_is_allowed() -> None:
    assert not refusal(ON_CPU, "LlamaForCausalLM", experimental=False)


def test_errors_carry_the_tensor() -> None:
    with pytest.raises(ModelswapError) as caught:
        check_fit([msgspec.structs.replace(TENSOR, shape=(1,))], {"a": TENSOR})
    assert caught.value.details == {"tensor": "a"}
