"""Choosing the source by the scheme of a URI. It knows no source and opens nothing."""

import re
from collections.abc import Collection, Mapping
from typing import Final

from modelswap_engine.protocol.errors import UnsupportedScheme
from modelswap_engine.sources.port import OpenedAdapter, Resolved, Source

_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,31}):")


class Sources:
    """All places that checkpoints may come from.

    Args:
        sources: by scheme, e.g. ``{"file": FileSource(...)}``.
    """

    def __init__(self, sources: Mapping[str, Source]) -> None:
        self._sources = dict(sources)

    async def resolve(self, uri: str, *, digest: str = "", credentials: str = "") -> Resolved:
        """Resolve a URI by the source of its scheme; see :class:`sources.port.Source`.

        Raises:
            UnsupportedScheme: no source knows the scheme; other errors are those of the source.
        """
        return await self._of(uri).resolve(uri, digest=digest, credentials=credentials)

    async def open_adapter(self, uri: str, *, credentials: str = "") -> OpenedAdapter:
        """Open a LoRA adapter by the source of its URI's scheme.

        Raises:
            UnsupportedScheme: no source knows the scheme; other errors are those of the source.
        """
        return await self._of(uri).open_adapter(uri, credentials=credentials)

    async def retain(self, digests: Collection[str]) -> None:
        """Tell every source once which versions are in use."""
        for source in {id(source): source for source in self._sources.values()}.values():
            await source.retain(digests)

    def _of(self, uri: str) -> Source:
        match = _SCHEME.match(uri)
        scheme = match[1].lower() if match else ""
        source = self._sources.get(scheme)
        if source is None:
            # The rest of the URI may hold credentials, so it is not repeated.
            known = ", ".join(f"{name}:" for name in sorted(self._sources))
            raise UnsupportedScheme(
                f"no source knows the URI scheme {scheme + ':' if scheme else '(none given)'}",
                advice=f"use one of: {known}",
                details={"scheme": scheme},
            )
        return source
