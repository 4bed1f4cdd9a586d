"""What to do when tensors do not fit. Pure."""

from modelswap_engine.protocol.engine_state import MemoryState


def more_room(state: MemoryState) -> str:
    """Return the next step when tensors do not fit where they are to lie."""
    if state.device_available_bytes >= 0:
        return "give the KV cache less, or use a device with more memory"
    return "raise the container's memory limit or give the KV cache less"
