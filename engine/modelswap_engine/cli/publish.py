"""``modelswap publish DIR URI``: a version becomes visible at once or not at all. Needs no torch and no engine."""

import asyncio
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from modelswap_engine.cli import signatures
from modelswap_engine.cli.elsewhere import Access, AlsoAllowed, CredentialsName, anywhere
from modelswap_engine.cli.host_options import CredentialsDir
from modelswap_engine.cli.manifest import Folder, Roots
from modelswap_engine.cli.options import Format, Output
from modelswap_engine.cli.signatures import ProvenanceWords, SigningCertificate, SigningChain, SigningKey

if TYPE_CHECKING:
    from modelswap_engine.publishing.publisher import Published


def register(parent: typer.Typer) -> None:
    """Add the command."""
    parent.command()(publish)


def publish(
    folder: Folder,
    uri: Annotated[str, typer.Argument(metavar="URI", help="A new folder: s3://…, gs://…, az://… or file:///….")],
    base: Annotated[
        str, typer.Option(metavar="URI", help="A published version: only tensors that it does not have are uploaded.")
    ] = "",
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

    access = Access(credentials=credentials, credentials_dir=credentials_dir, allow=allow_source)
    places = anywhere(access, *([base] if base else []), command="publish")
    from modelswap_engine.publishing.folder import read_folder

    given = signatures.provenance(provenance or [])
    signing = signatures.signer(key=sign, certificate=certificate, chain=chain or [])
    with bars(f"hashing {folder.name}", "sending") as (hashing, sending):
        make = partial(read_folder, folder, roots=root, provenance=given, progress=hashing)
        done = asyncio.run(places.publish(lambda _: make(), uri, base=base, sign=signing, progress=sending))
    if output is Output.JSON:
        typer.echo(msgspec.json.encode(done))
        return
    for line in _lines(done, base=base):
        typer.echo(line)


def _lines(done: "Published", *, base: str) -> Iterator[str]:
    from modelswap_engine.cli.render import size

    yield f"{'already there' if done.already_there else 'published':<13} {done.uri}"
    yield f"digest        {done.digest}"
    if done.already_there:
        return
    yield f"sent          {size(done.bytes_sent)} in {done.files_sent} files, of {size(done.total_bytes)} of tensors"
    if base:
        yield f"base          {base}, which has all but {done.changed_tensors} tensors"
