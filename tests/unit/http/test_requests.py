"""What clients may ask for: everything else is refused by name, never ignored."""

import json
from typing import Any

import pytest

from modelswap_engine.http.openai import requests
from modelswap_engine.http.openai.errors import ContextLengthExceeded, InvalidValue, UnsupportedParameter
from modelswap_engine.http.openai.sampling import max_new_tokens, sampling_of
from modelswap_engine.http.text_model import Defaults
from modelswap_engine.protocol.codec import decode
from modelswap_engine.protocol.errors import BadRequest


def chat(**fields: Any) -> requests.ChatRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    return decode(json.dumps(body), requests.ChatRequest)


def completion(**fields: Any) -> requests.CompletionRequest:
    return decode(json.dumps({"model": "m", "prompt": "hi", **fields}), requests.CompletionRequest)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("echo", True), ("best_of", 2), ("logprobs", True), ("logprobs", 5), ("top_logprobs", 3),
        ("suffix", "x"), ("tools", [{}]), ("logit_bias", {"1": 5}), ("presence_penalty", 0.5),
        ("response_format", {"type": "json_object"}), ("modalities", ["audio"]), ("audio", {}),
    ],
)  # fmt: skip
def test_what_is_not_done_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(UnsupportedParameter, match=name) as caught:
        requests.refuse_unsupported(json.dumps({name: value}).encode())
    assert caught.value.details["param"] == name


def test_neutral_values_and_unknown_fields_pass() -> None:
    neutral = {"n": 1, "echo": False, "tools": [], "logit_bias": None, "presence_penalty": 0.0, "user": "u", "x": 1}
    requests.refuse_unsupported(json.dumps(neutral).encode())


@pytest.mark.parametrize(("n", "wanted"), [(None, 1), (1, 1), (16, 16)])
def test_numbers_of_choices(n: int | None, wanted: int) -> None:
    assert requests.number_of_choices(completion(n=n)) == wanted


@pytest.mark.parametrize("n", [0, -1, 17])
def test_bad_numbers_of_choices(n: int) -> None:
    with pytest.raises(InvalidValue) as caught:
        requests.number_of_choices(chat(n=n))
    assert caught.value.details["param"] == "n"


@pytest.mark.parametrize("raw", [b"", b"[]", b"1", b"{", b"\xff", b"[" * 100_000])
def test_not_an_object(raw: bytes) -> None:
    with pytest.raises(BadRequest):
        requests.refuse_unsupported(raw)


@pytest.mark.parametrize(("prompt", "wanted"), [("a", "a"), ("", ""), (["a"], "a"), ([1, 2], (1, 2)), ([[3]], (3,))])
def test_prompts(prompt: object, wanted: object) -> None:
    assert requests.prompt_of(completion(prompt=prompt)) == wanted


@pytest.mark.parametrize("prompt", [[], [[]], ["a", "b"], [1, "a"], [-1], [True], [1.5], [None], [[1], [2]]])
def test_bad_prompts(prompt: object) -> None:
    with pytest.raises((InvalidValue, UnsupportedParameter)) as caught:
        requests.prompt_of(completion(prompt=prompt))
    assert caught.value.details["param"] == "prompt"


def test_text_parts_are_joined_and_others_refused() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert requests.conversation_of(chat(messages=[{"role": "user", "content": parts}])) == [
        {"role": "user", "content": "ab"}
    ]
    with pytest.raises(UnsupportedParameter, match="image_url"):
        requests.conversation_of(chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]))
    with pytest.raises(InvalidValue, match="messages"):
        requests.conversation_of(chat(messages=[]))


@pytest.mark.parametrize("stop", [["a"] * 5, "", [""], "x" * 1001])
def test_bad_stop_strings(stop: object) -> None:
    with pytest.raises(InvalidValue, match="stop"):
        requests.stop_strings(completion(stop=stop))


def test_template_options_may_not_replace_ours() -> None:
    options = {"enable_thinking": False}
    assert requests.template_options(chat(chat_template_kwargs=options)) == options
    with pytest.raises(InvalidValue, match="messages"):
        requests.template_options(chat(chat_template_kwargs={"messages": []}))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -0.1}, "temperature"), ({"temperature": 2.1}, "temperature"), ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"), ({"top_k": -2}, "top_k"), ({"seed": 2**63}, "seed"),
    ],
)  # fmt: skip
def test_sampling_bounds(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        sampling_of(completion(**fields), Defaults())
    assert caught.value.details["param"] == param


def test_the_request_beats_the_version_beats_the_api() -> None:
    assert sampling_of(completion(), Defaults()).temperature == 1.0
    assert sampling_of(completion(), Defaults(temperature=0.6)).temperature == 0.6
    assert sampling_of(completion(temperature=0), Defaults(temperature=0.6)).temperature == 0.0


def limit(request: requests.CompletionRequest | requests.ChatRequest, prompt: int, usual: int | None = None) -> int:
    defaults = Defaults(max_new_tokens=usual)
    return max_new_tokens(request, prompt_tokens=prompt, context=100, defaults=defaults)


def test_token_limits() -> None:
    assert limit(completion(), 10) == 16
    assert limit(completion(), 95) == 5
    assert limit(chat(), 10) == 90
    assert limit(chat(), 10, 7) == 7
    assert limit(chat(max_tokens=5), 10) == 5
    assert limit(chat(max_tokens=5, max_completion_tokens=6), 10) == 6
    assert limit(completion(max_tokens=90), 10) == 90


@pytest.mark.parametrize(("prompt", "fields"), [(100, {}), (101, {}), (10, {"max_tokens": 91})])
def test_what_does_not_fit_says_so_with_figures(prompt: int, fields: dict[str, Any]) -> None:
    with pytest.raises(ContextLengthExceeded, match=f"100 tokens.*{prompt}") as caught:
        limit(completion(**fields), prompt)
    assert caught.value.code == "context_length_exceeded"


def test_zero_tokens_is_refused_by_name() -> None:
    with pytest.raises(InvalidValue, match="max_completion_tokens"):
        limit(chat(max_completion_tokens=0), 1)
