"""Runs staged weights once, beside the live ones, before anybody can be answered from them.

Weights that are finite can still give output that is not: half precision overflows in the middle of a layer. The trial
is a copy of the module over the memory of every tensor that stays, with the staged ones in their places; it has no KV
cache and is gone afterwards. It runs in the thread that staged, which gives way to decoding.
"""

import copy
from collections.abc import Mapping
from typing import Any, Final

import torch
from transformers import PreTrainedModel

from modelswap_engine.protocol.errors import ChecksFailed

_PROMPT_TOKENS: Final = 16
_MANAGER: Final = "_cached_continuous_batching_manager"


def trial_of(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> PreTrainedModel:
    """Return a copy of a model in which the named parameters and buffers are other tensors.

    Args:
        model: runs meanwhile; nothing of it is changed.
        tensors: by runtime name; what is not named is shared with the model.
    """
    memo: dict[int, object] = {id(getattr(model, _MANAGER, None)): None}
    for name, held in [*model.named_parameters(), *model.named_buffers()]:
        tensor = tensors.get(name, held.detach())
        memo[id(held)] = torch.nn.Parameter(tensor, requires_grad=False) if _is_parameter(held) else tensor
    return copy.deepcopy(model, memo)


def _is_parameter(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter)


def check_output(model: PreTrainedModel, *, vocabulary: int) -> None:
    """Run one short prompt and look at what comes out; no generation loop may be using the model.

    Raises:
        ChecksFailed: the output holds values that are not finite.
    """
    library: Any = model
    step = max(1, vocabulary // _PROMPT_TOKENS)
    prompt = torch.arange(0, vocabulary, step, device=model.device)[:_PROMPT_TOKENS]
    with torch.inference_mode():
        logits = library(input_ids=prompt[None], use_cache=False).logits
    if not bool(torch.isfinite(logits).all()):
        raise ChecksFailed(
            "the version's output holds values that are not finite, though its tensors do not",
            advice="it overflows in this precision; save it in bfloat16 or float32, or choose another version",
        )
