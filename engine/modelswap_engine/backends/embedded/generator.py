"""Runs transformers' generation loop: requests in, tokens out, a pause between two steps, and an empty KV cache.

Tokens are handed on by the generation thread itself, at the end of the step that made them. A pause parks that thread
between two steps, so the digest read at hand-over is always the digest of the weights that made the token.
"""

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from transformers import PreTrainedModel
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from modelswap_engine.backends.embedded import flush, loop, sampler
from modelswap_engine.backends.embedded.lockstep import Lockstep
from modelswap_engine.backends.embedded.lora.adapters import Adapters
from modelswap_engine.backends.embedded.prefix import PrefixKeys
from modelswap_engine.backends.embedded.settings import EmbeddedSettings
from modelswap_engine.backends.embedded.team import Team
from modelswap_engine.backends.port import FinishReason, Generate, RequestPolicy, Tokens
from modelswap_engine.protocol.errors import Busy, IncompatibleModel, Internal

_WARM_UP: Final = "warm-up"
_WARM_UP_SECONDS: Final = 300.0
_STOP_SECONDS: Final = 30.0


@dataclasses.dataclass
class _Open:
    """A request that is not finished; ``sent`` counts the tokens handed on."""

    eos: frozenset[int]
    sent: int = 0


class Generator:
    """One model's generation loop.

    Args:
        model: on its device, in evaluation mode.
        settings: sizes of the KV cache and of a batch.
        adapters: the LoRA adapters that requests may use.
        digest: returns the digest of the live weights.
        emit: takes new tokens; called by the generation thread, must not block.
        died: called once when the loop ends without having been told to.
        team: the other ranks, of a model that is split. The first of them leads: it takes requests in and hands tokens
            on; what the others decide beside their loops must follow from what all of them know.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        settings: EmbeddedSettings,
        *,
        adapters: Adapters,
        digest: Callable[[], str],
        emit: Callable[[Tokens], None],
        died: Callable[[str], None],
        team: Team | None = None,
    ) -> None:
        self._adapters = adapters
        self._digest = digest
        self._emit = emit
        self._died = died
        self._open: dict[str, _Open] = {}
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._started = False
        self._warm = threading.Event()
        self._warm_error = ""
        self._manager: Any = loop.prepared(model, settings, self._deliver)
        adapters.attach(self._processor())
        self._lockstep = Lockstep(self._manager, digest=digest) if team is not None else None
        self._prefixes = PrefixKeys(self._processor().cache, version=lambda: self._digest())
        self._prefixes.bar([_WARM_UP])

    def start(self) -> None:
        """Start the loop and run a first request through it, so that the first user does not pay for it.

        Raises:
            IncompatibleModel: the loop cannot run this model with these settings.
        """
        self._manager.start()
        threading.Thread(target=self._watch, name="generation-watch", daemon=True).start()
        self._manager.add_request([0] * 8, request_id=_WARM_UP, max_new_tokens=4, eos_token_id=[])
        if not self._warm.wait(_WARM_UP_SECONDS) or self._warm_error:
            self.stop()
            raise IncompatibleModel(
                f"the model cannot be run: {self._warm_error or 'the first request did not finish'}",
                advice="check the KV cache settings and that the architecture supports paged attention",
            )
        self._started = True

    def stop(self, why: str = "the engine was stopped") -> int:
        """End the loop and free its KV cache; open requests end with an error, and are counted.

        Raises:
            Internal: the loop does not end; it still holds its memory.
        """
        self._stopping.set()
        ended = self._end_all(FinishReason.ERROR, why)
        self._manager.stop(block=True, timeout=_STOP_SECONDS, hard_stop=True)
        if self._manager.is_running():
            raise Internal(
                f"the generation loop did not end within {_STOP_SECONDS:g} s", advice="restart the worker process"
            )
        self._manager.distributed_helper.destroy_cpu_comm_group()
        return ended + self._end_all(FinishReason.ERROR, why)

    def move(self, model: PreTrainedModel, *, digest: Callable[[], str]) -> float:
        """Run on another module from the next step on, as the version that ``digest`` returns.

        Returns the seconds for which the loop stood still. The modules must hold the same weights: requests go on as if
        nothing had happened.
        """
        with self.parking():
            started = time.perf_counter()
            self._manager.model, self._digest = model, digest
            return time.perf_counter() - started

    def _watch(self) -> None:
        thread = self._manager._generation_thread
        if thread is not None:
            thread.join()
        fatal = self._manager.background_thread_status.fatal_error
        if self._lockstep is not None and fatal is None:
            self._stopping.wait(_STOP_SECONDS)  # a peer was told to stop before this rank was
        if not self._stopping.is_set():
            error = str(fatal or "it ended")
            self._warm_error = self._warm_error or error
            self._warm.set()
            self._end_all(FinishReason.ERROR, error)
            if self._started:
                self._died(f"its generation loop broke: {error}")

    @property
    def busy(self) -> bool:
        """True while there are requests that have not ended."""
        return bool(self._open)

    def submit(self, request: Generate) -> None:
        """Start a request; whatever goes wrong with it is said in its stream."""
        eos = [] if request.ignore_eos else list(request.eos)
        with self._lock:
            self._open[request.request_id] = _Open(eos=frozenset(eos))
        carried = sampler.arguments(request.sampling)
        if request.adapter:
            adapter = self._adapters.of(request.adapter)
            if adapter is None:
                self._end(request.request_id, FinishReason.ERROR, f"adapter {request.adapter} is in no slot")
                return
            carried[sampler.ADAPTER] = adapter
        accepted = self._manager.add_request(
            list(request.prompt),
            request_id=request.request_id,
            max_new_tokens=request.max_new_tokens,
            streaming=True,
            eos_token_id=eos,
            **carried,
        )
        if accepted is None:
            self._end(request.request_id, FinishReason.ERROR, "the generation loop is not running")

    def wake(self) -> None:
        """The leading rank has something to do: do not let it wait for this one."""
        self._manager._wake_up_loop.set()

    def abort(self, request_id: str) -> None:
        """Forget a request; nothing more is said about it."""
        with self._lock:
            self._open.pop(request_id, None)
        self._manager.cancel_request(request_id)

    def _deliver(self, output: GenerationOutput) -> None:
        if self._lockstep is not None:
            self._lockstep.made(output)
        if output.request_id == _WARM_UP:
            self._warm_error = output.error or ""
            self._warm.set()
            return
        finished = output.is_finished()
        if finished:
            self._prefixes.ended(output.request_id)
        with self._lock:
            entry = self._open.get(output.request_id)
            if entry is None:
                return
            new = tuple(output.generated_tokens[entry.sent :])
            entry.sent += len(new)
            if finished:
                del self._open[output.request_id]
        finish = _finish_reason(output, entry.eos) if finished else None
        self._emit(
            Tokens(
                request_id=output.request_id,
                tokens=new,
                digest=self._digest(),
                finish=finish,
                error=output.error or "",
            )
        )

    def _end(self, request_id: str, reason: FinishReason, error: str = "") -> None:
        with self._lock:
            if self._open.pop(request_id, None) is None:
                return
        self._emit(Tokens(request_id=request_id, tokens=(), digest=self._digest(), finish=reason, error=error))

    def _end_all(self, reason: FinishReason, error: str = "") -> int:
        with self._lock:
            open_now = list(self._open)
        for request_id in open_now:
            self._end(request_id, reason, error)
        return len(open_now)

    def parking(self) -> Any:
        """Return a context manager: inside it the loop stands between two steps."""
        return self._manager.pause()

    def let_go(self) -> None:
        """End a pause that only a peer asked for."""
        if self._lockstep is not None:
            self._lockstep.let_go()

    def check(self, policy: RequestPolicy) -> None:
        """Refuse a policy that the running requests contradict. Only legal while parked.

        Raises:
            Busy: requests are running and the policy says that there are none.
        """
        with self._lock:
            known = set(self._open)
        look = flush.running if self._lockstep is None else flush.counted
        running = look(self._processor(), known)
        if policy is RequestPolicy.NONE_RUNNING and running:
            raise Busy(
                f"{running} requests are still running",
                advice="drain them first, or choose a mode that ends or recomputes them",
            )

    def flush(self, policy: RequestPolicy) -> int:
        """Let no old keys and values be found, after doing with running requests what the policy says.

        Only legal while parked, and after :meth:`check`. Returns how many running requests there were. The cache is
        empty afterwards, but for the pages that frozen requests keep.
        """
        processor = self._processor()
        frozen = flush.freeze(processor) if policy is RequestPolicy.FREEZE else []
        self._prefixes.bar(frozen)
        if policy is RequestPolicy.FREEZE:
            return len(frozen) if self.leads else 0
        affected = self._abort_all(processor) if policy is RequestPolicy.ABORT else flush.requeue(processor)
        flush.empty_cache(processor)
        return affected if self.leads else 0

    def _abort_all(self, processor: Any) -> int:
        with self._lock:
            everything = list(self._open)
        for request_id in everything:
            # Also by the queue: the loop may have taken a request in that the scheduler does not have yet.
            self._manager.cancel_request(request_id)
        flush.cancel_all(processor)
        return self._end_all(FinishReason.ABORT, "the model version changed")

    @property
    def leads(self) -> bool:
        """True when requests come in and tokens go out here."""
        return self._lockstep is None or self._lockstep.leads

    def _processor(self) -> Any:
        processor = self._manager.batch_processor
        if processor is None:
            raise Internal("the generation loop is not running")
        return processor

    @property
    def captured(self) -> bool:
        """True when steps run as captured graphs or compiled code, which may know weights by address."""
        return loop.captured(self._processor())

    def kv_sizes(self) -> loop.KvSizes:
        """Return what the KV cache takes, and how much of it is in use."""
        processor = self._manager.batch_processor
        return loop.KvSizes() if processor is None else loop.kv_sizes(processor)


def _finish_reason(output: GenerationOutput, eos: frozenset[int]) -> FinishReason:
    if output.error is not None or output.status is RequestStatus.FAILED:
        return FinishReason.ERROR
    ended = output.generated_tokens and output.generated_tokens[-1] in eos
    return FinishReason.STOP if ended else FinishReason.LENGTH
