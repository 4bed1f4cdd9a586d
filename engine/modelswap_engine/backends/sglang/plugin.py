"""What the entry point ``sglang.srt.plugins`` names: a hook that carries text to our half in each of SGLang's ranks.

SGLang's checker of weights passes its ``action`` to every rank, between two steps, and their checksums back. An action
that begins with our word is ours; every other one goes its way.
"""

import uuid
from collections.abc import Callable
from typing import Any, Final

import torch

from modelswap_engine.backends.inprocess.agent import Agent
from modelswap_engine.backends.sglang.host import SglangHost, place_of
from modelswap_engine.backends.sglang.words import ACTION, ANSWER

_HOOKED: Final = "sglang.srt.model_executor.model_runner.ModelRunner.check_weights"
_AGENT: Final = "_modelswap_agent"


def register() -> None:
    """Hang the hook in; called in each of SGLang's processes when it begins."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_HOOKED, check_weights, HookType.AROUND)


def check_weights(original: Callable[..., Any], runner: Any, action: str, *rest: Any, role: str, **more: Any) -> Any:
    """Carry a call out in this rank, or let SGLang check its weights."""
    if not action.startswith(ACTION):
        return original(runner, action, *rest, role=role, **more)
    # With an overlapping schedule the step that was begun last may still compute.
    torch.get_device_module(torch.device(runner.device).type).synchronize()
    here: dict[str, Any] = runner.__dict__
    if _AGENT not in here:
        host = SglangHost(runner, role=role)
        here[_AGENT] = Agent(host, boot_id=uuid.uuid4().hex, busy=host.busy)
    agent: Agent = here[_AGENT]
    return {
        "checksums": {ANSWER: agent.answer(action.removeprefix(ACTION))},
        "per_gpu_checksum": "",
        "parallelism_info": place_of(runner, role),
    }
