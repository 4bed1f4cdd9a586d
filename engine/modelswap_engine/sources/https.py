"""``https://``: a folder on any web server that serves ranges and tells a file's ETag or date.

Such a server lists nothing, so each file is asked for by name. Knows nothing of checkpoints.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Final

from yarl import URL

from modelswap_engine.checkpoint.rules import shown
from modelswap_engine.protocol.errors import SourceDenied, SourceNotAllowed
from modelswap_engine.sources.credentials import Credentials
from modelswap_engine.sources.remote.port import FileStat
from modelswap_engine.sources.web.answers import Target
from modelswap_engine.sources.web.authorization import Authorizer, Fixed, mounted
from modelswap_engine.sources.web.ranges import Reader, WebSettings

AT_ONCE: Final = 8


class WebFolders:
    """Opens folders of web servers; see :class:`sources.remote.port.Opener`.

    Args:
        credentials: those that are mounted; without a name none are sent.
        settings: how to ask.
    """

    def __init__(self, credentials: Credentials, settings: WebSettings) -> None:
        self._credentials, self._settings = credentials, settings

    async def open(self, uri: str, *, credentials: str) -> "WebFolder":
        """Open a folder by its URL; nothing is asked yet."""
        url = _parsed(uri)
        values = await asyncio.to_thread(self._credentials.read, credentials)
        authorizer = Fixed(mounted(values))
        return WebFolder(url, await Reader.opened(self._settings, values), authorizer)


class WebFolder:
    """A folder on a web server.

    Args:
        url: where it is.
        reader: closed with it.
        authorizer: who we are there.
    """

    def __init__(self, url: URL, reader: Reader, authorizer: Authorizer) -> None:
        self.uri = str(url).rstrip("/")
        self._url, self._reader, self._authorizer = url, reader, authorizer
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def files(self, names: Iterable[str]) -> Mapping[str, FileStat]:
        """Ask for each file."""
        wanted = sorted(set(names))
        looked = await asyncio.gather(*(self._look(name) for name in wanted), return_exceptions=True)
        found, denied = {}, None
        for name, result in zip(wanted, looked, strict=True):
            if isinstance(result, SourceDenied):
                denied = result  # servers before object stores answer so for what is not there
            elif isinstance(result, BaseException):
                raise result
            elif result is not None:
                found[name] = result
        if denied is not None and not found:
            raise denied
        return found

    async def _look(self, name: str) -> FileStat | None:
        async with self._turns:
            return await self._reader.look(self._target(name))

    def stream(self, name: str, start: int, stop: int, *, stat: FileStat) -> AsyncIterator[bytes]:
        """Yield a range of a file, provided that it has the revision."""
        return self._reader.stream(self._target(name), start, stop, stat=stat)

    async def close(self) -> None:
        """Close its connections."""
        await self._reader.close()

    def _target(self, name: str) -> Target:
        return Target(
            url=self._url / name,
            shown=f"{self.uri}: {name}",
            host=self._url.host or "",
            authorizer=self._authorizer,
            tagged=True,
        )


def _parsed(uri: str) -> URL:
    try:
        url = URL(uri.rstrip("/"), encoded=True)
        secret = url.user or url.password or url.raw_query_string or url.raw_fragment
        if url.scheme == "https" and url.host and not secret:
            return url
    except ValueError:
        pass
    raise SourceNotAllowed(
        f"{shown(re.split('[?#]', uri)[0].rpartition('@')[2], 200)}: not of the form https://host/folder",
        advice="mount credentials and name them in credentialsRef; signed URLs are not taken",
    )
