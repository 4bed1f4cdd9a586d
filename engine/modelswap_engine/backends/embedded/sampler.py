"""Chooses tokens per request inside a packed batch: greedy, or temperature / top-k / top-p with an optional seed.

The generation loop takes the arg-max of what processors return. Rows of greedy requests pass unchanged, so a purely
greedy batch costs nothing; in a sampled row everything but the drawn token is pushed to minus infinity.
"""

from typing import Any, Final

import torch
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessor,
    ContinuousBatchingLogitsProcessorList,
)
from transformers.generation.continuous_batching.requests import FutureRequestState
from transformers.generation.logits_process import LogitsProcessorList

from modelswap_engine.backends.embedded.lora.content import LoadedAdapter
from modelswap_engine.backends.port import Sampling

_LOWEST: Final = float("-inf")
ADAPTER: Final = "adapter"
"""A request's adapter travels with its sampling, because the loop carries that along wherever the request goes."""


def arguments(sampling: Sampling) -> dict[str, Any]:
    """Return a request's sampling as the loop carries it along; empty for greedy."""
    if sampling.temperature <= 0.0:
        return {}
    chosen: dict[str, Any] = {
        "temperature": float(sampling.temperature),
        "top_p": float(sampling.top_p),
        "top_k": int(sampling.top_k),
    }
    return chosen if sampling.seed is None else chosen | {"seed": int(sampling.seed)}


def processors() -> ContinuousBatchingLogitsProcessorList:
    """Return the processor list for a generation loop."""
    found = ContinuousBatchingLogitsProcessorList(LogitsProcessorList([Sampler()]))
    found.tensors_required = 1
    return found


class Sampler(ContinuousBatchingLogitsProcessor):
    """Draws tokens for the rows that want it.

    Batches are prepared and run by one thread, one after the other (asynchronous batching is off), so what was noted
    while preparing is still what the batch needs. A seeded draw depends on the seed and the position only: it is the
    same after a preemption and in any company.
    """

    def __init__(self) -> None:
        self.supported_kwargs = {
            "temperature": float,
            "top_p": float,
            "top_k": int,
            "seed": int,
            ADAPTER: LoadedAdapter,
        }
        self.ignored_kwargs = ()
        self._rows: list[tuple[dict[str, Any], int]] = []

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        """Nothing travels through the loop's argument tensor."""
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: list[FutureRequestState]) -> torch.Tensor:
        """Note what each row of the coming batch wants."""
        states = [request.state for request in requests_with_new_token]
        self._rows = [
            (_drawing(state.logit_processor_kwargs), len(state.initial_tokens) + len(state.generated_tokens))
            for state in states
        ]
        return torch.zeros(len(states), dtype=torch.int32)

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        """Return the scores with sampled rows reduced to the drawn token."""
        wanting = [row for row, (wanted, _) in enumerate(self._rows[: scores.size(0)]) if wanted]
        if not wanting:
            return scores
        scores = scores.clone()
        for row in wanting:
            wanted, position = self._rows[row]
            token = _draw(scores[row], position=position, **wanted)
            scores[row] = _LOWEST
            scores[row, token] = 0.0
        return scores


def _drawing(carried: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in carried.items() if key != ADAPTER} if ADAPTER in carried else carried


def _draw(
    logits: torch.Tensor, *, position: int, temperature: float, top_p: float, top_k: int, seed: int | None = None
) -> int:
    values, tokens = torch.sort(logits.float() / temperature, descending=True)
    if top_k > 0:
        values, tokens = values[:top_k], tokens[:top_k]
    chances = torch.softmax(values, dim=-1)
    if top_p < 1.0:
        # A token stays while the more probable ones do not reach top_p yet; the first always stays.
        keep = torch.cumsum(chances, dim=-1) - chances < top_p
        keep[0] = True
        chances = chances.masked_fill(~keep, 0.0)
    generator = None
    if seed is not None:
        generator = torch.Generator(device=logits.device)
        generator.manual_seed((seed * 1_000_003 + position) & 0x7FFF_FFFF_FFFF_FFFF)
    return int(tokens[torch.multinomial(chances, 1, generator=generator)])
