"""Runs staged weights once, beside the live ones, before anybody can be answered from them.

Weights that are finite can still give output that is not: half precision overflows in the middle of a layer. The trial
is a copy of the module over the memory of every tensor that stays, with the staged ones in their places; it has no KV
cache and is gone afterwards. It runs in the thread that staged, which gives way to decoding.
"""

import copy
from collections.abc import Mapping
from typing import Any, Final

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from modelswap_engine.backends.port import PromptTrial
from modelswap_engine.backends.trials import ANSWER_TOKENS, not_finite, require_alike

_MANAGER: Final = "_cached_continuous_batching_manager"


def trial_of(
    model: PreTrainedModel, tensors: Mapping[str, torch.Tensor], *, config: PreTrainedConfig | None = None
) -> PreTrainedModel:
    """Return a copy of a model in which the named parameters and buffers are other tensors.

    Args:
        model: runs meanwhile; nothing of it is changed.
        tensors: by runtime name; what is not named is shared with the model.
        config: of the model, as it is between two steps: the library writes what a step needs into the config of a
            model that runs, so that a copy of it might fail, or compute as in the middle of a step for ever.
    """
    memo: dict[int, object] = {id(getattr(model, _MANAGER, None)): None}
    if config is not None:
        memo |= _in_place_of(model.config, copy.deepcopy(config))
    for name, held in [*model.named_parameters(), *model.named_buffers()]:
        tensor = tensors.get(name, held.detach())
        memo[id(held)] = torch.nn.Parameter(tensor, requires_grad=False) if _is_parameter(held) else tensor
    return copy.deepcopy(model, memo)


def _in_place_of(running: PreTrainedConfig, still: PreTrainedConfig) -> dict[int, object]:
    """Return what to take instead of a config, and instead of those inside it, that its modules refer to."""
    memo: dict[int, object] = {id(running): still}
    for name in running.sub_configs:
        inner = getattr(running, name, None)
        if isinstance(inner, PreTrainedConfig):
            memo |= _in_place_of(inner, getattr(still, name))
    return memo


def _is_parameter(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter)


def check_output(model: PreTrainedModel, *, vocabulary: int, tokens: int) -> None:
    """Run one short prompt and look at what comes out; no generation loop may be using the model.

    Args:
        model: what is tried.
        vocabulary: how many token ids it knows.
        tokens: length of the prompt; 0 tries nothing.

    Raises:
        ChecksFailed: the output holds values that are not finite.
    """
    if not tokens:
        return
    _logits(model, torch.arange(0, vocabulary, max(1, vocabulary // tokens), device=model.device)[:tokens])


def check_prompt(
    trial: PreTrainedModel, live: PreTrainedModel, item: PromptTrial, *, number: int, longest: int
) -> None:
    """Run a prompt; where it is to be compared, see how likely the live version's answer is to both.

    Args:
        trial: the wanted version.
        live: the version that serves; no generation loop may be using this copy of it.
        item: the prompt, and by how much the mean log-probability of the answer may change.
        number: of the prompt, for the message.
        longest: tokens that prompt and answer may have.

    Raises:
        ChecksFailed: the output is not finite, or has changed by more than is allowed.
    """
    prompt = torch.tensor(item.prompt[: longest - ANSWER_TOKENS], device=trial.device)
    if item.max_logprob_delta is None:
        _logits(trial, prompt)
        return
    answered = _answered(live, prompt)
    change = _mean_logprob(trial, answered, len(prompt)) - _mean_logprob(live, answered, len(prompt))
    require_alike(change, allowed=item.max_logprob_delta, number=number)


def _answered(model: PreTrainedModel, prompt: torch.Tensor) -> torch.Tensor:
    """Return a prompt with its greedy answer."""
    tokens = prompt
    for _ in range(ANSWER_TOKENS):
        tokens = torch.cat([tokens, _logits(model, tokens)[-1:].argmax(-1)])
    return tokens


def _mean_logprob(model: PreTrainedModel, tokens: torch.Tensor, begin: int) -> float:
    """Return the mean log-probability of the tokens from ``begin`` on."""
    logprobs = torch.log_softmax(_logits(model, tokens)[begin - 1 : -1].float(), dim=-1)
    return float(logprobs.gather(1, tokens[begin:, None]).mean())


def _logits(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    library: Any = model
    with torch.inference_mode():
        logits: torch.Tensor = library(input_ids=tokens[None], use_cache=False).logits[0]
    if not bool(torch.isfinite(logits).all()):
        raise not_finite()
    return logits
