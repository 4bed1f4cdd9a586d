"""What the ranks of an engine found, put together into one answer. Pure."""

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from modelswap_engine.backends.port import Hashes, RuntimeHash
from modelswap_engine.protocol.engine_state import MemoryState


def merged(found: Mapping[int, Hashes]) -> Hashes:
    """Return what all ranks together say about their tensors, by the rank's number."""
    blind = {name for hashes in found.values() for name in hashes.unverifiable}
    names = sorted({name for hashes in found.values() for name in hashes.tensors} - blind)
    values = {name: {rank: hashes.tensors.get(name, "") for rank, hashes in found.items()} for name in names}
    return Hashes(
        tensors={name: held[min(held)] for name, held in values.items() if len(set(held.values())) == 1},
        bytes=sum(hashes.bytes for hashes in found.values()),
        seconds=max(hashes.seconds for hashes in found.values()),
        unverifiable=tuple(sorted(blind)),
        runtime=_runtime(found),
        ranks=tuple(sorted(found)),
        disagreed={name: held for name, held in values.items() if len(set(held.values())) > 1},
    )


def _runtime(found: Mapping[int, Hashes]) -> tuple[RuntimeHash, ...]:
    """Return each parameter once: as a rank has it that finds it wrong, where one does, with all who do."""
    items: dict[str, RuntimeHash] = {}
    for rank, item in ((rank, item) for rank, hashes in sorted(found.items()) for item in hashes.runtime):
        known = items.setdefault(item.name, item)
        if item.actual != item.expected:
            items[item.name] = replace(known if known.ranks else item, ranks=(*known.ranks, rank))
    return tuple(items[name] for name in sorted(items))


def summed(states: Sequence[MemoryState]) -> MemoryState:
    """Return the memory of all ranks together; what bounds a process is the tightest of their bounds."""
    return MemoryState(
        model_bytes=sum(state.model_bytes for state in states),
        staged_bytes=sum(state.staged_bytes for state in states),
        previous_bytes=sum(state.previous_bytes for state in states),
        kv_cache_bytes=sum(state.kv_cache_bytes for state in states),
        kv_free_bytes=sum(state.kv_free_bytes for state in states),
        kv_cached_bytes=sum(state.kv_cached_bytes for state in states),
        adapter_bytes=sum(state.adapter_bytes for state in states),
        instance_bytes=sum(state.instance_bytes for state in states),
        rss_bytes=sum(state.rss_bytes for state in states),
        allocator_used_bytes=sum(state.allocator_used_bytes for state in states),
        allocator_reserved_bytes=sum(state.allocator_reserved_bytes for state in states),
        limit_bytes=_tightest([state.limit_bytes for state in states]),
        available_bytes=_tightest([state.available_bytes for state in states]),
        device=", ".join(dict.fromkeys(state.device for state in states)),
        device_limit_bytes=_bounded([state.device_limit_bytes for state in states]),
        # Ranks share every version evenly, so the fullest device decides.
        device_available_bytes=_bounded([min(state.device_available_bytes for state in states)] * len(states)),
    )


def _tightest(figures: Sequence[int]) -> int:
    """Return the least of some bounds; -1 where nothing bounds any."""
    return min((figure for figure in figures if figure >= 0), default=-1)


def _bounded(figures: Sequence[int]) -> int:
    """Return a sum of bounds; -1, as each of them, where nothing bounds one."""
    return sum(figures) if min(figures) >= 0 else -1
