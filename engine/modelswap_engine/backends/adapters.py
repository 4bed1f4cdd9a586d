"""The port of engines that apply LoRA adapters to single requests of a batch.

It stands beside :class:`~modelswap_engine.backends.port.Backend`: adapters come and go while requests run and while a
base is staged, so these calls wait neither for swaps nor for each other's requests. An engine keeps adapters in its
own memory (``load_adapter``) and has slots, the adapters that a batch can use (``place_adapter``). It never decides
which adapter leaves a slot, and never brings one back by itself.
"""

from collections.abc import Sequence
from typing import Protocol

from modelswap_engine.backends.port import Record, Reply, TensorRange


class AdapterTarget(Record, frozen=True, kw_only=True):
    """A module that an adapter may change: ``rank`` × ``inputs`` and ``outputs`` × ``rank`` are added to its weight."""

    name: str
    inputs: int
    outputs: int


class AdapterOptions(Record, frozen=True, kw_only=True):
    """How the options are called with which the engine is started, for people: ``slots`` has it serve adapters."""

    slots: str = "--lora-slots"
    rank: str = "--lora-max-rank"
    held: str = ""


class AdapterLayout(Record, frozen=True, kw_only=True):
    """What adapters can be on the loaded base.

    Attributes:
        slots: adapters that one batch can use; 0 means none, ``reason`` says why.
        held: adapters that the engine can hold at once, each of which can be used at any time: it finds places in its
            batches by itself. 0 where only bytes bound them, and slots are filled and cleared by calls.
        max_rank: of a module.
        element_bytes: size of one value in runtime layout.
        targets: the modules.
        refused: names of modules that the base has, but that adapters cannot change here, with the reason.
    """

    slots: int = 0
    held: int = 0
    max_rank: int = 0
    element_bytes: int = 4
    targets: tuple[AdapterTarget, ...] = ()
    refused: dict[str, str] = {}  # noqa: RUF012 - msgspec gives each record an empty default of its own
    reason: str = ""
    options: AdapterOptions = AdapterOptions()


class AdapterModule(Record, frozen=True, kw_only=True):
    """What an adapter adds to one module: ``scaling`` · B · A."""

    target: str
    rank: int
    scaling: float
    a: TensorRange
    b: TensorRange


class LoadAdapter(Record, frozen=True, kw_only=True):
    """Bring an adapter into the engine's memory; it is in no slot yet.

    ``config`` is the adapter's own ``adapter_config.json``, for the engine's second opinion.
    """

    operation_id: str
    adapter_id: str
    digest: str
    config: str
    modules: tuple[AdapterModule, ...]


class AdapterHost(Protocol):
    """The part of an engine that serves adapters; replies and errors are as in :class:`Backend`.

    What is loaded and placed is gone after a load of a whole base.
    """

    def adapters(self) -> AdapterLayout:
        """Say what adapters can be; valid once a base is loaded."""

    async def load_adapter(self, order: LoadAdapter) -> Sequence[Reply]:
        """Read an adapter, proven by hash, into memory while requests run; one that is there already is nothing."""

    async def place_adapter(self, adapter_id: str, slot: int) -> Sequence[Reply]:
        """Put a loaded adapter into a slot, in the place of what is there."""

    async def clear_slot(self, slot: int) -> Sequence[Reply]:
        """Empty a slot; requests that are running with its adapter keep it to their end."""

    async def drop_adapter(self, adapter_id: str) -> Sequence[Reply]:
        """Forget an adapter; an unknown one is nothing to do."""
