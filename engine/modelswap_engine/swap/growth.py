"""Whether memory grows or fragments with the swaps, so that a cold restart is advised. Pure; nothing restarts itself.

What an engine process holds beside model, staged and retained tensors and KV cache should not change once it is warm.
Many small updates can leave holes that no large tensor fits into. Both show slowly: advice needs several samples in a
row that say the same.
"""

from dataclasses import dataclass
from typing import Final

from modelswap_engine.protocol.engine_state import MemoryState

MIB: Final = 1 << 20


@dataclass(frozen=True, kw_only=True)
class GrowthLimits:
    """When a cold restart is advised.

    Attributes:
        warm_swaps: swaps until memory is expected not to grow any more.
        samples: how many samples in a row must say the same.
        growth_bytes: memory that nothing explains may have grown by this much since the engine was warm.
        growth_share: ... or by this share of the model, whichever is more.
        fragmented_share: this share of what the allocator holds may be unused.
        fragmented_bytes: ... and this many bytes, whichever is more.
        swaps: completed swaps after which a restart is advised anyway; 0 for never.
    """

    warm_swaps: int = 10
    samples: int = 3
    growth_bytes: int = 256 * MIB
    growth_share: float = 0.1
    fragmented_share: float = 0.25
    fragmented_bytes: int = 256 * MIB
    swaps: int = 0


@dataclass(frozen=True, kw_only=True)
class Growth:
    """What the samples since the last whole load have shown.

    ``baseline`` is the memory beside everything that is accounted for when the engine was warm, -1 before.
    """

    baseline: int = -1
    suspicious: int = 0
    advice: str = ""


def observe(growth: Growth, memory: MemoryState, *, swaps: int, limits: GrowthLimits) -> Growth:
    """Return what is known after one more sample; ``swaps`` were completed since the last whole load."""
    beside = unexplained(memory)
    if growth.baseline < 0:
        return Growth(baseline=beside) if swaps >= limits.warm_swaps else growth
    found = _worn(swaps, limits) or _grown(growth.baseline, beside, memory, limits) or _fragmented(memory, limits)
    suspicious = growth.suspicious + 1 if found else 0
    return Growth(
        baseline=min(growth.baseline, beside),
        suspicious=suspicious,
        advice=found if suspicious >= limits.samples else "",
    )


def unexplained(memory: MemoryState) -> int:
    """Return the resident bytes that are neither tensors of a version nor of adapters nor KV cache."""
    if memory.device_limit_bytes >= 0:  # those are not resident then
        return memory.rss_bytes
    tensors = memory.model_bytes + memory.staged_bytes + memory.previous_bytes + memory.adapter_bytes
    return max(0, memory.rss_bytes - tensors - memory.kv_cache_bytes)


def _worn(swaps: int, limits: GrowthLimits) -> str:
    return f"{swaps} swaps were made since the engine loaded a whole version" if 0 < limits.swaps <= swaps else ""


def _grown(baseline: int, beside: int, memory: MemoryState, limits: GrowthLimits) -> str:
    allowed = max(limits.growth_bytes, int(limits.growth_share * memory.model_bytes))
    if beside - baseline <= allowed:
        return ""
    return f"memory beside weights and KV cache grew by {(beside - baseline) // MIB} MiB since the engine was warm"


def _fragmented(memory: MemoryState, limits: GrowthLimits) -> str:
    unused = memory.allocator_reserved_bytes - memory.allocator_used_bytes
    allowed = max(limits.fragmented_bytes, int(limits.fragmented_share * memory.allocator_reserved_bytes))
    if unused <= allowed:
        return ""
    return f"{unused // MIB} of the allocator's {memory.allocator_reserved_bytes // MIB} MiB are holes"
