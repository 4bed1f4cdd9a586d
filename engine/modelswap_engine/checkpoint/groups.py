"""Fusion groups: which checkpoint tensors must travel together. Pure.

A runtime parameter can be made of several checkpoint tensors (q+k+v, experts, tied pairs). Staging a part of a group
cannot be done, so a set of changed names grows to whole groups. A name in no group is read by no parameter of the
engine; it is left out, because there is nothing to stage it into.
"""

from collections.abc import Iterable, Sequence

Groups = Sequence[Sequence[str]]


def touched_groups(names: Iterable[str], groups: Groups) -> tuple[tuple[str, ...], ...]:
    """Return the groups with at least one of the names, in the engine's order."""
    wanted = frozenset(names)
    return tuple(tuple(group) for group in groups if not wanted.isdisjoint(group))


def close_over_groups(names: Iterable[str], groups: Groups) -> tuple[str, ...]:
    """Return the smallest set of names that holds the given ones as whole groups, sorted."""
    return tuple(sorted({name for group in touched_groups(names, groups) for name in group}))
