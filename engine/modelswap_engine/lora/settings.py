"""What an operator of an engine can set about adapters."""

from dataclasses import dataclass, replace

from modelswap_engine.backends.adapters import AdapterLayout
from modelswap_engine.lora.entries import Limits

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """Bounds of the adapters of one engine process.

    Attributes:
        slots: adapters that one batch can use; 0 means that none are served, or that the engine knows how many.
        host_bytes: bytes that all adapters may have together in the engine's memory.
        slot_bytes: bytes that the adapters in slots may have together; 0 for no limit beside the slots.
        max_pinned: adapters that may be pinned; None leaves one slot for the others.
        served_model_name: the base's name, which no adapter may take.
        pod_uid: the pod this runs in, "" outside a cluster.
        load_seconds: how long finding, reading and placing an adapter may take.
        acquire_seconds: how long a request may wait for a slot; less than a swap waits for requests on their way in.
        drain_seconds: after a base swap that replaced an adapter, when its old content counts as a tombstone.
    """

    slots: int = 0
    host_bytes: int = 1024 * MIB
    slot_bytes: int = 0
    max_pinned: int | None = None
    served_model_name: str = ""
    pod_uid: str = ""
    load_seconds: float = 300.0
    acquire_seconds: float = 5.0
    drain_seconds: float = 60.0

    @property
    def limits(self) -> Limits:
        """What the registry may hold."""
        return self._limits(self.slots)

    def limits_in(self, layout: AdapterLayout) -> Limits:
        """What the registry may hold in an engine; each adapter that it holds has its slot where it says so."""
        if not layout.held:
            return self.limits
        return replace(self._limits(layout.held), held=layout.held, held_option=layout.options.held)

    def _limits(self, slots: int) -> Limits:
        pinned = max(0, slots - 1) if self.max_pinned is None else self.max_pinned
        return Limits(
            slots=slots, slot_bytes=self.slot_bytes, host_bytes=self.host_bytes, max_pinned=min(pinned, slots)
        )
