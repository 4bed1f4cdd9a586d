"""Fusion groups: which checkpoint tensors must travel together. Pure.

A runtime parameter can be made of several checkpoint tensors (q+k+v, experts, tied pairs). A part of a group cannot be
staged, so a set of changed names grows to the whole groups that it touches. A name in no group is read by no parameter
of the engine; it touches nothing, because there is nothing to stage it into.
"""

from collections.abc import Iterable, Sequence


def touched_groups(names: Iterable[str], groups: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    """Return the groups with at least one of the names, in the engine's order."""
    wanted = frozenset(names)
    return tuple(tuple(group) for group in groups if not wanted.isdisjoint(group))
