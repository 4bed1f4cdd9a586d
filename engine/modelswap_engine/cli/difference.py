"""What ``modelswap diff`` says of two manifests: its tables, its JSON and its picture. It reads no checkpoint."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from modelswap_engine.checkpoint.diff import Diff
from modelswap_engine.checkpoint.grid import Count, Grid, make_grid, total
from modelswap_engine.checkpoint.groups import usual_groups
from modelswap_engine.checkpoint.manifest import Manifest
from modelswap_engine.cli.render import size

FIGURES: Final = frozenset({"BYTES", "OF", "SHARE", "TENSORS", "GROUPS"})
"""Headings of columns that stand to the right."""

_ROW = tuple[str, ...]


class KindReport(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A kind of tensor in a layer; bytes count whole tensors."""

    kind: str
    family: str
    tensors: int
    changed_tensors: int
    bytes: int
    changed_bytes: int


class LayerReport(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A layer; ``number`` is null for what is in none."""

    stack: str
    number: int | None
    tensors: int
    changed_tensors: int
    bytes: int
    changed_bytes: int
    kinds: tuple[KindReport, ...]


class GroupReport(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Tensors that engines usually make one parameter of, at least one of which differs."""

    name: str
    tensors: int
    changed_tensors: int
    bytes: int


class Report(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The answer in JSON: names by kind of difference, and what would have to travel and be staged."""

    from_digest: str
    to_digest: str
    changed: tuple[str, ...]
    added: tuple[str, ...]
    removed: tuple[str, ...]
    reshaped: tuple[str, ...]
    retyped: tuple[str, ...]
    side_files: tuple[str, ...]
    changed_bytes: int
    total_bytes: int
    group_bytes: int
    groups: tuple[GroupReport, ...]
    layers: tuple[LayerReport, ...]


def as_json(old: Manifest, new: Manifest, found: Diff) -> bytes:
    """Return the whole answer."""
    groups = _groups(old, new, found)
    report = Report(
        from_digest=old.digest,
        to_digest=new.digest,
        changed=found.changed,
        added=found.added,
        removed=found.removed,
        reshaped=found.reshaped,
        retyped=found.retyped,
        side_files=found.side_changed,
        changed_bytes=_travelling(new, found),
        total_bytes=new.total_bytes,
        group_bytes=sum(group.bytes for group in groups),
        groups=groups,
        layers=tuple(_layers(make_grid(old, new, found))),
    )
    return msgspec.json.encode(report)


def by_tensor(old: Manifest, new: Manifest, found: Diff) -> Iterator[_ROW]:
    """Return a heading, and a line for each tensor and side file that differs."""
    yield ("DIFFERENCE", "FORM", "BYTES", "NAME")
    for kind, name in _differences(found):
        forms = dict.fromkeys(form for form in (_form(old, name), _form(new, name)) if form)
        nbytes = new.by_name[name].nbytes if name in new.by_name else 0
        yield (kind, " -> ".join(forms), size(nbytes), name)
    for name in found.side_changed:
        yield ("side file", "", "", name)


def by_group(old: Manifest, new: Manifest, found: Diff) -> Iterator[_ROW]:
    """Return a heading, and a line for each fusion group that a swap would stage."""
    yield ("TENSORS", "BYTES", "GROUP")
    for group in _groups(old, new, found):
        yield (f"{group.changed_tensors} of {group.tensors}", size(group.bytes), group.name)


def by_layer(old: Manifest, new: Manifest, found: Diff) -> Iterator[_ROW]:
    """Return a heading, and a line for each layer in which something differs."""
    yield ("TENSORS", "BYTES", "OF", "SHARE", "LAYER", "KINDS")
    grid = make_grid(old, new, found)
    for row in grid.rows:
        count = grid.row(row)
        if count.changed:
            kinds = ", ".join(kind.name for kind, cell in grid.kinds_of(row) if cell.changed)
            yield (*_figures(count), row.label, kinds)


def summary(old: Manifest, new: Manifest, found: Diff) -> str:
    """Return the last line of every table."""
    count = sum(1 for _ in _differences(found))
    groups = _groups(old, new, found)
    return (
        f"{count} of {len(old.by_name.keys() | new.by_name.keys())} tensors differ, in {len(groups)} groups of "
        f"{size(sum(group.bytes for group in groups))}; "
        f"{size(_travelling(new, found))} of {size(new.total_bytes)} would travel"
    )


def draw(path: Path, old: Manifest, new: Manifest, found: Diff, *, names: tuple[str, str]) -> None:
    """Write the picture.

    Raises:
        BadRequest, SourceUnreadable: see :func:`~modelswap_engine.cli.heatmap.writing.write_picture`.
    """
    from modelswap_engine.cli.heatmap.picture import Picture
    from modelswap_engine.cli.heatmap.writing import write_picture

    grid = make_grid(old, new, found)
    write_picture(Picture(old=names[0], new=names[1], grid=grid, side_files=found.side_changed), path)


def _figures(count: Count) -> _ROW:
    tensors = f"{count.changed} of {count.tensors}"
    return (tensors, size(count.changed_bytes), size(count.nbytes), f"{100 * count.share:.1f} %")


def _layers(grid: Grid) -> Iterator[LayerReport]:
    for row in grid.rows:
        cells = tuple(grid.kinds_of(row))
        whole = total(count for _, count in cells)
        yield LayerReport(
            stack=row.stack,
            number=row.layer if row.layer >= 0 else None,
            tensors=whole.tensors,
            changed_tensors=whole.changed,
            bytes=whole.nbytes,
            changed_bytes=whole.changed_bytes,
            kinds=tuple(
                KindReport(
                    kind=kind.name,
                    family=kind.family,
                    tensors=count.tensors,
                    changed_tensors=count.changed,
                    bytes=count.nbytes,
                    changed_bytes=count.changed_bytes,
                )
                for kind, count in cells
            ),
        )


def _groups(old: Manifest, new: Manifest, found: Diff) -> tuple[GroupReport, ...]:
    """Return the groups of ``new`` that a swap would stage."""
    changed = {name for _, name in _differences(found)}
    entries = new.by_name
    return tuple(
        GroupReport(
            name=group,
            tensors=len(members),
            changed_tensors=sum(name in changed for name in members),
            bytes=sum(entries[name].nbytes for name in members),
        )
        for group, members in usual_groups(entries).items()
        if not changed.isdisjoint(members)
    )


def _travelling(new: Manifest, found: Diff) -> int:
    travel = {*found.changed, *found.added, *found.reshaped, *found.retyped}
    return sum(new.by_name[name].nbytes for name in travel)


def _differences(found: Diff) -> Iterator[tuple[str, str]]:
    form = {**dict.fromkeys(found.retyped, "retyped"), **dict.fromkeys(found.reshaped, "reshaped")}
    for kind, names in (("changed", found.changed), ("added", found.added), ("removed", found.removed)):
        yield from ((kind, name) for name in names)
    yield from ((kind, name) for name, kind in sorted(form.items()))


def _form(manifest: Manifest, name: str) -> str:
    entry = manifest.by_name.get(name)
    return f"{entry.dtype} {'x'.join(map(str, entry.shape)) or 'scalar'}" if entry is not None else ""
