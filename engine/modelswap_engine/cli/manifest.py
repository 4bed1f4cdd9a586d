"""``modelswap manifest build|sign|show|verify``: works with the base install, without torch and without an engine."""

from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec
import typer

from modelswap_engine.checkpoint import manifest as manifests
from modelswap_engine.checkpoint.build import check_shipped, hash_contents
from modelswap_engine.checkpoint.layout import Contents, read_contents
from modelswap_engine.checkpoint.manifest import MANIFEST_FILE, Manifest
from modelswap_engine.cli import elsewhere, signatures
from modelswap_engine.cli.files import write_whole
from modelswap_engine.cli.host_options import CredentialsDir
from modelswap_engine.cli.options import Format, Output
from modelswap_engine.cli.signatures import (
    ProvenanceWords,
    SigningCertificate,
    SigningChain,
    SigningKey,
    TrustedKeys,
)
from modelswap_engine.lora.config import parse_config
from modelswap_engine.lora.digest import adapter_digest
from modelswap_engine.protocol.errors import BadRequest, ManifestMismatch, SourceNotFound
from modelswap_engine.sources.adapter import CONFIG_FILE, is_adapter, read_adapter

app = typer.Typer(help="Write, sign, show and check the manifest of a checkpoint folder.", no_args_is_help=True)

Folder: TypeAlias = Annotated[
    Path, typer.Argument(metavar="DIR", help="Checkpoint folder: config.json, model.safetensors or shards.")
]
Roots: TypeAlias = Annotated[
    list[Path] | None,
    typer.Option("--root", help="Folder that links in DIR may lead to, e.g. the model cache; default: DIR itself."),
]
Target: TypeAlias = Annotated[
    Path | None, typer.Option("--output", help=f"Where to write it; - is stdout. Default: DIR/{MANIFEST_FILE}.")
]
Form: TypeAlias = Annotated[Output, typer.Option("-o", "--format", help="Form of the summary: text or json.")]


def register(parent: typer.Typer) -> None:
    """Add the commands as ``manifest``."""
    parent.add_typer(app, name="manifest")


@app.command()
def build(
    folder: Annotated[str, typer.Argument(metavar="DIR|URI", help="Checkpoint folder, or s3://…, gs://…, az://….")],
    target: Target = None,
    root: Roots = None,
    form: Form = Output.TEXT,
    sign: SigningKey = None,
    certificate: SigningCertificate = None,
    chain: SigningChain = None,
    provenance: ProvenanceWords = None,
    credentials: elsewhere.CredentialsName = "",
    credentials_dir: CredentialsDir = None,
) -> None:
    """Hash every tensor of a checkpoint and write its manifest beside it, so that a swap fetches only what changed.

    The folder of a LoRA adapter gets one too, to be signed.
    """
    signer = signatures.signer(key=sign, certificate=certificate, chain=chain or [])
    if signer is not None and target == Path("-"):
        raise BadRequest("a manifest on standard output has no place beside it for a signature", advice="omit --sign")
    given = signatures.provenance(provenance or [])
    if elsewhere.is_uri(folder):
        access = elsewhere.Access(credentials=credentials, credentials_dir=credentials_dir)
        if target is None:
            manifest = elsewhere.build(folder, access, provenance=given, sign=signer)
            _summary(manifest, form, path=f"{folder.rstrip('/')}/{MANIFEST_FILE}")
            return
        manifest, digest = elsewhere.manifest_of(folder, access), ""
    else:
        contents, roots = _read(elsewhere.local(folder), root)
        manifest = computed(contents, roots)
        digest = _pin(contents, manifest)
    manifest = msgspec.structs.replace(manifest, provenance=given)
    data = manifests.encode(manifest)
    if target == Path("-"):
        typer.echo(data, nl=False)
        return
    path = target or elsewhere.local(folder) / MANIFEST_FILE
    signature = signer(data) if signer is not None else None
    write_whole(path, data)
    signatures.put(signature, beside=path)
    _summary(manifest, form, path=path, digest=digest)


@app.command()
def sign(
    folder: Folder,
    key: Annotated[Path, typer.Option("--key", metavar="KEY", help="Private key (PEM).")],
    certificate: SigningCertificate = None,
    chain: SigningChain = None,
    root: Roots = None,
) -> None:
    """Sign the manifest that DIR has, or sign it anew; no tensor is read."""
    contents, _ = _read(folder, root)
    if shipped(contents) is None or contents.shipped is None:
        raise _no_manifest(folder)
    signature = signatures.signed(contents.shipped, key=key, certificate=certificate, chain=chain or [])
    signatures.put(signature, beside=folder / MANIFEST_FILE)


@app.command()
def show(folder: Folder, root: Roots = None, output: Format = Output.TEXT) -> None:
    """Print the manifest of DIR: the shipped one after holding it against the headers, else a computed one."""
    contents, roots = _read(folder, root)
    manifest = shipped(contents) or computed(contents, roots)
    if output is Output.JSON:
        typer.echo(manifests.encode(manifest), nl=False)
        return
    for entry in manifest.tensors:
        typer.echo(f"{entry.sha256[:16]}  {entry.dtype:<9} {entry.nbytes:>14}  {entry.name} {list(entry.shape)}")
    for side in manifest.side_files:
        typer.echo(f"{side.canonical_sha256[:16]}  {'side file':<9} {side.size:>14}  {side.name}")
    _summary(manifest, output, path=None, digest=_pin(contents, manifest))


