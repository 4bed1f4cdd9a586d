"""The ranks of this engine as other engines number them: by replica, and by place within the replica."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from modelswap_engine.protocol.engine_state import RankState
from modelswap_engine.protocol.messages import CheckResult


@dataclass(frozen=True, kw_only=True)
class Place:
    """One rank: ``tp`` of ``tp_size`` in replica ``dp`` of ``dp_size``, and the hashes (64 hex) of what it holds."""

    dp: int
    dp_size: int
    tp: int
    tp_size: int
    hashes: dict[str, str]


def places(ranks: Sequence[RankState], result: CheckResult) -> list[Place]:
    """Return every rank that a check asked, with what it holds; a tensor that it has nothing of is left out."""
    sizes, seen = Counter(rank.replica for rank in ranks), Counter[int]()
    found = []
    for rank in ranks:
        held = result.tensors | {name: by_rank.get(rank.rank, "") for name, by_rank in result.disagreed.items()}
        hashes = {name: value.removeprefix("sha256:") for name, value in sorted(held.items()) if value}
        place = Place(
            dp=rank.replica,
            dp_size=len(sizes),
            tp=seen[rank.replica],
            tp_size=sizes[rank.replica],
            hashes=hashes,
        )
        seen[rank.replica] += 1
        found.append(place)
    return found
