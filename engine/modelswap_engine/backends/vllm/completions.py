"""vLLM's completions as they are asked for a version's trial, and what their answers say. Pure.

A number that JSON does not have (a NaN in the output) makes vLLM refuse the whole request, with 400; a log-probability
of minus infinity it calls -9999.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from modelswap_engine.backends.external.control import Continued
from modelswap_engine.protocol.errors import BadRequest

ROUTE: Final = "/v1/completions"
_INFINITE: Final = -9999.0
_GREEDY: Final = {"temperature": 0, "repetition_penalty": 1, "ignore_eos": True, "return_token_ids": True}


class _Token(msgspec.Struct):
    logprob: float | None = None


class _Chosen(msgspec.Struct):
    token_logprobs: list[float | None] = []


class _Choice(msgspec.Struct):
    token_ids: tuple[int, ...] | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    prompt_logprobs: list[dict[str, _Token] | None] | None = None
    logprobs: _Chosen | None = None


class _Completion(msgspec.Struct):
    choices: tuple[_Choice]


def going_on(text: str, *, tokens: int, logprobs: bool) -> dict[str, Any]:
    """Return the body of a request for a greedy answer; without a model's name it is the base's."""
    return {"prompt": text, "max_tokens": tokens, **_GREEDY, **({"logprobs": 0} if logprobs else {})}


def continued(answer: Mapping[str, Any]) -> Continued:
    """Return the tokens of a prompt and its answer, and the log-probabilities that were asked for.

    Raises:
        BadRequest: they are not in there.
    """
    choice = _choice(answer)
    if not choice.prompt_token_ids or not choice.token_ids:
        raise BadRequest("vLLM names no tokens in its answer")
    told = choice.logprobs.token_logprobs if choice.logprobs is not None else []
    if told and len(told) != len(choice.token_ids):
        raise BadRequest("vLLM tells other log-probabilities than those of its answer")
    return Continued(
        prompt=choice.prompt_token_ids, answer=choice.token_ids, logprobs=tuple(_finite(value) for value in told)
    )


def scoring(tokens: Sequence[int]) -> dict[str, Any]:
    """Return the body of a request for how likely tokens are."""
    return {"prompt": list(tokens), "max_tokens": 1, "logprobs": 0, "prompt_logprobs": 0, **_GREEDY}


def logprobs(answer: Mapping[str, Any], tokens: Sequence[int]) -> Sequence[float]:
    """Return the log-probability of each token but the first, and of the one that would come next.

    Raises:
        BadRequest: the answer has another shape.
    """
    choice = _choice(answer)
    rows = choice.prompt_logprobs or []
    after = choice.logprobs.token_logprobs if choice.logprobs is not None else []
    if len(rows) != len(tokens) or len(after) != 1:
        raise BadRequest("vLLM tells no log-probabilities of a prompt")
    told = [(row or {}).get(str(token), _Token()).logprob for token, row in zip(tokens, rows, strict=True)]
    return [_finite(value) for value in (*told[1:], *after)]


def _finite(value: float | None) -> float:
    return math.nan if value is None or value <= _INFINITE else value


def _choice(answer: Mapping[str, Any]) -> _Choice:
    try:
        return msgspec.convert(answer, _Completion).choices[0]
    except msgspec.ValidationError as error:
        raise BadRequest(f"vLLM's answer to {ROUTE} has another shape than expected: {error}") from None
