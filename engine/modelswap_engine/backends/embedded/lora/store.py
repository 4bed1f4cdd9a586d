"""The adapters of one worker: those in its host memory, and those in its slots, where the model computes.

Every change is the exchange of one reference, so requests never wait for one. A request takes its adapter along when it
is submitted; what happens to the slot afterwards changes nothing for it.
"""

import threading
from collections.abc import Callable, Iterable, Mapping

import torch

from modelswap_engine.backends.adapters import LoadAdapter
from modelswap_engine.backends.embedded.lora.content import LoadedAdapter, read_adapter
from modelswap_engine.protocol.errors import BadRequest, NotFound
from modelswap_engine.weights.pace import Pace


class AdapterStore:
    """The adapters by identity, and by slot.

    Args:
        slots: how many may be in use.
        modules: the modules that adapters may change.
        check: a second opinion about an order and the names of these modules, before anything is read.
    """

    def __init__(
        self,
        slots: int,
        modules: Mapping[str, torch.nn.Module],
        *,
        check: Callable[[LoadAdapter, Iterable[str]], None],
    ) -> None:
        self._check = check
        self._modules = modules
        self._device = next((module.get_parameter("weight").device for module in modules.values()), torch.device("cpu"))
        self._held: dict[str, LoadedAdapter] = {}
        self._slots: list[LoadedAdapter | None] = [None] * slots
        self._lock = threading.Lock()

    def load(self, order: LoadAdapter, *, pace: Pace) -> int:
        """Read an adapter into memory, unless its content is there; return the bytes read.

        Raises:
            ModelswapError: it is not what its order says; nothing of it is left.
        """
        with self._lock:
            known = self._held.get(order.adapter_id)
        if known is not None and known.digest == order.digest:
            return 0
        self._check(order, self._modules)
        loaded = read_adapter(order, self._modules, pace=pace)
        with self._lock:
            pace.spend(0)  # whoever asked may have given up meanwhile
            self._held[order.adapter_id] = loaded
        return sum(item.a.nbytes + item.b.nbytes for item in order.modules)

    def place(self, adapter_id: str, slot: int) -> None:
        """Put an adapter into a slot.

        Raises:
            NotFound: it is not in memory.
            BadRequest: there is no such slot.
        """
        with self._lock:
            self._check_slot(slot)
            if adapter_id not in self._held:
                raise NotFound(f"adapter {adapter_id} is not in memory", advice="load it first")
            self._slots[slot] = self._held[adapter_id].on(self._device)

    def clear(self, slot: int) -> None:
        """Empty a slot.

        Raises:
            BadRequest: there is no such slot.
        """
        with self._lock:
            self._check_slot(slot)
            self._slots[slot] = None

    def drop(self, adapter_id: str) -> None:
        """Forget an adapter, in its slot too."""
        with self._lock:
            self._held.pop(adapter_id, None)
            for slot, placed in enumerate(self._slots):
                if placed is not None and placed.adapter_id == adapter_id:
                    self._slots[slot] = None

    def of(self, adapter_id: str) -> LoadedAdapter | None:
        """Return the adapter that a request asks for, None when it is in no slot."""
        with self._lock:
            return next((held for held in self._slots if held is not None and held.adapter_id == adapter_id), None)

    def nbytes(self) -> int:
        """Return the bytes of all adapters."""
        with self._lock:
            return sum(held.nbytes for held in self._held.values())

    def _check_slot(self, slot: int) -> None:
        if not 0 <= slot < len(self._slots):
            raise BadRequest(f"slot {slot} is not one of the {len(self._slots)} slots for adapters")
