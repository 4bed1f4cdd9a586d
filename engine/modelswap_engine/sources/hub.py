"""``hf://org/repository[@revision][/folder]``: models on a hub that speaks Hugging Face's protocol.

A revision is resolved to a commit once, when the folder is opened, and all that is read is of that commit. Bytes come
by ranges from ``/resolve``, also of files that the hub keeps in Xet: for these it sends to a bridge. The library of the
hub is not used for it: it reads tokens and settings of its own accord, shares one client between all users, and
downloads whole files; that of Xet connects to wherever a server says.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar
from urllib.parse import quote

import msgspec
from yarl import URL

from modelswap_engine.checkpoint.rules import shown
from modelswap_engine.protocol.errors import (
    SourceChanged,
    SourceDenied,
    SourceNotAllowed,
    SourceNotFound,
    SourceUnreadable,
)
from modelswap_engine.sources.credentials import Credentials
from modelswap_engine.sources.remote.port import FileStat
from modelswap_engine.sources.web.answers import Target
from modelswap_engine.sources.web.authorization import TOKEN, Authorizer, Fixed, bearer
from modelswap_engine.sources.web.ranges import Reader, WebSettings

ENDPOINT_KEY: Final = "HF_ENDPOINT"
TOKEN_KEY: Final = "HF_TOKEN"  # noqa: S105 - a name
ENDPOINT: Final = "https://huggingface.co"
MAX_PAGES: Final = 32
MAX_PAGE_BYTES: Final = 16 << 20
_URI: Final = re.compile(r"hf://([\w.-]{1,96})/([\w.-]{1,96})(?:@([\w.-]{1,100}))?((?:/[\w. -]{1,255})*)", re.ASCII)
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
T = TypeVar("T")
_NEXT: Final = re.compile(r'<([^>]+)>;\s*rel="next"')


@dataclass(frozen=True, slots=True)
class HubAddress:
    """A folder of a repository at a revision."""

    repository: str
    revision: str
    folder: str


class _Info(msgspec.Struct):
    sha: str


class _Large(msgspec.Struct):
    oid: str


class _Entry(msgspec.Struct):
    type: str
    path: str
    oid: str
    size: int = 0
    lfs: _Large | None = None


class Hubs:
    """Opens folders of repositories; see :class:`sources.remote.port.Opener`.

    Args:
        credentials: those that are mounted (``HF_TOKEN`` or ``token``, ``HF_ENDPOINT``, ``ca.crt``).
        environment: of the process; counts where no credentials are named.
        settings: how to ask.
    """

    def __init__(self, credentials: Credentials, *, environment: Mapping[str, str], settings: WebSettings) -> None:
        self._credentials, self._environment, self._settings = credentials, environment, settings

    async def open(self, uri: str, *, credentials: str) -> "HubFolder":
        """Open a folder by its URI, at the commit that its revision is now."""
        address = parse(uri)
        mounted = await asyncio.to_thread(self._credentials.read, credentials)
        values = mounted if credentials else self._environment
        token = values.get(TOKEN_KEY) or mounted.get(TOKEN, "")
        endpoint = _endpoint(values.get(ENDPOINT_KEY) or ENDPOINT)
        reader = await Reader.opened(self._settings, mounted)
        try:
            asking = _Asking(reader, endpoint, Fixed(bearer(token) if token else ""), address)
            return HubFolder(asking, await asking.commit())
        except BaseException:
            await reader.close()
            raise


class _Asking:
    """What is asked of one hub about one repository."""

    def __init__(self, reader: Reader, endpoint: URL, authorizer: Authorizer, address: HubAddress) -> None:
        self.reader, self.address = reader, address
        self._endpoint, self._authorizer = endpoint, authorizer

    def target(self, path: str, what: str) -> Target:
        """Return what lies at an encoded path of the hub."""
        return self._at(self._endpoint.join(URL(self._endpoint.raw_path.rstrip("/") + path, encoded=True)), what)

    def _at(self, url: URL, what: str) -> Target:
        host, repository = self._endpoint.host or "", self.address.repository
        return Target(url=url, shown=f"hf://{repository}: {what}", host=host, authorizer=self._authorizer)

    async def commit(self) -> str:
        """Return the commit of the revision.

        Raises:
            SourceNotFound: there is no such repository or revision.
            SourceDenied: it is not shown to us; a hub does not tell that from a repository that is not there.
        """
        address = self.address
        path = f"/api/models/{address.repository}/revision/{quote(address.revision, safe='')}"
        try:
            info, _ = await self._json(self.target(path, f"revision {address.revision}"), _Info)
        except SourceDenied as error:
            raise SourceDenied(
                f"hf://{address.repository}: private, gated or not there: {error.message}",
                advice="accept its terms, and mount a token that may read it as HF_TOKEN (credentialsRef)",
            ) from None
        if _COMMIT.fullmatch(info.sha) is None:
            raise SourceUnreadable(f"hf://{address.repository}: the hub names no commit", advice="check HF_ENDPOINT")
        return info.sha

    async def tree(self, commit: str) -> list[_Entry]:
        """Return what the folder holds at a commit."""
        address = self.address
        path = f"/api/models/{address.repository}/tree/{commit}{quote(address.folder)}"
        target = self.target(path, "its list of files")
        entries: list[_Entry] = []
        for _ in range(MAX_PAGES):
            found, headers = await self._json(target, list[_Entry])
            entries += found
            match = _NEXT.search(headers.get("Link", ""))
            if match is None:
                return entries
            url = target.url.join(URL(match[1], encoded=True))
            if url.origin() != self._endpoint.origin():
                raise SourceUnreadable(f"{target.shown} goes on at another host", advice="check HF_ENDPOINT")
            target = self._at(url, "its list of files")
        raise SourceUnreadable(f"{target.shown} is too long", advice="name a folder of the repository")

    async def _json(self, target: Target, kind: type[T]) -> tuple[T, Mapping[str, str]]:
        found = await self.reader.document(target, limit=MAX_PAGE_BYTES, accept="application/json")
        if found is None:
            raise SourceNotFound(
                f"{target.shown} is not there", advice="check the repository, its revision and the folder"
            )
        try:
            return msgspec.json.decode(found[0], type=kind), found[1]
        except (msgspec.MsgspecError, UnicodeDecodeError):
            raise SourceUnreadable(f"{target.shown}: not an answer of a hub", advice=f"check {ENDPOINT_KEY}") from None


class HubFolder:
    """A folder of a repository at a commit.

    Args:
        asking: closed with it.
        commit: what its revision was.
    """

    def __init__(self, asking: _Asking, commit: str) -> None:
        self._asking, self._commit = asking, commit
        self.uri = f"hf://{asking.address.repository}@{commit}{asking.address.folder}"
        self._listed: Mapping[str, FileStat] | None = None
        self._listing = asyncio.Lock()

    async def files(self, names: Iterable[str]) -> Mapping[str, FileStat]:
        """List the folder; a file's revision is the hash that the repository knows it by."""
        async with self._listing:
            if self._listed is None:
                found = [entry for entry in await self._asking.tree(self._commit) if entry.type == "file"]
                self._listed = {entry.path.rpartition("/")[2]: _stat(entry) for entry in found}
            return self._listed

    async def stream(self, name: str, start: int, stop: int, *, stat: FileStat) -> AsyncIterator[bytes]:
        """Yield a range of a file, provided that the commit has it as it was."""
        if (await self.files([name])).get(name) != stat:
            raise SourceChanged(
                f"{self.uri}: {name} is another file than when it was resolved",
                advice="name a commit instead of a branch",
                details={"file": name},
            )
        folder = self._asking.address.folder
        path = f"/{self._asking.address.repository}/resolve/{self._commit}{quote(f'{folder}/{name}')}"
        async for piece in self._asking.reader.stream(self._asking.target(path, name), start, stop, stat=stat):
            yield piece

    async def close(self) -> None:
        """Close its connections."""
        await self._asking.reader.close()


def parse(uri: str) -> HubAddress:
    """Return what a URI names.

    Raises:
        SourceNotAllowed: it is no such URI.
    """
    match = _URI.fullmatch(uri.rstrip("/"))
    if match is None or any(part in {".", ".."} for part in uri.split("/")):
        raise SourceNotAllowed(
            f"{shown(uri, 200)}: not of the form hf://org/repository[@revision][/folder]",
            advice="a revision is a branch or tag without slashes, or a commit",
        )
    return HubAddress(f"{match[1]}/{match[2]}", match[3] or "main", match[4])


def _endpoint(text: str) -> URL:
    try:
        url = URL(text.rstrip("/"))
        if url.scheme in {"https", "http"} and url.host and not (url.user or url.raw_query_string):
            return url
    except ValueError:
        pass
    raise SourceDenied(f"{ENDPOINT_KEY} is no address of a hub", advice=f"write it like {ENDPOINT}")


def _stat(entry: _Entry) -> FileStat:
    return FileStat(size=entry.size, revision=entry.lfs.oid if entry.lfs is not None else entry.oid)
