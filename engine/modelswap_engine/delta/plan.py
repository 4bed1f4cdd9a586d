"""How to come by each tensor of a version at the least cost in bytes: held already, by packs, or as it is. Pure.

Content decides, not names: a tensor that is held under any name is held. Packs form a graph from hash to hash; the
cheapest way through it that is not longer than allowed is taken where it is cheaper than the tensor itself.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from modelswap_engine.checkpoint.manifest import TensorEntry
from modelswap_engine.delta.layout import Header, PackedTensor

MOST_STEPS: Final = 4
"""How many packs one tensor may go through: each step costs about as much as copying it."""

KeyT = TypeVar("KeyT")


@dataclass(frozen=True)
class Link(Generic[KeyT]):
    """One step: a tensor of the pack that has this key."""

    pack: KeyT
    entry: PackedTensor


@dataclass(frozen=True, kw_only=True)
class Route(Generic[KeyT]):
    """How to come by some bytes, and how many of others this takes.

    Without links they are ``held``, or travel as they are. With links the first one's base is held, or it needs none.
    """

    cost: int
    held: bool = False
    links: tuple[Link[KeyT], ...] = ()


def plan(
    wanted: Iterable[TensorEntry],
    *,
    held: Collection[str],
    packs: Mapping[KeyT, Header],
    most_steps: int = MOST_STEPS,
    step_cost: int = 0,
) -> dict[str, Route[KeyT]]:
    """Return sha256 → the cheapest route to each of the tensors; of equal ones that with the fewest steps.

    Args:
        wanted: tensors with known hashes.
        held: the hashes of what is there.
        packs: headers of packs that can be read, by whatever names them.
        most_steps: how many steps one route may have.
        step_cost: what a step costs besides the bytes that are read of its pack, in bytes.
    """
    makers: dict[str, list[Link[KeyT]]] = defaultdict(list)
    for key, header in packs.items():
        for entry in header.tensors:
            makers[entry.sha256].append(Link(key, entry))
    return {
        entry.sha256: _route(entry, held=held, makers=makers, most_steps=most_steps, step_cost=step_cost)
        for entry in wanted
    }


def _route(
    wanted: TensorEntry,
    *,
    held: Collection[str],
    makers: Mapping[str, Sequence[Link[KeyT]]],
    most_steps: int,
    step_cost: int,
) -> Route[KeyT]:
    """Walk back from what is wanted, a step at a time, along the cheapest ways only."""
    if wanted.sha256 in held:
        return Route(cost=0, held=True)
    best: Route[KeyT] = Route(cost=wanted.nbytes)
    reached: dict[str, Route[KeyT]] = {wanted.sha256: Route(cost=0)}
    cheapest: dict[str, int] = {wanted.sha256: 0}
    for _ in range(most_steps):
        further: dict[str, Route[KeyT]] = {}
        for sha256, way in reached.items():
            for link in makers.get(sha256, ()):
                cost = way.cost + link.entry.size + step_cost
                # A pack that lies about a size would be found out when it is applied; here it is not even tried.
                if cost >= best.cost or link.entry.nbytes != wanted.nbytes:
                    continue
                longer = Route(cost=cost, links=(link, *way.links))
                if not link.entry.base or link.entry.base in held:
                    best = longer
                elif cost < cheapest.get(link.entry.base, best.cost):
                    cheapest[link.entry.base] = cost
                    further[link.entry.base] = longer
        reached = further
    return best
