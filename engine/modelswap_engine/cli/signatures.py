"""Signatures and provenance on the command line: options, and what is done with the files that they name."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec
import typer

from modelswap_engine.checkpoint.layout import SIGNATURE_FILE, Evidence
from modelswap_engine.checkpoint.manifest import MANIFEST_FILE, Provenance, check_provenance
from modelswap_engine.cli.files import write_whole
from modelswap_engine.cli.host_options import needs
from modelswap_engine.protocol.errors import BadRequest

SigningKey: TypeAlias = Annotated[
    Path | None, typer.Option("--sign", metavar="KEY", help="Sign it with this private key (PEM).")
]
SigningCertificate: TypeAlias = Annotated[
    Path | None, typer.Option("--certificate", help="Certificate of the key (PEM), for who trusts an authority.")
]
SigningChain: TypeAlias = Annotated[
    list[Path] | None, typer.Option("--chain", help="Certificate between it and the authority (repeatable).")
]
TrustedKeys: TypeAlias = Annotated[
    list[Path] | None,
    typer.Option("--key", help="Public key or authority's certificate (PEM), or a folder of them (repeatable)."),
]
ProvenanceWords: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--provenance",
        metavar="WORD=VALUE",
        help="Where the version comes from: who, when, base, job (repeatable). Signed, and no part of the digest.",
    ),
]


def provenance(words: Sequence[str]) -> Provenance | msgspec.UnsetType:
    """Read ``--provenance``.

    Raises:
        BadRequest: not of the form, or another word.
        InvalidCheckpoint: a value that a manifest must not have.
    """
    given = {word: value for word, _, value in (item.partition("=") for item in words)}
    known = Provenance.__struct_fields__
    if any("=" not in item for item in words) or given.keys() - set(known) or len(given) < len(words):
        raise BadRequest(
            f"--provenance {' '.join(words)!r}: WORD=VALUE is wanted, each word once",
            advice=f"words are: {', '.join(known)}",
        )
    found = Provenance(**given) if given else msgspec.UNSET
    check_provenance(found, file="--provenance")
    return found


def signed(manifest: bytes, *, key: Path, certificate: Path | None, chain: Sequence[Path]) -> bytes:
    """Return the signature of a manifest.

    Raises:
        BadRequest: the key cannot be used, or the package is not installed.
    """
    from modelswap_engine.signing.sign import sign

    try:
        return sign(manifest, key=key, certificate=certificate, chain=chain)
    except ModuleNotFoundError as error:
        raise needs("manifest build --sign", error, extra="signing") from None


def signer(*, key: Path | None, certificate: Path | None, chain: Sequence[Path]) -> Callable[[bytes], bytes] | None:
    """Return what signs manifests by these options; None where nothing is to be signed.

    Raises:
        BadRequest: certificates without a key.
    """
    if key is None:
        if certificate is not None or chain:
            raise BadRequest(
                "--certificate and --chain belong to --sign", advice="name the certificate's key with --sign"
            )
        return None
    return partial(signed, key=key, certificate=certificate, chain=chain)


def put(signature: bytes | None, *, beside: Path) -> None:
    """Write the signature beside a manifest; say so where another one lies there that does not fit any more.

    Raises:
        SourceUnreadable: it cannot be written.
    """
    file = beside.with_name(f"{beside.name}{SIGNATURE_FILE.removeprefix(MANIFEST_FILE)}")
    if signature is not None:
        write_whole(file, signature)
    elif file.exists():
        typer.echo(f"note: {file} signs what was there before; sign anew: modelswap manifest sign", err=True)


def verified(evidence: Evidence | None, *, trusted: Sequence[Path]) -> str:
    """Return who signed a manifest, for a person.

    Raises:
        SignatureMissing, SignatureInvalid, TrustedKeysUnusable: it is not signed by a trusted key.
    """
    from modelswap_engine.signing.trust import read_trusted
    from modelswap_engine.signing.verify import unsigned, verify

    if evidence is None:
        raise unsigned()
    return str(verify(evidence, trusted=read_trusted(trusted), now=datetime.now(UTC)))
