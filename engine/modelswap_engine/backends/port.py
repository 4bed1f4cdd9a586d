"""The port every engine is driven through.

The coordinator knows the Protocol ``Backend`` and no engine; a backend knows its engine and neither the gate, nor
Kubernetes, nor the ports of this process. Calls are made one at a time by the coordinator and every one is bounded in
time by the backend. A rank's reply is data, never an exception: a failed rank answers ``error``. ``Generation`` is for
engines whose requests pass through here.
The order within one swap is::

    stage → prepare → pause → commit → verify → resume        (then release, or later rollback/release)
                          └── on failure: rollback → verify → resume

``try_out`` comes after ``stage``, and where prompts cannot be tried on what is staged, also after ``verify``.

With ``RequestPolicy.OVERLAP`` nobody is paused; until ``retire`` there are two instances, and a request says by its
``version`` which one it was let in to::

    stage → prepare(overlap) → commit → verify → retire        (then release, or later rollback/release)
                               └── on failure: rollback → verify
"""

from collections.abc import AsyncIterator, Sequence
from enum import StrEnum
from typing import Protocol

import msgspec

from modelswap_engine.protocol.engine_state import Capabilities, MemoryState, RankState
from modelswap_engine.protocol.errors import ErrorBody


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the port's values; they travel to worker processes as msgpack."""


class TensorRange(Record, frozen=True, kw_only=True):
    """One checkpoint tensor and where its bytes lie: ``nbytes`` bytes at ``offset`` of the local file ``path``.

    ``sha256`` (64 hex digits) is what the bytes must hash to; the rank that reads them refuses anything else. An empty
    ``path`` means that the rank has the tensor: received for this operation (:mod:`.transfer`), else live.
    ``dtype`` is the safetensors name (``BF16``), ``shape`` in elements.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: str
    offset: int
    nbytes: int
    sha256: str


class Load(Record, frozen=True, kw_only=True):
    """Load a whole version at start, or after a worker was lost.

    ``directory`` holds the side files (config, tokenizer) of the version, ``tensors`` all its tensors. With
    ``keep_proven`` replicas that live and have proven this very version are left as they are, with the requests that
    they run and the adapters that they hold: only the others are loaded, and get the same adapters. Tensors without a
    path are taken from one of those that are kept.
    """

    operation_id: str
    digest: str
    directory: str
    tensors: tuple[TensorRange, ...]
    keep_proven: bool = False


class Stage(Record, frozen=True, kw_only=True):
    """Bring tensors beside the live ones, in runtime layout, hashed; nothing becomes visible.

    ``tensors`` are whole fusion groups. ``drop_previous`` releases the retained previous version first, to make
    room. ``directory`` holds the side files of the wanted version.
    """

    operation_id: str
    digest: str
    directory: str
    tensors: tuple[TensorRange, ...]
    drop_previous: bool = False
    keep_previous: bool = True


class StageRetained(Record, frozen=True, kw_only=True):
    """Stage the retained previous version: nothing is read, the tensors are in memory already."""

    operation_id: str
    digest: str
    directory: str


class PromptTrial(Record, frozen=True, kw_only=True):
    """A prompt to try a version with; ``max_logprob_delta`` None compares nothing, see ``PromptCheck``.

    ``prompt`` are its tokens. A backend that tries what is live gets the ``text`` instead: its engine makes tokens.
    """

    prompt: tuple[int, ...] = ()
    text: str = ""
    max_logprob_delta: float | None = None


class RequestPolicy(StrEnum):
    """What a commit does with requests that are running in the engine.

    ``OVERLAP`` leaves them where they are: a second instance has the new weights. ``FREEZE`` keeps their keys and
    values, which the old weights made, and lets them go on with the new ones; nobody else may ever use those.
    """

    NONE_RUNNING = "NoneRunning"
    OVERLAP = "Overlap"
    RECOMPUTE = "Recompute"
    FREEZE = "Freeze"
    ABORT = "Abort"


class Reply(Record, frozen=True, kw_only=True):
    """What one rank answers; ``error`` None means it did what was asked.

    ``seconds`` is the time inside the rank. ``staged_bytes`` what staging holds, ``fetched_bytes`` what was read,
    ``commit_microseconds`` the commit window as the rank measured it between two steps, ``requests`` how many
    running requests were affected, ``method`` how tensors became live (``pointer`` or ``copy``), ``kept`` says that a
    load left the rank as it was.
    """

    operation_id: str
    rank: int
    boot_id: str
    error: ErrorBody | None = None
    seconds: float = 0.0
    fetched_bytes: int = 0
    staged_bytes: int = 0
    commit_microseconds: float = 0.0
    requests: int = 0
    method: str = ""
    digest: str = ""
    kept: bool = False


class Layout(Record, frozen=True, kw_only=True):
    """How the engine's parameters are made of checkpoint tensors.

    ``groups`` lists the fusion groups: the checkpoint tensor names that one runtime parameter (or one set of tied
    parameters) is made of; names appear in exactly one group. A tensor in no group is not read by the engine.
    ``tied`` lists the names that are one piece of memory and so must have the same bytes.
    """

    architecture: str
    groups: tuple[tuple[str, ...], ...]
    tied: tuple[tuple[str, ...], ...] = ()


class RuntimeHash(Record, frozen=True, kw_only=True):
    """A parameter whose checkpoint bytes cannot be had back: its own sha256 (64 hex), and the one it must have.

    ``sources`` are the checkpoint tensors that it is made of, ``ranks`` those on which it is not what it must be.
    """

    name: str
    sources: tuple[str, ...]
    expected: str
    actual: str
    ranks: tuple[int, ...] = ()


class Hashes(Record, frozen=True, kw_only=True):
    """Live tensors in checkpoint coordinates: name → sha256 (64 hex) of the raw bytes, and the time it took.

    ``unverifiable`` names tensors whose checkpoint bytes cannot be had back from the live ones. What the engine made of
    them is in ``runtime``; the ones that it does not read are nowhere.

    Where ranks hold slices of a tensor, each hashes its own and compares it with the hash of the same slice of the
    checkpoint's bytes, taken when the whole had just been proven; if all are right the answer is the hash of the whole.
    ``ranks`` are those who answered. A tensor on which they do not agree is not in ``tensors`` but in ``disagreed``,
    with what each of them has ("" for one that has nothing).
    """

    tensors: dict[str, str]
    bytes: int
    seconds: float
    unverifiable: tuple[str, ...] = ()
    runtime: tuple[RuntimeHash, ...] = ()
    ranks: tuple[int, ...] = (0,)
    disagreed: dict[str, dict[int, str]] = {}

    def by_rank(self, name: str) -> dict[int, str]:
        """Return what each rank has of a tensor; "" for nothing."""
        return self.disagreed.get(name) or dict.fromkeys(self.ranks, self.tensors.get(name, ""))


class Sampling(Record, frozen=True, kw_only=True):
    """How tokens are chosen; temperature 0 is greedy."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None


