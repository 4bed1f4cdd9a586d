"""What the ranks of an engine found, put together into one answer. Pure."""

from collections.abc import Mapping

from modelswap_engine.backends.port import Hashes, RuntimeHash


def merged(found: Mapping[int, Hashes]) -> Hashes:
    """Return what all ranks together say about their tensors, by the rank's number.

    Where they do not agree the answer names what each has, which is no hash.
    """
    names = {name for hashes in found.values() for name in hashes.tensors}
    blind = {name for hashes in found.values() for name in hashes.unverifiable}
    return Hashes(
        tensors={name: _common(name, found) for name in sorted(names - blind)},
        bytes=sum(hashes.bytes for hashes in found.values()),
        seconds=max(hashes.seconds for hashes in found.values()),
        unverifiable=tuple(sorted(blind)),
        runtime=_runtime(found),
    )


def _runtime(found: Mapping[int, Hashes]) -> tuple[RuntimeHash, ...]:
    """Return each parameter once: as a rank has it that finds it wrong, where one does."""
    items: dict[str, RuntimeHash] = {}
    for item in (item for hashes in found.values() for item in hashes.runtime):
        known = items.setdefault(item.name, item)
        if known.actual == known.expected:
            items[item.name] = item
    return tuple(items[name] for name in sorted(items))


def _common(name: str, found: Mapping[int, Hashes]) -> str:
    values = {rank: hashes.tensors.get(name, "") for rank, hashes in found.items()}
    first, *others = set(values.values())
    if not others:
        return first
    return ", ".join(f"rank {rank}: {value or 'nothing'}" for rank, value in sorted(values.items()))
