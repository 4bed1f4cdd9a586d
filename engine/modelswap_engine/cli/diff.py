"""``modelswap diff A B``: what a swap from A to B would have to change. Works with the base install."""

from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from modelswap_engine.checkpoint import manifest as manifests
from modelswap_engine.checkpoint.diff import Diff
from modelswap_engine.checkpoint.diff import diff as compare
from modelswap_engine.checkpoint.manifest import MANIFEST_FILE, MAX_MANIFEST_BYTES, Manifest
from modelswap_engine.cli import elsewhere
from modelswap_engine.cli.host_options import CredentialsDir
from modelswap_engine.cli.manifest import Roots, load
from modelswap_engine.cli.options import Format, Output
from modelswap_engine.protocol.errors import InvalidCheckpoint, SourceUnreadable


class By(StrEnum):
    """What a line of the table is."""

    TENSOR = "tensor"
    GROUP = "group"
    LAYER = "layer"


PictureFile = Annotated[
    Path | None,
    typer.Option("--picture", metavar="FILE", help="Draw a heat map of layers and kinds of tensor: .png or .html."),
]


def register(parent: typer.Typer) -> None:
    """Add the command."""
    parent.command()(diff)


def diff(
    live: Annotated[str, typer.Argument(metavar="A", help="A checkpoint folder, a manifest file, or a URI (s3://…).")],
    target: Annotated[str, typer.Argument(metavar="B", help="The same, for the wanted version.")],
    root: Roots = None,
    output: Format = Output.TEXT,
    by: Annotated[By, typer.Option(help="What a line of the table is; JSON has all of them.")] = By.TENSOR,
    picture: PictureFile = None,
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit with 1 when they differ.")] = False,
    credentials: elsewhere.CredentialsName = "",
    credentials_dir: CredentialsDir = None,
    allow_source: elsewhere.AlsoAllowed = None,
) -> None:
    """Show which tensors and side files differ between two checkpoints."""
    from modelswap_engine.cli import difference

    access = elsewhere.Access(credentials=credentials, credentials_dir=credentials_dir, allow=allow_source)
    old, new = (_manifest(given, root, access) for given in (live, target))
    found = compare(old, new)
    if picture is not None:
        difference.draw(picture, old, new, found, names=(_name(live), _name(target)))
    if output is Output.JSON:
        typer.echo(difference.as_json(old, new, found))
    elif found.empty:
        typer.echo(f"same content: {new.digest}")
    else:
        for line in _lines(old, new, found, by):
            typer.echo(line)
    if exit_code and not found.empty:
        raise typer.Exit(1)


def _manifest(given: str, roots: list[Path] | None, access: elsewhere.Access) -> Manifest:
    if elsewhere.is_uri(given):
        return elsewhere.manifest_of(given, access)
    path = elsewhere.local(given)
    if path.suffix != ".json":
        return load(path, roots)
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise InvalidCheckpoint(f"{path}: larger than {MAX_MANIFEST_BYTES} bytes", advice="name a manifest")
        return manifests.decode(path.read_bytes(), file=path.name)
    except OSError as error:
        raise SourceUnreadable(f"{path}: {error.strerror}", advice="check the path") from None


def _name(given: str) -> str:
    path = Path(given) if elsewhere.is_uri(given) else elsewhere.local(given).resolve()
    return path.parent.name if path.name == MANIFEST_FILE else path.name


def _lines(old: Manifest, new: Manifest, found: Diff, by: By) -> Iterator[str]:
    from modelswap_engine.cli import difference

    table = {By.TENSOR: difference.by_tensor, By.GROUP: difference.by_group, By.LAYER: difference.by_layer}[by]
    rows = list(table(old, new, found))
    # Lines, not a table that fits a terminal: names stay whole, for eyes and for grep.
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    for *cells, name in rows:
        aligned = [
            f"{cell:>{width}}" if heading in difference.FIGURES else f"{cell:<{width}}"
            for cell, width, heading in zip(cells, widths, rows[0], strict=False)
        ]
        yield "  ".join([*aligned, name])
    yield difference.summary(old, new, found)
