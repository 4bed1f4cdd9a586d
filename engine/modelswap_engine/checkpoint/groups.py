"""Fusion groups: which checkpoint tensors must travel together. Pure.

A runtime parameter can be made of several checkpoint tensors (q+k+v, experts, tied pairs). A part of a group cannot be
staged, so a set of changed names grows to the whole groups that it touches. A name in no group is read by no parameter
of the engine; it touches nothing, because there is nothing to stage it into.

Which groups there are is for the engine's own loading to say. Where there is no engine, :func:`usual_groups` guesses
by the names that serving engines fuse: good for an estimate, never for a swap.
"""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from modelswap_engine.checkpoint.places import place

_FUSED: Final[Mapping[str, str]] = MappingProxyType(
    {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
        **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
        **dict.fromkeys(("w1", "w3"), "w13"),
        **dict.fromkeys(("query", "key", "value"), "qkv"),
        **dict.fromkeys(("q_a_proj", "kv_a_proj_with_mqa"), "fused_qkv_a_proj"),
    }
)


def touched_groups(names: Iterable[str], groups: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    """Return the groups with at least one of the names, in the engine's order."""
    wanted = frozenset(names)
    return tuple(tuple(group) for group in groups if not wanted.isdisjoint(group))


def usual_groups(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return name of the group → its tensors: what most engines make one parameter of, in the order of the names.

    Together go q, k and v, gate and up, all experts of a layer, and a weight with its scales; a bias goes by itself.
    """
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(_group(name), []).append(name)
    return {group: tuple(members) for group, members in found.items()}


def _group(name: str) -> str:
    parts = name.split(".")
    where = place(name)
    if where.parameter:
        parts.pop()
    experts = next((index for index, part in enumerate(parts) if part == "experts"), len(parts))
    kept = [part for index, part in enumerate(parts) if index <= experts or not part.isdecimal()]
    kept[-1] = _FUSED.get(kept[-1], kept[-1])
    return ".".join([*kept, "bias"] if where.parameter == "bias" else kept)
