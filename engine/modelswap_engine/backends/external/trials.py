"""Prompts for a version in an engine that computes with live weights only.

They run twice, as requests of the engine's own API. First on the version that serves, beside its clients: a prompt that
the engine cannot run, or not in time, is refused before anybody is stopped, and its answer is kept to compare with.
Then on what was committed and proven, while nobody is let in; only then is the engine asked how likely a given text is,
of which vLLM with adapters dies in company. Who lets whom in, and what a failure leads to, is not known here.
"""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass

from modelswap_engine.backends.external.control import EngineControl
from modelswap_engine.backends.external.loading import emptied
from modelswap_engine.backends.external.settings import ExternalSettings
from modelswap_engine.backends.port import PromptTrial
from modelswap_engine.backends.trials import ANSWER_TOKENS, not_finite, require_alike
from modelswap_engine.protocol.errors import (
    BadRequest,
    Busy,
    ChecksFailed,
    Internal,
    NotReady,
    UnsupportedChange,
    WorkerLost,
)


@dataclass(frozen=True, kw_only=True)
class _Rehearsed:
    """A prompt with the live version's answer, and how likely that answer was; None where nothing is compared."""

    tokens: tuple[int, ...]
    begins: int
    mean: float | None


class Trials:
    """The prompts of one swap at a time.

    Args:
        control: of the engine.
        bounds: of every wait.
    """

    def __init__(self, control: EngineControl, *, bounds: ExternalSettings) -> None:
        self._control = control
        self._bounds = bounds
        self._rehearsed: tuple[str, Sequence[_Rehearsed]] = ("", ())

    async def rehearse(self, operation_id: str, trials: Sequence[PromptTrial]) -> None:
        """See that the live version can be asked all this; nothing about the engine is believed or doubted for it.

        Raises:
            UnsupportedChange: the engine does not run a prompt, or its answer cannot be compared.
            Busy: the engine did not answer, or not in time.
        """
        try:
            async with asyncio.timeout(self._bounds.prompts):
                known = [await self._rehearse(trial, number) for number, trial in enumerate(trials, 1)]
        except (NotReady, WorkerLost) as error:
            raise Busy(f"checks.prompts: {error.message}", advice="try again when the engine answers") from error
        except TimeoutError:
            raise Busy(
                f"checks.prompts: the engine did not answer all of them within {self._bounds.prompts:g} s, and later "
                "new requests would wait as long",
                advice="use fewer or shorter prompts, or try again when the engine has less to do",
            ) from None
        self._rehearsed = (operation_id, known)

    async def _rehearse(self, trial: PromptTrial, number: int) -> _Rehearsed:
        seconds = self._bounds.prompts
        try:
            # One token more than is looked at, so that there is room for what is asked of the new version.
            compares = trial.max_logprob_delta is not None
            said = await self._control.continued(
                trial.text, tokens=ANSWER_TOKENS + 1, logprobs=compares, seconds=seconds
            )
        except BadRequest as error:
            raise UnsupportedChange(
                f"checks.prompts, number {number}: the engine does not run it: {error.message}",
                advice="use a prompt that this engine answers",
            ) from error
        tokens, begins = (*said.prompt, *said.answer[:ANSWER_TOKENS]), len(said.prompt)
        if not compares:
            return _Rehearsed(tokens=tokens, begins=begins, mean=None)
        found = said.logprobs[:ANSWER_TOKENS]
        if not found:
            raise UnsupportedChange(
                f"checks.prompts, number {number}: the engine does not tell how likely its answer is",
                advice="leave maxLogprobDelta out before this engine",
            )
        if not _finite(found):
            raise UnsupportedChange(
                f"checks.prompts, number {number}: the live version's output is not finite, nothing compares with it",
                advice="leave maxLogprobDelta out for this version",
            )
        return _Rehearsed(tokens=tokens, begins=begins, mean=_mean(found))

    async def carry_out(self, operation_id: str, trials: Sequence[PromptTrial]) -> None:
        """Run the prompts on what is live by now, and have the engine forget that it did.

        Raises:
            ChecksFailed: the output is not finite, or has changed by more than is allowed.
            Busy: the engine still works on a prompt that it has answered.
            NotReady, WorkerLost: the engine is not there, or did not answer what it had answered in time before.
        """
        rehearsed_for, known = self._rehearsed
        if rehearsed_for != operation_id or len(known) != len(trials):
            raise Internal(f"the prompts of operation {operation_id} were not run on the version before it")
        try:
            async with asyncio.timeout(self._bounds.prompts):
                failure = await self._failure(trials, known)
        except TimeoutError:
            raise WorkerLost(
                f"checks.prompts: no answer within {self._bounds.prompts:g} s", advice="see the engine's log"
            ) from None
        await emptied(self._control, seconds=self._bounds.call)
        if failure is not None:
            raise failure

    async def _failure(self, trials: Sequence[PromptTrial], known: Sequence[_Rehearsed]) -> ChecksFailed | None:
        try:
            for number, (trial, before) in enumerate(zip(trials, known, strict=True), 1):
                found = await self._logprobs(before.tokens)
                if not _finite(found):
                    return not_finite(f" for checks.prompts, number {number},")
                if trial.max_logprob_delta is not None and before.mean is not None:
                    # The first value is the second token's, the last one nobody's yet.
                    change = _mean(found[before.begins - 1 : -1]) - before.mean
                    require_alike(change, allowed=trial.max_logprob_delta, number=number)
        except ChecksFailed as failed:
            return failed
        return None

    async def _logprobs(self, tokens: Sequence[int]) -> Sequence[float]:
        """Ask for log-probabilities; none where the engine has no words for them, such as vLLM for NaN."""
        try:
            found = await self._control.logprobs(tokens, seconds=self._bounds.prompts)
        except BadRequest:
            return ()
        return found if len(found) == len(tokens) else ()


def _finite(logprobs: Sequence[float]) -> bool:
    return bool(logprobs) and all(math.isfinite(value) for value in logprobs)


def _mean(logprobs: Sequence[float]) -> float:
    return sum(logprobs) / len(logprobs)
