"""What the control side of an external engine offers, one implementation for each engine.

It says what an engine can be asked, in the words of the engine-neutral half; routes, their shapes and their traps stay
on the other side. It knows neither versions nor transactions: nothing here decides, and nothing is repeated by itself.

Every call is bounded by ``seconds`` and raises, unless it says otherwise:

    NotReady: the engine could not be reached, so the call has changed nothing.
    WorkerLost: no usable answer came to a call that may have been carried out, wholly or in part.
    BadRequest: the engine refused the call as it is; nothing was changed.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import msgspec

from modelswap_engine.backends.adapters import AdapterOptions
from modelswap_engine.backends.port import Record


class AdapterFacts(Record, frozen=True, kw_only=True):
    """What an engine was started with for LoRA adapters.

    Attributes:
        slots: adapters that one batch can use; 0 means none, ``reason`` says why.
        held: adapters that it can hold at once; beyond that it would drop one by itself.
        max_rank: of a module.
        element_bytes: size of one value of theirs in memory.
        modules: last parts of the names of modules that they can change; empty where our half in the engine says it.
        uniform: one adapter must have the same rank and scaling in all its modules.
        options: how the engine's own options are called.
    """

    slots: int = 0
    held: int = 0
    max_rank: int = 0
    element_bytes: int = 2
    modules: frozenset[str] = frozenset()
    uniform: bool = False
    reason: str = ""
    options: AdapterOptions = AdapterOptions()


class EngineFacts(Record, frozen=True, kw_only=True):
    """What an engine is, asked and not assumed.

    Attributes:
        engine: its name, ``vllm`` or ``sglang``.
        version: of the engine.
        boot_id: of the engine's present start; another one after every restart. Where the engine says nothing of the
            kind, the control makes one up and gives another whenever the engine was away in between.
        weight_version: the label of its weights as it says itself; "" where it has none.
        ranks: how many answers :meth:`EngineControl.call_all` gives.
        served_model_names: the names under which it serves the base model, the first being the main one.
        agent: True when :meth:`EngineControl.call_all` reaches our half in every rank.
        refused: what is not there, by its name in ``protocol`` (a traffic mode), and why.
        adapters: what it was started with for them.
    """

    engine: str
    version: str
    boot_id: str
    weight_version: str = ""
    ranks: int = 1
    served_model_names: tuple[str, ...] = ()
    agent: bool = False
    refused: dict[str, str] = msgspec.field(default_factory=dict)
    adapters: AdapterFacts = AdapterFacts()


class Continued(Record, frozen=True, kw_only=True):
    """A prompt and its greedy answer, in the engine's tokens.

    ``logprobs`` are those of the answer's tokens, where they were asked for; one that is not finite, or that the engine
    does not tell, is NaN or an infinity.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    logprobs: tuple[float, ...] = ()


class Requests(Protocol):
    """The requests that clients have in the engine, as seen by whoever carries them."""

    def running(self) -> int:
        """Say how many there are."""

    def end(self) -> int:
        """End them all with an error that may be retried, and say how many."""

    def barred(self) -> AbstractContextManager[None]:
        """Let none reach the engine while the context lasts: those that are on their way get such an error, too."""


class EngineControl(Protocol):
    """The control side of one engine; see the module for what calls raise."""

    async def facts(self, *, seconds: float) -> EngineFacts:
        """Ask what the engine is; also the way to learn that it is there, and whether it was restarted."""

    async def alive(self, *, seconds: float) -> bool:
        """Say whether the engine answers and can still compute. Never raises.

        True while it is paused. False is no proof that its process is gone.
        """

    async def resume(self, *, seconds: float) -> None:
        """Let the engine step again, whoever paused it; nothing to do when it is not. Read back where it can be."""

    async def paused(self, *, seconds: float) -> bool:
        """Say whether the engine is paused, as the engine says itself where it does."""

    async def flush(self, *, seconds: float) -> bool:
        """Forget all cached keys and values that no running request holds; True when the engine says that it did.

        False, and no exception, when it says that it did not: requests run, or hold what was to be forgotten. Not
        repeated here.
        """

    async def call_all(self, text: str, *, seconds: float) -> Sequence[str]:
        """Carry a text to our half in every rank, and return their answers in the order of ranks, all or none.

        At most one is under way at a time. After a failure in which the text may have reached any rank, the next
        answers may belong to this one: every later call raises WorkerLost without sending anything, until
        ``EngineFacts.boot_id`` is another.

        Raises:
            NotReady: nothing was sent.
            WorkerLost: it may have arrived; or an earlier one failed so.
            BadRequest: our half is not there; nothing was changed.
        """

    async def set_version(self, digest: str, *, seconds: float) -> None:
        """Have the engine call its weights by this digest from now on, where it has such a label.

        Ends no request.
        """

    async def load_full(self, directory: str, digest: str, *, seconds: float) -> None:
        """Have the engine load the whole checkpoint in a directory by its own rules, and call it by this digest.

        Only while nothing runs or the engine is paused. The directory is one that the engine sees under the same path.
        When it raises WorkerLost, what is live is unknown, and may be a mixture.
        """

    async def continued(self, text: str, *, tokens: int, logprobs: bool, seconds: float) -> Continued:
        """Have the engine go on with a text greedily by so many tokens, as one of its requests, beside all others."""

    async def logprobs(self, tokens: Sequence[int], *, seconds: float) -> Sequence[float]:
        """Ask for the log-probability of each of these tokens but the first, and of the one that would come next.

        Only while nothing else runs: vLLM with ``--enable-lora`` dies of this question beside other requests.

        One that is not finite, or that the engine does not tell, is NaN or an infinity.

        Raises:
            BadRequest: also for output that the engine cannot put into words.
        """

    async def close(self) -> None:
        """Give connections back. Never raises."""
