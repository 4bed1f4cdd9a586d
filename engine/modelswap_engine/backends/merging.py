"""What the ranks of an engine found, put together into one answer. Pure."""

from collections.abc import Mapping

from msgspec.structs import replace

from modelswap_engine.backends.port import Hashes, RuntimeHash


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
