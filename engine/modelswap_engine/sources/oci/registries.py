"""``oci://host/repository[:tag][@digest]``: a registry of the OCI distribution specification, asked for one artifact.

A tag is resolved to a digest once, when the folder is opened; files are read as blobs by their own digests, so that
nothing that happens to the tag later changes them. Knows nothing of checkpoints.
"""

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from yarl import URL

from modelswap_engine.checkpoint.rules import shown
from modelswap_engine.protocol.errors import SourceNotAllowed, SourceNotFound, SourceUnreadable
from modelswap_engine.sources.credentials import Credentials
from modelswap_engine.sources.oci.layout import (
    INDEX_TYPES,
    MANIFEST_TYPES,
    Archive,
    Layout,
    layout_of,
    part_of,
    placed,
)
from modelswap_engine.sources.oci.login import RegistryLogin, secret_of
from modelswap_engine.sources.oci.tar import Member, members
from modelswap_engine.sources.remote.port import FileStat
from modelswap_engine.sources.web.answers import Target
from modelswap_engine.sources.web.authorization import Authorizer
from modelswap_engine.sources.web.ranges import Reader, WebSettings

PLAIN_KEY: Final = "OCI_PLAIN_HTTP"
MAX_MANIFEST_BYTES: Final = 4 << 20
_ELSEWHERE: Final = {"docker.io": "registry-1.docker.io"}
_PART: Final = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_URI: Final = re.compile(
    rf"oci://([\w.-]+(?::\d{{1,5}})?)/({_PART}(?:/{_PART})*)(?::(\w[\w.-]{{0,127}}))?(?:@(sha256:[0-9a-f]{{64}}))?",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class ArtifactAddress:
    """An artifact of a repository; the digest decides where there is one."""

    host: str
    repository: str
    tag: str
    digest: str


class Registries:
    """Opens artifacts; see :class:`sources.remote.port.Opener`.

    Args:
        credentials: those that are mounted (``.dockerconfigjson``, or ``username`` and ``password``; ``ca.crt``;
            ``OCI_PLAIN_HTTP`` = ``true`` for a registry without TLS).
        settings: how to ask.
    """

    def __init__(self, credentials: Credentials, settings: WebSettings) -> None:
        self._credentials, self._settings = credentials, settings

    async def open(self, uri: str, *, credentials: str) -> "ArtifactFolder":
        """Open an artifact by its URI: its manifest is read."""
        address = parse(uri)
        values = await asyncio.to_thread(self._credentials.read, credentials)
        secret = secret_of(values, host=address.host)
        plain = values.get(PLAIN_KEY) == "true"
        reader = await Reader.opened(self._settings, values)
        try:
            login = RegistryLogin(reader, host=address.host, repository=address.repository, secret=secret, plain=plain)
            return await ArtifactFolder.opened(address, reader, login, scheme="http" if plain else "https")
        except BaseException:
            await reader.close()
            raise


class ArtifactFolder:
    """The files of one artifact.

    Args:
        address: of it, with its digest.
        layout: what its manifest names.
        reader: closed with it.
        login: who we are there.
        base: the address of the repository.
    """

    def __init__(self, address: ArtifactAddress, layout: Layout, reader: Reader, login: Authorizer, base: URL) -> None:
        self.uri = f"oci://{address.host}/{address.repository}@{address.digest}"
        self._layout, self._reader, self._login, self._base = layout, reader, login, base
        self._files: Mapping[str, FileStat] | None = None if layout.archives else layout.files
        self._listing = asyncio.Lock()

    @classmethod
    async def opened(
        cls, address: ArtifactAddress, reader: Reader, login: Authorizer, *, scheme: str
    ) -> "ArtifactFolder":
        """Read the manifest of an artifact.

        Raises:
            SourceNotFound: there is none.
            SourceUnreadable: what came is not what the digest names.
            UnsupportedFormat, InvalidCheckpoint, SourceDenied: see :func:`sources.oci.layout.layout_of`.
        """
        base = URL(f"{scheme}://{_ELSEWHERE.get(address.host, address.host)}/v2/{address.repository}")
        named = f"oci://{address.host}/{address.repository}"
        target = Target(
            url=base / "manifests" / (address.digest or address.tag),
            shown=f"{named}: {address.digest or address.tag}",
            host=base.host or "",
            authorizer=login,
        )
        accept = ", ".join(MANIFEST_TYPES + INDEX_TYPES)
        found = await reader.document(target, limit=MAX_MANIFEST_BYTES, accept=accept)
        if found is None:
            raise SourceNotFound(f"{target.shown} is not there", advice="check the repository, the tag and the digest")
        digest = f"sha256:{hashlib.sha256(found[0]).hexdigest()}"
        if address.digest not in {"", digest}:
            raise SourceUnreadable(f"{target.shown}: its manifest hashes to {digest}", advice="look at the registry")
        layout = layout_of(found[0], shown_as=target.shown)
        return cls(ArtifactAddress(address.host, address.repository, address.tag, digest), layout, reader, login, base)

    async def files(self, names: Iterable[str]) -> Mapping[str, FileStat]:
        """Return all files; the revision of each says which blob it is, or where in which."""
        async with self._listing:
            if self._files is None:
                found = [(archive, member) for archive in self._layout.archives for member in await self._read(archive)]
                self._files = placed(self._layout, found, shown_as=self.uri)
            return self._files

    async def _read(self, archive: Archive) -> tuple[Member, ...]:
        async def read(start: int, stop: int) -> bytes:
            stat = FileStat(size=archive.size, revision=archive.digest)
            return b"".join([bytes(piece) async for piece in self.stream(archive.name, start, stop, stat=stat)])

        return await members(read, archive.size, name=f"{self.uri}: {archive.name}")

    def stream(self, name: str, start: int, stop: int, *, stat: FileStat) -> AsyncIterator[bytes]:
        """Yield a range of a file's blob, of this artifact or of the one that the file was found in."""
        digest, size, offset = part_of(stat)
        target = Target(
            url=self._base / "blobs" / digest,
            shown=f"{self.uri}: {name}",
            host=self._base.host or "",
            authorizer=self._login,
        )
        blob = FileStat(size=size, revision=digest)
        return self._reader.stream(target, offset + start, offset + stop, stat=blob)

    async def close(self) -> None:
        """Close its connections."""
        await self._reader.close()


def parse(uri: str) -> ArtifactAddress:
    """Return what a URI names.

    Raises:
        SourceNotAllowed: it is no such URI, or names neither a tag nor a digest.
    """
    match = _URI.fullmatch(uri)
    if match is None or not (match[3] or match[4]):
        raise SourceNotAllowed(
            f"{shown(uri, 200)}: not of the form oci://host/repository:tag or oci://host/repository@sha256:…",
            advice="name a tag, a digest or both; credentials are mounted, never written into the URI",
        )
    host, repository = match[1], match[2]
    if host == "docker.io" and "/" not in repository:
        repository = f"library/{repository}"
    return ArtifactAddress(host, repository, match[3] or "", match[4] or "")
