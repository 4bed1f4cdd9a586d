"""``modelswap publish DIR URI``: a version becomes visible at once or not at all. Needs no torch and no engine."""

import asyncio
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from modelswap_engine.cli import signatures
from modelswap_engine.cli.elsewhere import Access, AlsoAllowed, CredentialsName, anywhere
from modelswap_engine.cli.host_options import CredentialsDir
from modelswap_engine.cli.manifest import Folder, Roots
from modelswap_engine.cli.options import Format, Output
from modelswap_engine.cli.signatures import ProvenanceWords, SigningCertificate, SigningChain, SigningKey
from modelswap_engine.protocol.errors import BadRequest

if TYPE_CHECKING:
    from modelswap_engine.publishing.packing import Packed
    from modelswap_engine.publishing.publisher import Published


def register(parent: typer.Typer) -> None:
    """Add the command."""
    parent.command()(publish)


def publish(
    folder: Folder,
    uri: Annotated[str, typer.Argument(metavar="URI", help="A new folder: s3://…, gs://…, az://… or file:///….")],
    base: Annotated[
        str,
        typer.Option(
            metavar="URI",
            help="A published version: only tensors that it does not have are uploaded. It must stay where it is.",
        ),
    ] = "",
    delta: Annotated[
        bool | None,
        typer.Option(
            "--delta/--no-delta",
            help="With --base: upload a pack of the elements that differ, too, for pods that hold the base. Default: "
            "where it takes at most half of the tensors that differ; what keeps it from being made is said, and the "
            "version is published all the same. --delta makes it in any case, or nothing is published.",
            show_default=False,
        ),
    ] = None,
    base_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="With --base: a local copy of it, to be read for the pack instead of the base itself.",
        ),
    ] = None,
    credentials: CredentialsName = "",
    credentials_dir: CredentialsDir = None,
    allow_source: AlsoAllowed = None,
    root: Roots = None,
    sign: SigningKey = None,
    certificate: SigningCertificate = None,
    chain: SigningChain = None,
    provenance: ProvenanceWords = None,
    output: Format = Output.TEXT,
) -> None:
    """Upload the checkpoint in DIR, and its manifest last."""
    from modelswap_engine.cli.progress import bars

    _check(base=base, delta=delta, base_dir=base_dir)
    access = Access(credentials=credentials, credentials_dir=credentials_dir, allow=allow_source)
    places = anywhere(access, *([base] if base else []), command="publish")
    from modelswap_engine.publishing.folder import read_folder
    from modelswap_engine.publishing.packing import PackOptions

    given = signatures.provenance(provenance or [])
    signing = signatures.signer(key=sign, certificate=certificate, chain=chain or [])
    with bars(f"hashing {folder.name}", "sending", "packing") as (hashing, sending, packing):
        make = partial(read_folder, folder, roots=root, provenance=given, progress=hashing)
        pack = PackOptions(folder=base_dir, required=bool(delta), progress=packing) if delta is not False else None
        work = places.publish(lambda _: make(), uri, base=base, pack=pack, sign=signing, progress=sending)
        done = asyncio.run(work)
    if output is Output.JSON:
        typer.echo(msgspec.json.encode(done))
        return
    for line in _lines(done, base=base):
        typer.echo(line)


def _check(*, base: str, delta: bool | None, base_dir: Path | None) -> None:
    if (delta or base_dir is not None) and not base:
        raise BadRequest(
            "a pack is of what differs from another version, and none is named", advice="name it with --base URI"
        )
    if delta is False and base_dir is not None:
        raise BadRequest("--base-dir is read for a pack, and --no-delta wants none", advice="leave one of them out")


def _lines(done: "Published", *, base: str) -> Iterator[str]:
    from modelswap_engine.cli.render import size

    yield f"{'already there' if done.already_there else 'published':<13} {done.uri}"
    yield f"digest        {done.digest}"
    if done.already_there:
        return
    yield f"sent          {size(done.bytes_sent)} in {done.files_sent} files, of {size(done.total_bytes)} of tensors"
    if base:
        yield f"base          {base}, which has all but {done.changed_tensors} tensors"
    if done.pack is not None:
        yield f"delta         {_pack(done.pack)}"


def _pack(pack: "Packed") -> str:
    from modelswap_engine.cli.render import size

    if pack.missing:
        return f"none: {pack.missing}"
    if pack.already_there:
        return f"{pack.name}, there already"
    return f"{pack.name}: {size(pack.bytes)} for {size(pack.dense_bytes)} of tensors that differ"
