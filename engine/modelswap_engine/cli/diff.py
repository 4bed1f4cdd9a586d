"""``modelswap diff A B``: what a swap from A to B would have to change. Works with the base install."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from modelswap_engine.checkpoint import manifest as manifests
from modelswap_engine.checkpoint.diff import Diff
from modelswap_engine.checkpoint.diff import diff as compare
from modelswap_engine.checkpoint.manifest import MAX_MANIFEST_BYTES, Manifest
from modelswap_engine.cli.manifest import Roots, load
from modelswap_engine.cli.options import Format, Output
from modelswap_engine.protocol.errors import InvalidCheckpoint, SourceUnreadable

if TYPE_CHECKING:
    from collections.abc import Iterator


class Report(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The answer in JSON: names by kind of difference, and what would have to travel."""

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


def register(parent: typer.Typer) -> None:
    """Add the command."""
    parent.command()(diff)


def diff(
    live: Annotated[Path, typer.Argument(metavar="A", help="A checkpoint folder, or a manifest file.")],
    target: Annotated[Path, typer.Argument(metavar="B", help="The same, for the wanted version.")],
    root: Roots = None,
    output: Format = Output.TEXT,
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit with 1 when they differ.")] = False,
) -> None:
    """Show which tensors and side files differ between two checkpoints."""
    old, new = _manifest(live, root), _manifest(target, root)
    found = compare(old, new)
    report = _report(old, new, found)
    if output is Output.JSON:
        typer.echo(msgspec.json.encode(report))
    else:
        _print(old, new, found, report)
    if exit_code and not found.empty:
        raise typer.Exit(1)


def _manifest(path: Path, roots: list[Path] | None) -> Manifest:
    if path.suffix != ".json":
        return load(path, roots)
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise InvalidCheckpoint(f"{path}: larger than {MAX_MANIFEST_BYTES} bytes", advice="name a manifest")
        return manifests.decode(path.read_bytes(), file=path.name)
    except OSError as error:
        raise SourceUnreadable(f"{path}: {error.strerror}", advice="check the path") from None


def _report(old: Manifest, new: Manifest, found: Diff) -> Report:
    travel = {*found.changed, *found.added, *found.reshaped, *found.retyped}
    return Report(
        from_digest=old.digest,
        to_digest=new.digest,
        changed=found.changed,
        added=found.added,
        removed=found.removed,
        reshaped=found.reshaped,
        retyped=found.retyped,
        side_files=found.side_changed,
        changed_bytes=sum(new.by_name[name].nbytes for name in travel),
        total_bytes=new.total_bytes,
    )


def _print(old: Manifest, new: Manifest, found: Diff, report: Report) -> None:
    from modelswap_engine.cli.render import size

    if found.empty:
        typer.echo(f"same content: {new.digest}")
        return
    # Lines, not a table that fits a terminal: names stay whole, for eyes and for grep.
    rows = [("DIFFERENCE", "FORM", "BYTES", "NAME")]
    for kind, name in _rows(found):
        forms = dict.fromkeys(form for form in (_form(old, name), _form(new, name)) if form)
        nbytes = new.by_name[name].nbytes if name in new.by_name else 0
        rows.append((kind, " -> ".join(forms), size(nbytes), name))
    rows += [("side file", "", "", name) for name in found.side_changed]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for kind, form, nbytes_text, name in rows:
        typer.echo(f"{kind:<{widths[0]}}  {form:<{widths[1]}}  {nbytes_text:>{widths[2]}}  {name}")
    count = sum(1 for _ in _rows(found))
    typer.echo(
        f"{count} of {len(old.by_name.keys() | new.by_name.keys())} tensors differ; "
        f"{size(report.changed_bytes)} of {size(report.total_bytes)} would travel"
    )


def _rows(found: Diff) -> "Iterator[tuple[str, str]]":
    form = {**dict.fromkeys(found.retyped, "retyped"), **dict.fromkeys(found.reshaped, "reshaped")}
    for kind, names in (("changed", found.changed), ("added", found.added), ("removed", found.removed)):
        yield from ((kind, name) for name in names)
    yield from ((kind, name) for name, kind in sorted(form.items()))


def _form(manifest: Manifest, name: str) -> str:
    entry = manifest.by_name.get(name)
    return f"{entry.dtype} {'x'.join(map(str, entry.shape)) or 'scalar'}" if entry is not None else ""
