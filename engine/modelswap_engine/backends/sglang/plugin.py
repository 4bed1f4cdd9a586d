"""What the entry point ``sglang.srt.plugins`` names: hooks that carry text to our half in each of SGLang's ranks.

SGLang's checker of weights passes its ``action`` to every rank, between two steps, and their checksums back. An action
that begins with our word is ours; every other one goes its way. The process in front of the ranks, which labels
answers, learns from theirs what its weights are to be called.
"""

import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from typing import Any, Final

import msgspec
import torch

from modelswap_engine.backends.inprocess import wire
from modelswap_engine.backends.inprocess.agent import Agent
from modelswap_engine.backends.sglang.host import SglangHost, place_of
from modelswap_engine.backends.sglang.words import ACTION, ANSWER

_RUNNER: Final = "sglang.srt.model_executor.model_runner.ModelRunner.check_weights"
_SCHEDULER: Final = (
    "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.check_weights"
)
_FRONT: Final = "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin.check_weights"
_NAME: Final = "_update_weight_version_if_provided"
_AGENT: Final = "_modelswap_agent"
_scheduling: Final = ContextVar[Any]("modelswap_scheduling", default=None)


def register() -> None:
    """Hang the hooks in; called in each of SGLang's processes when it begins."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_RUNNER, check_weights, HookType.AROUND)
    HookRegistry.register(_SCHEDULER, introduce, HookType.AROUND)
    HookRegistry.register(_FRONT, label, HookType.AROUND)


def introduce(original: Callable[..., Any], updater: Any, *rest: Any, **more: Any) -> Any:
    """Let our half know who schedules for the model, and go on."""
    token = _scheduling.set(updater)
    try:
        return original(updater, *rest, **more)
    finally:
        _scheduling.reset(token)


def check_weights(original: Callable[..., Any], runner: Any, action: str, *rest: Any, role: str, **more: Any) -> Any:
    """Carry a call out in this rank, or let SGLang check its weights."""
    if not action.startswith(ACTION):
        return original(runner, action, *rest, role=role, **more)
    # With an overlapping schedule the step that was begun last may still compute.
    torch.get_device_module(torch.device(runner.device).type).synchronize()
    here: dict[str, Any] = runner.__dict__
    if _AGENT not in here:
        host = SglangHost(runner, role=role, updater=_scheduling.get())
        here[_AGENT] = Agent(host, boot_id=uuid.uuid4().hex, busy=host.busy)
    agent: Agent = here[_AGENT]
    return {
        "checksums": {ANSWER: agent.answer(action.removeprefix(ACTION))},
        "per_gpu_checksum": "",
        "parallelism_info": place_of(runner, role),
    }


async def label(original: Callable[..., Awaitable[Any]], front: Any, asked: Any, *rest: Any, **more: Any) -> Any:
    """Carry a call to the ranks; where all of them have proved one version, SGLang calls its weights by it."""
    found = await original(front, asked, *rest, **more)
    if asked.action.startswith(ACTION) and hasattr(front, _NAME):
        _, _, ranks, _ = found
        sums = [rank["checksums"] for rank in ranks or ()]
        answers = [wire.decode_answer(held[ANSWER]) for held in sums if ANSWER in held]
        digest = _proved(answers) if len(answers) == len(sums) else ""
        if digest:
            getattr(front, _NAME)(digest)
            for held, answer in zip(sums, answers, strict=True):
                held[ANSWER] = wire.encode_answer(msgspec.structs.replace(answer, named=True))
    return found


def _proved(answers: Sequence[wire.Answer]) -> str:
    """Return the version that all ranks have just proved, "" where they have not."""
    digests = {answer.reply.digest if answer.proved and answer.reply.error is None else "" for answer in answers}
    return digests.pop() if len(digests) == 1 else ""