class Generate(Record, frozen=True, kw_only=True):
    """One prompt for the engine.

    ``version`` is the digest of the version that it was let in under; it chooses between two instances. ``adapter`` is
    the identity of the LoRA adapter to use, "" for the base model.
    """

    request_id: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling = Sampling()
    eos: tuple[int, ...] = ()
    ignore_eos: bool = False
    version: str = ""
    adapter: str = ""


class FinishReason(StrEnum):
    """Why a generation ended; ``ABORT`` by a client or a mode, ``ERROR`` by a fault of the engine."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Tokens(Record, frozen=True, kw_only=True):
    """New tokens of one request. ``digest`` is the version that made them; ``finish`` closes the stream."""

    request_id: str
    tokens: tuple[int, ...]
    digest: str
    finish: FinishReason | None = None
    error: str = ""


class TokenStream(Protocol):
    """The answer to one prompt; the item with ``finish`` is the last."""

    def __aiter__(self) -> AsyncIterator[Tokens]:
        """Return itself."""

    async def __anext__(self) -> Tokens:
        """Return the next tokens."""

    async def aclose(self) -> None:
        """End the generation if it still runs; closing twice does no harm."""


class Bounds(Record, frozen=True, kw_only=True):
    """After how many seconds at most a backend itself says what became of a call; who waits for one waits longer.

    ``stage``, ``load`` and ``hash`` are for the calls that do it, ``call`` is for any other; ``pause`` takes its own
    bound on top.
    """

    call: float = 0.0
    stage: float = 0.0
    load: float = 0.0
    hash: float = 0.0


class Backend(Protocol):
    """An inference engine whose weights can be changed while it runs.

    Raises, from every method that talks to a rank:
        WorkerLost: a rank died or does not answer; the backend restarts it when ``load`` is called.
    """

    async def start(self) -> None:
        """Start the ranks, without weights."""

    async def stop(self) -> None:
        """End every rank; requests still running end with ``FinishReason.ERROR``."""

    async def load(self, order: Load) -> Sequence[Reply]:
        """Load a whole version into every rank, restarting dead ranks; proven by hash before it answers.

        Whatever was before is gone: what was staged or retained, a pause, requests that run.
        """

    async def settle(self, operation_id: str, digest: str) -> Sequence[Reply]:
        """Bring replicas that live back to a version that they hold, without reading anything, after a loss elsewhere.

        What was committed without a proof is undone, what is staged or retained is dropped, a pause ends. Only the
        ranks of replicas that have proven ``digest`` afterwards, as a whole, answer; they serve again. The others need
        a ``load``, as if they were dead. Never raises for a rank.
        """

    def capabilities(self) -> Capabilities:
        """Say what this backend can do."""

    def bounds(self) -> Bounds:
        """Say how long calls may take; the same for as long as the backend is there."""

    def layout(self) -> Layout:
        """Say how parameters are made of checkpoint tensors; valid once loaded."""

    def ranks(self) -> Sequence[RankState]:
        """Say who is alive, and what each rank has proven under its boot id."""

    async def memory(self) -> MemoryState:
        """Say where the memory is, summed over ranks."""

    async def stage(self, order: Stage | StageRetained) -> Sequence[Reply]:
        """Stage beside the live tensors while requests run."""

    async def try_out(self, operation_id: str, trials: Sequence[PromptTrial]) -> Sequence[Reply]:
        """Run prompts on what is staged, beside the live version; a trial that fails is ``ChecksFailed``.

        A backend whose capabilities say ``tries_live`` cannot, and is asked twice. Before the pause it sees that the
        prompts can be run, and what the live version says to those that compare. After ``verify``, before ``resume``,
        it runs them on what was committed.
        """

    async def prepare(self, operation_id: str, *, overlap: bool = False) -> Sequence[Reply]:
        """Promise that commit can no longer fail for want of anything; replies carry the staged digest.

        With ``overlap`` a second instance with the staged tensors is brought up and warmed beside the one that serves;
        ``release`` takes it back.
        """

    async def pause(self, operation_id: str, *, timeout: float, policy: RequestPolicy) -> Sequence[Reply]:
        """Park every rank between two steps; ``seconds`` is the stop latency.

        ``policy`` is what the commit will do with running requests, for engines that must know it before they stop.
        """

    async def commit(self, operation_id: str, policy: RequestPolicy) -> Sequence[Reply]:
        """Make the staged tensors live; only legal while paused. The old ones become ``previous``.

        With ``OVERLAP`` the second instance becomes the main one, without a pause.
        """

    async def retire(self, operation_id: str) -> Sequence[Reply]:
        """End the instance that an ``OVERLAP`` commit left behind; only legal once that commit is verified.

        Requests that are still on it end with ``FinishReason.ERROR``; the replies count them.
        """

    async def verify(self, operation_id: str, *, strict: bool) -> Sequence[Reply]:
        """Prove that what is live is what was staged (identity; with ``strict`` also by hash)."""

    async def rollback(self, operation_id: str) -> Sequence[Reply]:
        """Put the tensors from before this operation's commit back; only legal while paused, or while two overlap."""

    async def resume(self, operation_id: str) -> Sequence[Reply]:
        """Let the ranks step again; without a pause this does nothing."""

    async def release(self, operation_id: str, *, previous: bool) -> Sequence[Reply]:
        """Drop what is staged for the operation; with ``previous`` also the retained previous version.

        Also legal while ``stage`` of the operation has not answered and nobody waits for it any more: ends it.
        """

    async def hashes(self, pattern: str, *, bytes_per_second: int = 0, still: bool = False) -> Hashes:
        """Re-hash live tensors whose checkpoint names match a glob, while requests run.

        With an upper bound of the rate it gives way to decoding, too. ``still`` is the caller's promise that no request
        comes until it has answered; what can only be seen while the engine computes nothing is seen then.
        """

    def running(self) -> int:
        """Say how many requests the engine is working on, as far as can be seen from here."""


class Generation(Protocol):
    """The part of an engine that turns prompts into tokens; one that has an API of its own is proxied instead."""

    def generate(self, request: Generate) -> TokenStream:
        """Run a prompt; the request is with the engine when this returns. Closing the stream aborts it.

        Raises:
            BadRequest: the engine cannot run this prompt.
            NotReady, WorkerLost: not now.
        """