@app.command()
def verify(folder: Folder, root: Roots = None, output: Format = Output.TEXT, key: TrustedKeys = None) -> None:
    """Hash every tensor of DIR again and compare with its shipped manifest; with --key check its signature first."""
    contents, roots = _read(folder, root)
    stated = shipped(contents)
    if stated is None:
        raise _no_manifest(folder)
    signer = signatures.verified(contents.evidence, trusted=key) if key else ""
    actual = computed(contents, roots)
    wrong = [entry for entry in stated.tensors if actual.by_name[entry.name].sha256 != entry.sha256]
    if wrong:
        raise ManifestMismatch(
            f"{folder}: {len(wrong)} tensors are not what the manifest says, the first is {wrong[0].name!r} in "
            f"{wrong[0].file}",
            advice="fetch the checkpoint again; if the change is wanted, build the manifest again",
            details={"tensor": wrong[0].name, "expected": wrong[0].sha256},
        )
    digest = _pin(contents, stated)
    _summary(stated, output, path=folder / MANIFEST_FILE, signer=signer, digest=digest)


def load(folder: Path, roots: list[Path] | None) -> Manifest:
    """Return the manifest of a folder: the shipped one, checked against the headers, else a computed one.

    Raises:
        Refused, SourceUnreadable, SourceChanged: it is not a valid checkpoint, or it cannot be read.
    """
    contents, allowed = read(folder, roots)
    return shipped(contents) or computed(contents, allowed)


def read(folder: Path, roots: list[Path] | None) -> tuple[Contents, tuple[Path, ...]]:
    """Return what is in a folder, and where its links may lead."""
    directory = folder.resolve()
    allowed = tuple(root.resolve() for root in roots) if roots else (directory,)
    return read_contents(directory, roots=allowed, shipped=True), allowed


def shipped(contents: Contents) -> Manifest | None:
    """Return the manifest that a folder came with, checked against the headers; None when it came with none."""
    if contents.shipped is None:
        return None
    manifest = manifests.decode(contents.shipped)
    check_shipped(manifest, contents, file=MANIFEST_FILE)
    return manifest


def computed(contents: Contents, roots: tuple[Path, ...]) -> Manifest:
    """Return the manifest as hashed now, with a bar on stderr."""
    from modelswap_engine.cli.progress import bar

    with bar(contents.directory.name) as progress:
        return hash_contents(contents, roots=roots, progress=progress)


def _no_manifest(folder: Path) -> SourceNotFound:
    return SourceNotFound(
        f"{folder}: there is no {MANIFEST_FILE}", advice=f"write one with: modelswap manifest build {folder}"
    )


def _read(folder: Path, roots: list[Path] | None) -> tuple[Contents, tuple[Path, ...]]:
    """Do :func:`read` for a checkpoint or a LoRA adapter."""
    directory = folder.resolve()
    if not is_adapter(directory):
        return read(folder, roots)
    allowed = tuple(root.resolve() for root in roots) if roots else (directory,)
    return read_adapter(directory, roots=allowed), allowed


def _pin(contents: Contents, manifest: Manifest) -> str:
    """Return what objects pin: an adapter is known by what it adds to a base, and not by its files."""
    config = contents.side_files.get(CONFIG_FILE)
    if config is None:
        return manifest.digest
    hashes = {entry.name: entry.sha256 for entry in manifest.tensors}
    return adapter_digest(parse_config(config), manifest.by_name, hashes)


def _summary(manifest: Manifest, form: Output, *, path: Path | str | None, signer: str = "", digest: str = "") -> None:
    provenance = msgspec.to_builtins(manifest.provenance) if manifest.provenance else {}
    if form is Output.JSON:
        facts = {
            "digest": digest or manifest.digest,
            "architecture": manifest.architecture,
            "tensors": len(manifest.tensors),
            "bytes": manifest.total_bytes,
            "sideFiles": [side.name for side in manifest.side_files],
            "path": str(path) if path is not None else "",
            "provenance": provenance,
            "signedBy": signer,
        }
        typer.echo(msgspec.json.encode(facts))
        return
    from modelswap_engine.cli.render import size

    typer.echo(f"digest        {digest or manifest.digest}")
    typer.echo(f"architecture  {manifest.architecture or '(none stated)'}")
    typer.echo(f"tensors       {len(manifest.tensors)} ({size(manifest.total_bytes)})")
    typer.echo(f"side files    {', '.join(side.name for side in manifest.side_files) or '(none)'}")
    for word, value in provenance.items():
        typer.echo(f"{word:<13} {value}")
    if path is not None:
        typer.echo(f"manifest      {path}")
    if signer:
        typer.echo(f"signed by     {signer}")
