"""The messages to the engine's process: what one end writes the other reads, and nothing else is read."""

import json

import pytest

from modelswap_engine.backends.inprocess import wire
from modelswap_engine.backends.port import Layout, Load, Reply, Stage, StageRetained, TensorRange
from modelswap_engine.protocol.errors import BadRequest, ErrorBody, Internal

TENSOR = TensorRange(name="a.weight", dtype="BF16", shape=(2, 3), path="/v/m", offset=8, nbytes=12, sha256="ab" * 32)
CALLS = [
    wire.HelloCall(),
    wire.AdoptCall("w", Load(operation_id="o", digest="sha256:1", directory="/d", tensors=(TENSOR,))),
    wire.LayoutCall(),
    wire.StageCall("w", Stage(operation_id="o", digest="sha256:1", directory="/d", tensors=(TENSOR,))),
    wire.StageRetainedCall(StageRetained(operation_id="o", digest="sha256:1", directory="/d")),
    wire.PrepareCall("o"),
    wire.CommitCall("o"),
    wire.VerifyCall("w", "o", strict=True),
    wire.RollbackCall("o"),
    wire.ReleaseCall("o", previous=True),
    wire.HashesCall("w", "*.weight", 1 << 20),
    wire.MemoryCall(),
    wire.ProgressCall("w"),
    wire.CancelCall("w"),
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: type(call).__name__)
def test_a_call_is_read_as_it_was_written(call: wire.Call) -> None:
    assert wire.decode_call(wire.encode_call(7, call)) == wire.Envelope(number=7, call=call)


def test_an_answer_is_read_as_it_was_written() -> None:
    error: ErrorBody = Internal("no", advice="yes", details={"tensor": "a"}).body()
    answer = wire.Answer(
        number=7,
        reply=Reply(operation_id="o", rank=1, boot_id="b", error=error),
        facts=wire.Facts(rank=1, ranks=2, architecture="LlamaForCausalLM"),
        layout=Layout(architecture="LlamaForCausalLM", groups=(("a", "b"),), tied=()),
    )

    assert wire.decode_answer(wire.encode_answer(answer)) == answer


def test_another_release_is_named_even_where_its_calls_cannot_be_read() -> None:
    text = json.dumps({"wire": wire.WIRE + 1, "call": {"type": "something new"}})

    with pytest.raises(BadRequest, match="speaks release"):
        wire.decode_call(text)


@pytest.mark.parametrize("text", ["", "no", "[]", "{}", '{"wire":1,"call":{"type":"nothing"}}', "[" * 100_000])
def test_what_is_no_message_is_refused(text: str) -> None:
    with pytest.raises(BadRequest):
        wire.decode_call(text)
    with pytest.raises(BadRequest):
        wire.decode_answer(text)
