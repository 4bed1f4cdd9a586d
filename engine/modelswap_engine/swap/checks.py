"""Trying a version with the prompts that somebody named, before any output of it can reach a client.

Most engines run them on what is staged, while the old version still answers everybody. One that can only compute with
live weights sees beforehand that it can run them, and runs them once they are committed, while new requests wait.
"""

from collections.abc import Sequence

from modelswap_engine.backends.port import PromptTrial
from modelswap_engine.protocol.errors import UnsupportedChange
from modelswap_engine.protocol.messages import SwapRequest
from modelswap_engine.protocol.policy import Checks, TrafficMode
from modelswap_engine.swap.core import Core
from modelswap_engine.swap.operations import Operation


async def try_out(
    core: Core, operation: Operation, request: SwapRequest, digest: str, *, same_tokens: bool
) -> Sequence[PromptTrial]:
    """Run the prompts on what an operation has staged; return those that are to be run on what is committed.

    Args:
        core: the shared state.
        operation: whose tensors are staged; it may be told to give up.
        request: has the prompts, and the mode.
        digest: of the staged version, whose tokenizer is prepared.
        same_tokens: the live version makes the same tokens of a text.

    Raises:
        ChecksFailed: a prompt's output is not finite, or has changed by more than is allowed.
        UnsupportedChange: this cannot be looked at.
    """
    checks, mode = request.checks, request.traffic.mode
    if not checks.prompts:
        return ()
    if not same_tokens and any(item.max_logprob_delta is not None for item in checks.prompts):
        raise UnsupportedChange(
            "checks.prompts: answers are compared token by token, and the tokenizer or the end of text changes",
            advice="leave maxLogprobDelta out for this version",
        )
    live = core.backend.capabilities().tries_live
    if live and mode not in (TrafficMode.DRAIN, TrafficMode.ABORT):
        raise UnsupportedChange(
            f"checks.prompts: this engine runs them on live weights, and in mode {mode} clients would get such output",
            advice="use traffic mode Drain or Abort",
        )
    trials = _as_text(checks) if live else await _in_tokens(core, checks, digest)
    await core.engine.try_out(operation.id, trials, unless=operation.interrupted)
    return trials if live else ()


def _as_text(checks: Checks) -> Sequence[PromptTrial]:
    return [PromptTrial(text=item.prompt, max_logprob_delta=item.max_logprob_delta) for item in checks.prompts]


async def _in_tokens(core: Core, checks: Checks, digest: str) -> Sequence[PromptTrial]:
    encode = core.encode
    if encode is None:
        raise UnsupportedChange(
            "checks.prompts: this engine makes no tokens of texts", advice="leave checks.prompts out"
        )
    return [
        PromptTrial(prompt=await core.offload(encode, digest, item.prompt), max_logprob_delta=item.max_logprob_delta)
        for item in checks.prompts
    ]
