"""What vLLM's completions say of a prompt, as its answers look, and what is not finite or not there."""

import math
from typing import Any

import pytest

from modelswap_engine.backends.vllm import completions
from modelswap_engine.protocol.errors import BadRequest

TOKENS = (5, 6, 7)


def answer(*, rows: list[Any] | None = None, after: list[Any] | None = None) -> dict[str, Any]:
    given = [None, {"6": {"logprob": -1.5, "rank": 3}, "9": {"logprob": -0.1, "rank": 1}}, {"7": {"logprob": -2.0}}]
    choice = {
        "token_ids": [48, 49],
        "prompt_token_ids": list(TOKENS),
        "prompt_logprobs": given if rows is None else rows,
        "logprobs": {"token_logprobs": [-0.25] if after is None else after, "tokens": ["c"]},
    }
    return {"id": "cmpl-1", "choices": [choice], "usage": None}


def test_each_token_but_the_first_and_the_one_that_comes_next() -> None:
    assert completions.logprobs(answer(), TOKENS) == [-1.5, -2.0, -0.25]


def test_an_answer_with_what_was_asked_of_its_tokens() -> None:
    said = completions.continued(answer(after=[-0.25, -0.5]))
    assert (said.prompt, said.answer, said.logprobs) == (TOKENS, (48, 49), (-0.25, -0.5))
    assert not math.isfinite(completions.continued(answer(after=[-0.25, -9999.0])).logprobs[1])
    assert completions.continued(answer(after=[])).logprobs == ()
    with pytest.raises(BadRequest, match="log-probabilities"):
        completions.continued(answer(after=[-0.25]))


@pytest.mark.parametrize(
    ("wrong", "place"),
    [
        ({"after": [None]}, 2),
        ({"after": [-9999.0]}, 2),
        ({"rows": [None, {"6": {"logprob": None}}, {"7": {"logprob": -2.0}}]}, 0),
        ({"rows": [None, {"6": {"logprob": -1.5}}, {"7": {"logprob": -9999.0}}]}, 1),
        ({"rows": [None, {"6": {"logprob": -1.5}}, {"8": {"logprob": -2.0}}]}, 1),
        ({"rows": [None, {"6": {"logprob": -1.5}}, None]}, 1),
    ],
)
def test_one_that_is_not_finite_or_not_told_is_not_a_number(wrong: dict[str, Any], place: int) -> None:
    found = completions.logprobs(answer(**wrong), TOKENS)
    assert [number for number, value in enumerate(found) if not math.isfinite(value)] == [place]


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"choices": []},
        {"choices": [{}]},
        {"choices": [{"prompt_logprobs": None, "logprobs": None}]},
        {"choices": "none"},
        answer(rows=[None]),
        answer(after=[]),
    ],
)
def test_an_answer_of_another_shape_is_none(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        completions.logprobs(wrong, TOKENS)


def test_an_answer_without_tokens_is_none() -> None:
    with pytest.raises(BadRequest, match="tokens"):
        completions.continued({"choices": [{"token_ids": None, "prompt_token_ids": None}]})
