"""Refuses requests that would break a step for everybody in the batch, before they reach the worker. Pure."""

from modelswap_engine.backends.embedded.wire import ModelFacts
from modelswap_engine.backends.port import Generate
from modelswap_engine.protocol.errors import BadRequest


def check_request(request: Generate, facts: ModelFacts) -> None:
    """Refuse a request that the loaded model cannot run.

    Raises:
        BadRequest: says what to change.
    """
    sampling = request.sampling
    wanted = len(request.prompt) + request.max_new_tokens
    if not request.prompt:
        raise BadRequest("the prompt is empty", advice="send at least one token")
    if request.max_new_tokens < 1:
        raise BadRequest(f"max_new_tokens is {request.max_new_tokens}", advice="ask for at least one token")
    if wanted > facts.max_tokens:
        raise BadRequest(
            f"prompt ({len(request.prompt)} tokens) and answer ({request.max_new_tokens}) exceed the engine's "
            f"{facts.max_tokens} tokens",
            advice="shorten the prompt, or ask for fewer tokens",
            details={"code": "context_length_exceeded", "limit": str(facts.max_tokens)},
        )
    if min(request.prompt) < 0 or max(request.prompt) >= facts.vocabulary:
        raise BadRequest(
            f"the prompt has token ids outside 0..{facts.vocabulary - 1}",
            advice="use the tokenizer of the served version",
        )
    if not 0.0 <= sampling.temperature < float("inf") or not 0.0 < sampling.top_p <= 1.0 or sampling.top_k < 0:
        raise BadRequest(
            f"temperature {sampling.temperature}, top_p {sampling.top_p}, top_k {sampling.top_k}: out of range",
            advice="temperature >= 0, 0 < top_p <= 1, top_k >= 0",
        )
