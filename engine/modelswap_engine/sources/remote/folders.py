"""The folders that one version's bytes lie in: its own, and those that its manifest names; opened once, when needed."""

import asyncio
from urllib.parse import urlsplit

from modelswap_engine.sources.allowed import Allowed
from modelswap_engine.sources.remote.port import Folder, Opener


class Folders:
    """Opens the places of one version and closes them all.

    Args:
        opener: of the URI's scheme.
        uri: of the version.
        credentials: named for it; other places, and all where none are named, have those of their prefixes.
        allowed: which places may be read.
    """

    def __init__(self, opener: Opener, uri: str, *, credentials: str, allowed: Allowed) -> None:
        self._opener = opener
        self._uri = uri
        self._credentials = credentials
        self._allowed = allowed
        self._open: dict[str, Folder] = {}
        self._lock = asyncio.Lock()

    async def __call__(self, place: str) -> Folder:
        """Return the folder of a place; "" is the version's own."""
        async with self._lock:
            if place not in self._open:
                uri = place or self._uri
                self._allowed.check(uri)
                self._open[place] = await self._opener.open(uri, credentials=self._credentials_for(uri))
            return self._open[place]

    def _credentials_for(self, uri: str) -> str:
        # Whoever writes a manifest must not have them sent to another server.
        own = urlsplit(uri)[:2] == urlsplit(self._uri)[:2]
        return (self._credentials if own else "") or self._allowed.credentials(uri)

    async def __aenter__(self) -> "Folders":
        return self

    async def __aexit__(self, *_: object) -> None:
        folders, self._open = list(self._open.values()), {}
        for folder in folders:
            await folder.close()
