"""One rank: the model in this process, and what may be asked of it at any time, beside a swap.

It answers, it never raises: what goes wrong is in the reply. It knows no socket, and not how weights are exchanged.
"""

import gc
import time
from collections.abc import Callable

from modelswap_engine.backends.adapters import LoadAdapter
from modelswap_engine.backends.embedded.device import place_of
from modelswap_engine.backends.embedded.faults import Faults
from modelswap_engine.backends.embedded.model import LoadedModel, memory_of
from modelswap_engine.backends.embedded.settings import EmbeddedSettings
from modelswap_engine.backends.embedded.team import Team
from modelswap_engine.backends.port import FinishReason, Generate, Hashes, Load, Reply, Tokens
from modelswap_engine.protocol.engine_state import MemoryState
from modelswap_engine.protocol.errors import DeviceUnavailable, NotReady
from modelswap_engine.weights.pace import Pace
from modelswap_engine.weights.place import HOST, Place


class Rank:
    """The model of one process.

    Args:
        number: this rank.
        boot_id: of this process.
        settings: of the engine.
        faults: what a test asked to break.
        emit: takes new tokens, from any thread.
        died: called with the reason why this process cannot go on; does not return.
        team: the other ranks, of a model that is split over several.

    Attributes:
        model: what is loaded; it is replaced by whoever holds the process's control calls, one at a time.
    """

    def __init__(
        self,
        *,
        number: int,
        boot_id: str,
        settings: EmbeddedSettings,
        faults: Faults,
        emit: Callable[[Tokens], None],
        died: Callable[[str], None],
        team: Team | None = None,
    ) -> None:
        self.number = number
        self.boot_id = boot_id
        self.settings = settings
        self.faults = faults
        self.team = team
        self.model: LoadedModel | None = None
        self._emit = emit
        self._died = died

    def place(self) -> Place:
        """Return where weights lie."""
        return place_of(self.settings.device, rank=self.number)

    def load(self, order: Load, *, pace: Pace) -> LoadedModel:
        """Load a whole version, where none is."""
        self.model = model = LoadedModel(
            order,
            self.settings,
            place=self.place(),
            faults=self.faults,
            emit=self._emit,
            died=self._died,
            pace=pace,
            team=self.team,
        )
        return model

    def unload(self) -> None:
        """End what is loaded and free its memory."""
        if self.model is not None:
            self.model.stop()
            self.model = None
        # The loop and its cache refer to each other; without this the old model would still be there beside the new.
        gc.unfreeze()
        gc.collect()

    def loaded(self) -> LoadedModel:
        """Return the model.

        Raises:
            NotReady: none is loaded.
        """
        if self.model is None:
            raise NotReady("the worker has no version loaded", advice="load one")
        return self.model

    def give_up(self, why: str) -> None:
        """This process cannot go on: its peers are gone, or do not answer, or it holds what nobody proved."""
        self._died(why)

    def reply(
        self,
        operation_id: str,
        *,
        seconds: float = 0.0,
        fetched_bytes: int = 0,
        staged_bytes: int = 0,
        commit_microseconds: float = 0.0,
        requests: int = 0,
        method: str = "",
        digest: str = "",
    ) -> Reply:
        """Return an answer of this rank."""
        return Reply(
            operation_id=operation_id,
            rank=self.number,
            boot_id=self.boot_id,
            seconds=seconds,
            fetched_bytes=fetched_bytes,
            staged_bytes=staged_bytes,
            commit_microseconds=commit_microseconds,
            requests=requests,
            method=method,
            digest=self.faults.told(digest),
        )

    # Adapters, beside control calls: bringing one in waits for no swap, and no swap for it.

    def load_adapter(self, order: LoadAdapter, *, pace: Pace) -> Reply:
        """Read an adapter into memory, until ``pace`` is cancelled."""
        started = time.perf_counter()
        self.faults.hit("adapter")
        fetched = self.loaded().adapters.store.load(order, pace=pace)
        return self.reply(order.operation_id, seconds=time.perf_counter() - started, fetched_bytes=fetched)

    def place_adapter(self, adapter_id: str, slot: int) -> Reply:
        """Put an adapter into a slot."""
        self.loaded().adapters.store.place(adapter_id, slot)
        return self.reply("")

    def clear_slot(self, slot: int) -> Reply:
        """Empty a slot."""
        self.loaded().adapters.store.clear(slot)
        return self.reply("")

    def drop_adapter(self, adapter_id: str) -> Reply:
        """Forget an adapter."""
        self.loaded().adapters.store.drop(adapter_id)
        return self.reply("")

    # What may be asked beside a control call.

    def submit(self, request: Generate) -> None:
        """Start a generation."""
        model = self.model
        if model is not None:
            model.generator_of(request.version).submit(request)
            return
        self._emit(
            Tokens(
                request_id=request.request_id,
                tokens=(),
                digest="",
                finish=FinishReason.ERROR,
                error="no version is loaded",
            )
        )

    def wake(self) -> None:
        """The first rank has got a request."""
        if self.model is not None:
            self.model.generator.wake()

    def abort(self, request_id: str) -> None:
        """End a generation."""
        model = self.model
        if model is not None:
            for generator in model.generators():
                generator.abort(request_id)

    def background(self) -> Pace:
        """Return how fast tensors are brought beside the live ones: as fast as it goes, but for what decoding needs."""
        settings = self.settings
        return Pace(bytes_per_second=settings.stage_bytes_per_second, share=settings.stage_share, busy=self._decoding)

    def _decoding(self) -> bool:
        model = self.model
        return model is not None and any(generator.busy for generator in model.generators())

    def pace(self, bytes_per_second: int) -> Pace:
        """Return how fast live tensors are hashed again: as fast as it goes, or beside decoding and slower."""
        niceness = self.settings.stage_niceness if bytes_per_second else 0
        return Pace(bytes_per_second=bytes_per_second, niceness=niceness)

    def hashes(self, pattern: str, *, pace: Pace) -> Hashes:
        """Re-hash live tensors, while requests run and beside a commit, until ``pace`` is cancelled."""
        model = self.loaded()
        pace.spend(0)
        self.faults.hit("hashes")
        return model.hashes(pattern, pace=pace)

    def memory(self) -> MemoryState:
        """Say where the memory is."""
        try:
            place = self.place()
        except DeviceUnavailable:
            place = HOST  # nothing can be loaded, which the load will say
        return memory_of(self.model, place)
