"""LoRA adapters of an engine that is a server of its own: laid out as folders, loaded and unloaded by its own routes.

The engine chooses by itself which of the adapters that it holds are in a batch, so slots are no business of ours here.
What is: that it holds no more than it can, for beyond that it drops one without a word; that the name of an adapter
says its content, so that nothing cached or remembered under a name is ever another content's; and that what was loaded
is there on every rank, looked at after each exchange of the base and put back by each start of the engine.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path
from typing import Final, Protocol, TypeVar

from modelswap_engine.backends.adapters import AdapterLayout, AdapterOptions, AdapterTarget, LoadAdapter
from modelswap_engine.backends.external.adapter_folders import AdapterFolders
from modelswap_engine.backends.external.control import AdapterFacts
from modelswap_engine.backends.external.restart import log
from modelswap_engine.backends.port import Record, Reply, TensorRange
from modelswap_engine.lora.config import parse_config
from modelswap_engine.protocol.errors import NotReady, UnsupportedAdapter, WorkerLost

T = TypeVar("T")

_WEIGHT: Final = ".weight"
_ELSEWHERE: Final = "the engine applies adapters to other modules only"


class HeldAdapter(Record, frozen=True, kw_only=True):
    """An adapter under whose name the engine answers; ``everywhere``: each rank is known to have it in its memory."""

    name: str
    directory: str
    everywhere: bool


class AdapterControl(Protocol):
    """The routes of one engine about adapters; calls are bounded and raise as those of ``EngineControl`` do."""

    async def adapters(self, *, seconds: float) -> Sequence[HeldAdapter]:
        """List those under whose names the engine answers, as it says itself."""

    async def load_adapter(self, name: str, directory: str, *, seconds: float) -> None:
        """Have every rank hold the adapter that is in a folder, and the engine answer under this name.

        What it had under the name is taken away before: nothing is exchanged in place.

        Raises:
            Refused: the engine does not take it, and answers under the name no more.
        """

    async def unload_adapter(self, name: str, *, seconds: float) -> None:
        """Have the engine answer under a name no more, and its ranks forget it; an unknown one is nothing to do."""


class ExternalAdapters:
    """See the module and :class:`~modelswap_engine.backends.adapters.AdapterHost`.

    Errors are raised, so replies say nothing.

    Args:
        control: the engine's routes.
        folders: where adapters are laid out for it.
        seconds: bound of one call.
        linger: how long a folder is kept after its adapter was unloaded: a request whose client is gone may still run.
    """

    def __init__(
        self, control: AdapterControl, folders: AdapterFolders, *, seconds: float = 120.0, linger: float = 30.0
    ) -> None:
        self._control = control
        self._folders = folders
        self._seconds = seconds
        self._linger = linger
        self._distrust: Callable[[str], WorkerLost] = WorkerLost
        self._turn = asyncio.Lock()
        self._uniform = False
        self._layout: AdapterLayout | None = None
        self._loaded: dict[str, Path] = {}
        self._leaving: set[asyncio.Task[None]] = set()

    def attach(self, distrust: Callable[[str], WorkerLost]) -> None:
        """Learn whom to tell when nobody knows any more what the engine holds."""
        self._distrust = distrust

    # With the base.

    async def begin(self, facts: AdapterFacts, modules: Collection[str], tensors: Sequence[TensorRange]) -> None:
        """A base is live in an engine that nobody has a request in: no adapter is there, and these can be.

        Args:
            facts: what the engine was started with.
            modules: those that adapters can change, as our half in the engine says; empty where it has no such half.
            tensors: all of the base.

        Raises:
            WorkerLost: adapters of before cannot be taken away.
        """
        async with self._turn:
            self.lost()
            if facts.slots:
                for held in await self._decisive(self._control.adapters(seconds=self._seconds)):
                    if self._folders.owns(held.directory):
                        await self._decisive(self._control.unload_adapter(held.name, seconds=self._seconds))
            await self._folders.clear()
            self._layout, self._uniform = layout_of(facts, modules, tensors), facts.uniform

    def lost(self) -> None:
        """The engine is lost, and what it held with it."""
        self._layout = None
        self._loaded.clear()

    async def verify(self) -> None:
        """Look whether all that was loaded is there on every rank, and load again what is not.

        Raises:
            ModelswapError: something cannot be had again.
        """
        if not self._loaded:
            return
        async with self._turn:
            found = await self._decisive(self._control.adapters(seconds=self._seconds))
            there = {held.name: held.directory for held in found if held.everywhere}
            for name, folder in self._loaded.items():
                if there.get(name) != str(folder):
                    log.warning("adapter %s was not in the engine any more; it is loaded again", name)
                    await self._decisive(self._control.load_adapter(name, str(folder), seconds=self._seconds))

    async def stop(self) -> None:
        """End what goes on in the background."""
        tasks = list(self._leaving)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # The host of adapters.

    def adapters(self) -> AdapterLayout:
        """Say what adapters can be.

        Raises:
            NotReady: the engine is not there.
        """
        if self._layout is None:
            raise NotReady("no version is loaded", advice="wait until the engine is ready")
        return self._layout

    async def load_adapter(self, order: LoadAdapter) -> Sequence[Reply]:
        """Lay an adapter out and have the engine load it while requests run."""
        layout = self.adapters()
        if self._uniform:
            _require_uniform(order)
        try:
            folder = await self._folders.write(order)
            async with self._turn:
                if self._layout is not layout:
                    raise NotReady("the engine was lost while the adapter was read", advice="load it again")
                await self._decisive(self._control.load_adapter(order.adapter_id, str(folder), seconds=self._seconds))
                self._loaded[order.adapter_id] = folder
        except BaseException:
            if order.adapter_id not in self._loaded:
                self._folders.release(order.adapter_id)
                self._collect_later()
            raise
        return ()

    async def place_adapter(self, adapter_id: str, slot: int) -> Sequence[Reply]:
        """The engine does so by itself, when a request needs it."""
        return ()

    async def clear_slot(self, slot: int) -> Sequence[Reply]:
        """The engine does so by itself."""
        return ()

    async def drop_adapter(self, adapter_id: str) -> Sequence[Reply]:
        """Have the engine forget an adapter that no request uses."""
        async with self._turn:
            self._loaded.pop(adapter_id, None)
            if self._layout is not None:
                await self._decisive(self._control.unload_adapter(adapter_id, seconds=self._seconds))
        self._folders.release(adapter_id)
        self._collect_later()
        return ()

    async def _decisive(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except WorkerLost as error:
            raise self._distrust(f"adapters: {error.message}") from error

    def _collect_later(self) -> None:
        async def collect() -> None:
            await asyncio.sleep(self._linger)
            await self._folders.collect()

        task = asyncio.create_task(collect())
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)


class NoAdapters:
    """A host of no adapters, whose every caller is told why.

    Args:
        reason: it.
        options: those by which there would be adapters.
    """

    def __init__(self, reason: str, *, options: AdapterOptions) -> None:
        self._layout = AdapterLayout(reason=reason, options=options)

    def adapters(self) -> AdapterLayout:
        """Say that none can be, which refuses all that could be loaded or placed."""
        return self._layout

    async def load_adapter(self, order: LoadAdapter) -> Sequence[Reply]:
        """Nothing fits."""
        return ()

    async def place_adapter(self, adapter_id: str, slot: int) -> Sequence[Reply]:
        """Nothing is loaded."""
        return ()

    async def clear_slot(self, slot: int) -> Sequence[Reply]:
        """Nothing is placed."""
        return ()

    async def drop_adapter(self, adapter_id: str) -> Sequence[Reply]:
        """Nothing is loaded."""
        return ()


def layout_of(facts: AdapterFacts, modules: Collection[str], tensors: Sequence[TensorRange]) -> AdapterLayout:
    """Say what adapters can be on a base with these tensors."""
    options = facts.options
    if not facts.slots:
        return AdapterLayout(reason=facts.reason, options=options)
    matrices = {
        tensor.name.removesuffix(_WEIGHT): tensor.shape
        for tensor in tensors
        if tensor.name.endswith(_WEIGHT) and len(tensor.shape) == 2
    }
    wanted = {name for name in matrices if name in modules or name.rpartition(".")[2] in facts.modules}
    if not wanted:
        return AdapterLayout(reason="it does not say which modules of this model adapters can change", options=options)
    return AdapterLayout(
        slots=facts.slots,
        held=facts.held,
        max_rank=facts.max_rank,
        element_bytes=facts.element_bytes,
        targets=tuple(
            AdapterTarget(name=name, inputs=matrices[name][1], outputs=matrices[name][0]) for name in sorted(wanted)
        ),
        refused=dict.fromkeys(sorted(matrices.keys() - wanted), _ELSEWHERE),
        options=options,
    )


def _require_uniform(order: LoadAdapter) -> None:
    """Refuse what an engine would apply with one rank and scaling for all modules.

    Raises:
        UnsupportedAdapter: it has several.
    """
    settings = {(module.rank, module.scaling) for module in order.modules}
    if len(settings) > 1 or parse_config(order.config.encode()).rslora:
        raise UnsupportedAdapter(
            f"adapter {order.adapter_id}: this engine applies one rank, and one scaling of alpha / rank, to all "
            "modules of an adapter",
            advice="train it without rank_pattern, alpha_pattern and use_rslora, or serve it with another engine",
        )
