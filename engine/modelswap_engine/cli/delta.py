"""``modelswap delta build|apply|show``: packs of the elements that differ between two versions. Needs no torch."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import msgspec
import typer

from modelswap_engine.cli.host_options import needs
from modelswap_engine.cli.manifest import Roots, computed, read, shipped
from modelswap_engine.cli.options import Digest, Format, Output
from modelswap_engine.protocol.errors import DigestMismatch

if TYPE_CHECKING:
    from modelswap_engine.delta.layout import Header, PackedTensor
    from modelswap_engine.delta.local import Folder

app = typer.Typer(help="Make, use and show packs of what changed between two versions.", no_args_is_help=True)

Form: TypeAlias = Annotated[Output, typer.Option("--format", help="Form of the summary: text or json.")]
PackFile: TypeAlias = Annotated[Path, typer.Argument(metavar="PACK", help="A file that `modelswap delta build` wrote.")]


class Report(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The answer in JSON: the new version has ``total_bytes`` with its side files, of which ``dense_bytes`` are new."""

    path: str
    from_digest: str
    to_digest: str
    tensors: int
    removed: int
    side_files: tuple[str, ...]
    dense_bytes: int
    pack_bytes: int
    total_bytes: int


class Shown(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """``delta show`` in JSON: the report, and the header of the pack."""

    report: Report
    header: "Header"


def register(parent: typer.Typer) -> None:
    """Add the commands as ``delta``."""
    parent.add_typer(app, name="delta")


@app.command()
def build(
    base: Annotated[Path, typer.Argument(metavar="A", help="Checkpoint folder of the old version.")],
    target: Annotated[Path, typer.Argument(metavar="B", help="Checkpoint folder of the new version.")],
    output: Annotated[
        Path,
        typer.Option(
            "-o",
            "--output",
            metavar="PACK",
            help="The pack, a new file; in a folder that is there, B say, it gets the name that pods look for.",
        ),
    ],
    root: Roots = None,
    form: Form = Output.TEXT,
) -> None:
    """Write the elements that differ between A and B into one file, from which B can be made where A is."""
    with _packages("build"):
        from modelswap_engine.cli.progress import bar
        from modelswap_engine.delta.build import build_pack
        from modelswap_engine.delta.layout import pack_name
        from modelswap_engine.delta.local import require_free

        inside = output.is_dir()
        if not inside:
            require_free(output)  # hashing a folder that came without a manifest can take long
        old, new = _folder(base, root), _folder(target, root)
        path = output / pack_name(old.manifest.digest) if inside else output
        with bar(path.name) as progress:
            header = build_pack(old, new, path, progress=progress)
        _summary(_report(header, path=path, nbytes=path.stat().st_size), form)


@app.command()
def apply(
    pack: PackFile,
    base: Annotated[Path, typer.Option("--base", metavar="A", help="Checkpoint folder that the pack was built from.")],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="The new version; a new folder.")],
    digest: Digest = "",
    root: Roots = None,
    form: Form = Output.TEXT,
) -> None:
    """Make the new version out of A and PACK, as a folder of its own; every tensor is hashed. A is only read."""
    with _packages("apply"):
        from modelswap_engine.cli.progress import bar
        from modelswap_engine.delta.folder import apply_pack
        from modelswap_engine.delta.local import opened_pack, require_free

        require_free(output)
        with opened_pack(pack) as opened:
            promised = opened.header.target.digest
            if digest and digest != promised:
                raise DigestMismatch(
                    f"{pack}: it makes {promised}, asked was {digest}",
                    advice="take the pack of the wanted version",
                    details={"expected": digest, "actual": promised},
                )
            with bar(output.name) as progress:
                apply_pack(opened, _folder(base, root), output, progress=progress)
            report = _report(opened.header, path=output, nbytes=opened.ranges.size)
        _summary(report, form)


@app.command()
def show(pack: PackFile, output: Format = Output.TEXT) -> None:
    """Print what is in PACK: from which version to which, and what of each tensor."""
    with _packages("show"):
        from modelswap_engine.delta.local import opened_pack

        with opened_pack(pack) as opened:
            header = opened.header
            report = _report(header, path=pack, nbytes=opened.ranges.size)
        if output is Output.JSON:
            typer.echo(msgspec.json.encode(Shown(report=report, header=header)))
            return
        _table(header)
        _summary(report, output)


@contextlib.contextmanager
def _packages(command: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise needs(f"delta {command}", error, extra="sources") from None


def _folder(path: Path, roots: list[Path] | None) -> "Folder":
    from modelswap_engine.delta.local import Folder

    contents, allowed = read(path, roots)
    return Folder(contents=contents, manifest=shipped(contents) or computed(contents, allowed), roots=allowed)


def _report(header: "Header", *, path: Path, nbytes: int) -> Report:
    return Report(
        path=str(path),
        from_digest=header.base.digest,
        to_digest=header.target.digest,
        tensors=len(header.tensors),
        removed=len(header.removed),
        side_files=tuple(side.name for side in header.side_files if side.packed),
        dense_bytes=header.dense_bytes,
        pack_bytes=nbytes,
        total_bytes=header.target.bytes + sum(side.size for side in header.side_files),
    )


def _summary(report: Report, form: Output) -> None:
    if form is Output.JSON:
        typer.echo(msgspec.json.encode(report))
        return
    from modelswap_engine.cli.render import size

    typer.echo(f"from          {report.from_digest}")
    typer.echo(f"to            {report.to_digest}")
    typer.echo(f"tensors       {report.tensors} made, {report.removed} removed")
    typer.echo(f"side files    {', '.join(report.side_files) or '(the same)'}")
    typer.echo(
        f"bytes         {size(report.pack_bytes)} packed for {size(report.dense_bytes)} that changed "
        f"(1/{report.dense_bytes / report.pack_bytes:.1f}), of {size(report.total_bytes)}"
    )
    typer.echo(f"path          {report.path}")


def _table(header: "Header") -> None:
    from modelswap_engine.cli.render import size

    # Lines, not a table that fits a terminal: names stay whole, for eyes and for grep.
    rows = [("CODING", "ELEMENTS", "BYTES", "PACKED", "NAME")]
    rows += [
        (entry.coding or "-", _share(entry), size(entry.nbytes), size(entry.size), entry.name)
        for entry in header.tensors
    ]
    rows += [("removed", "", "", "", name) for name in header.removed]
    rows += [("side file", "", size(side.size), size(side.packed), side.name) for side in header.side_files]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for coding, share, nbytes, packed, name in rows:
        typer.echo(f"{coding:<{widths[0]}}  {share:>{widths[1]}}  {nbytes:>{widths[2]}}  {packed:>{widths[3]}}  {name}")


def _share(entry: "PackedTensor") -> str:
    """Say how many of its elements are others; all of one that is made from nothing."""
    from math import prod

    count = prod(entry.shape)
    return f"{100 * entry.changed / count:.2f} %" if entry.base and count else "new"
