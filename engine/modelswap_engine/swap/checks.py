"""Trying a staged version with the prompts that somebody named, while the old version still answers everybody.

No output of it can reach a client before the swap has passed: the engine runs the prompts on what is staged.
"""

from modelswap_engine.backends.port import PromptTrial
from modelswap_engine.protocol.errors import UnsupportedChange
from modelswap_engine.protocol.policy import Checks
from modelswap_engine.swap.core import Core
from modelswap_engine.swap.operations import Operation


async def try_out(core: Core, operation: Operation, checks: Checks, digest: str, *, same_tokens: bool) -> None:
    """Run the prompts on what an operation has staged.

    Args:
        core: the shared state.
        operation: whose tensors are staged; it may be told to give up.
        checks: the prompts.
        digest: of the staged version, whose tokenizer is prepared.
        same_tokens: the live version makes the same tokens of a text.

    Raises:
        ChecksFailed: a prompt's output is not finite, or has changed by more than is allowed.
        UnsupportedChange: this cannot be looked at.
    """
    if not checks.prompts:
        return
    if not same_tokens and any(item.max_logprob_delta is not None for item in checks.prompts):
        raise UnsupportedChange(
            "checks.prompts: answers are compared token by token, and the tokenizer or the end of text changes",
            advice="leave maxLogprobDelta out for this version",
        )
    encode = core.encode
    if encode is None:
        raise UnsupportedChange(
            "checks.prompts: this engine makes no tokens of texts", advice="leave checks.prompts out"
        )
    trials = [
        PromptTrial(prompt=await core.offload(encode, digest, item.prompt), max_logprob_delta=item.max_logprob_delta)
        for item in checks.prompts
    ]
    await core.engine.try_out(operation.id, trials, unless=operation.interrupted)
