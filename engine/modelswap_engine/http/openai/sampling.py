"""From a request and a version's defaults to what the engine is asked: pure, every bound checked and named."""

from collections.abc import Sequence

import msgspec

from modelswap_engine.backends.port import Generate, Sampling
from modelswap_engine.http.openai.errors import ContextLengthExceeded, InvalidValue
from modelswap_engine.http.openai.requests import ChatRequest, CompletionRequest
from modelswap_engine.http.text_model import Defaults, TextModel

COMPLETION_DEFAULT_TOKENS = 16
"""What the OpenAI API says for /v1/completions without ``max_tokens``."""

_SEED_LIMIT = 2**63


def sampling_of(request: CompletionRequest | ChatRequest, defaults: Defaults) -> Sampling:
    """Return how tokens are chosen: the request's values, else the version's, else the API's.

    Raises:
        InvalidValue: names the field that is out of bounds.
    """
    temperature = _first(request.temperature, defaults.temperature, 1.0)
    top_p = _first(request.top_p, defaults.top_p, 1.0)
    top_k = _first(request.top_k, defaults.top_k, 0)
    if not 0.0 <= temperature <= 2.0:
        raise InvalidValue.of("temperature", f"{temperature} is not between 0 and 2")
    if not 0.0 < top_p <= 1.0:
        raise InvalidValue.of("top_p", f"{top_p} is not above 0 and at most 1")
    if not -1 <= top_k < 2**31:
        raise InvalidValue.of("top_k", f"{top_k} is not 0 (off) or a positive number")
    if request.seed is not None and not -_SEED_LIMIT <= request.seed < _SEED_LIMIT:
        raise InvalidValue.of("seed", "is not a 64-bit number")
    return Sampling(temperature=temperature, top_p=top_p, top_k=max(0, int(top_k)), seed=request.seed)


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)


def max_new_tokens(
    request: CompletionRequest | ChatRequest, *, prompt_tokens: int, context: int, defaults: Defaults
) -> int:
    """Return how many tokens may be generated.

    Raises:
        InvalidValue: not a positive number.
        ContextLengthExceeded: prompt and answer do not fit.
    """
    param, asked = "max_tokens", request.max_tokens
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        param, asked = "max_completion_tokens", request.max_completion_tokens
    if asked is not None and asked < 1:
        raise InvalidValue.of(param, f"{asked} is not at least 1")
    room = context - prompt_tokens
    if room < 1 or (asked is not None and asked > room):
        wanted = f" and {asked} for the answer" if asked is not None else ""
        raise ContextLengthExceeded(
            f"the context length is {context} tokens, but the request has {prompt_tokens} in the prompt{wanted}",
            advice="shorten the prompt or ask for fewer tokens",
            details={"param": "messages" if isinstance(request, ChatRequest) else "prompt"},
        )
    if asked is not None:
        return asked
    usual = defaults.max_new_tokens or (room if isinstance(request, ChatRequest) else COMPLETION_DEFAULT_TOKENS)
    return min(room, usual)


def several(order: Generate, number: int) -> tuple[Generate, ...]:
    """Return so many orders for the same prompt; with a seed, each draws from one of its own."""
    if number == 1:
        return (order,)

    def another(index: int) -> Generate:
        seed = order.sampling.seed
        sampling = order.sampling if seed is None else msgspec.structs.replace(order.sampling, seed=seed + index)
        return msgspec.structs.replace(order, request_id=f"{order.request_id}-{index}", sampling=sampling)

    return tuple(another(index) for index in range(number))


def generate_of(
    request: CompletionRequest | ChatRequest,
    *,
    request_id: str,
    prompt: Sequence[int],
    text: TextModel,
    context_limit: int,
    adapter: str = "",
    version: str,
) -> Generate:
    """Return the order for the engine.

    Raises:
        InvalidValue, ContextLengthExceeded: see above; also a token id that the model does not have.
    """
    if not prompt:
        raise InvalidValue.of("prompt", "is empty after tokenization")
    if max(prompt) >= text.vocabulary:
        raise InvalidValue.of("prompt", f"token id {max(prompt)} is not in the vocabulary of {text.vocabulary}")
    return Generate(
        request_id=request_id,
        prompt=tuple(prompt),
        max_new_tokens=max_new_tokens(
            request,
            prompt_tokens=len(prompt),
            context=min(text.context_length, context_limit),
            defaults=text.defaults,
        ),
        sampling=sampling_of(request, text.defaults),
        eos=text.eos,
        ignore_eos=request.ignore_eos,
        adapter=adapter,
        version=version,
    )
