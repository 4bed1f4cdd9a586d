"""Checkpoints that a command is given by a URI: with what they are reached. What reads them is imported when one is."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import msgspec
import typer

from modelswap_engine.checkpoint.manifest import Manifest, Provenance
from modelswap_engine.cli.host_options import needs

if TYPE_CHECKING:
    from modelswap_engine.publishing.anywhere import Anywhere

CredentialsName: TypeAlias = Annotated[
    str,
    typer.Option(
        "--credentials", help="Name in --credentials-dir. Default: the environment, or the machine's own identity."
    ),
]
AlsoAllowed: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--allow-source", help="Prefix that manifests may name besides the buckets given (repeatable)."),
]


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """What URIs are reached with."""

    credentials: str = ""
    credentials_dir: Path | None = None
    allow: list[str] | None = None


def is_uri(text: str) -> bool:
    """Say whether an argument is a URI of what does not lie in a folder here."""
    return "://" in text and not text.lower().startswith("file:")


def local(text: str) -> Path:
    """Return the folder or file that an argument names.

    Raises:
        SourceNotAllowed: a ``file:`` URI that is none.
    """
    if "://" not in text:
        return Path(text)
    from modelswap_engine.sources.file import path_of

    return path_of(text)


def anywhere(access: Access, *uris: str, command: str) -> "Anywhere":
    """Return what reads from and publishes to places elsewhere.

    Args:
        access: with what.
        uris: those that will be read; what only they need is imported.
        command: for messages.

    Raises:
        BadRequest: packages are missing.
    """
    allow, opener = access.allow or (), None
    try:
        from modelswap_engine.publishing.anywhere import Anywhere, is_mounted, is_object_store
    except ModuleNotFoundError as error:
        raise needs(command, error, extra="sources") from None
    if not all(is_object_store(uri) or is_mounted(uri) for uri in uris):
        try:
            from modelswap_engine.cli.openers import openers
        except ModuleNotFoundError as error:
            raise needs(command, error, extra="sidecar") from None
        opener = openers(credentials_dir=access.credentials_dir, allow=[*uris, *allow])
    return Anywhere(credentials=access.credentials, credentials_dir=access.credentials_dir, allow=allow, opener=opener)


def manifest_of(uri: str, access: Access) -> Manifest:
    """Return the manifest of a checkpoint elsewhere: the one beside it, else a computed one."""
    from modelswap_engine.cli.progress import bar

    with bar(f"hashing {Path(uri).name}") as progress:
        return asyncio.run(anywhere(access, uri, command="… URI").manifest(uri, progress=progress))


def build(
    uri: str, access: Access, *, provenance: Provenance | msgspec.UnsetType, sign: Callable[[bytes], bytes] | None
) -> Manifest:
    """Hash a checkpoint elsewhere and write its manifest beside it."""
    from modelswap_engine.cli.progress import bar

    places = anywhere(access, command="manifest build URI")
    with bar(f"hashing {Path(uri).name}") as progress:
        return asyncio.run(places.build(uri, provenance=provenance, sign=sign, progress=progress))
