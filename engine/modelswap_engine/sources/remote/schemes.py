"""Choosing the opener by the scheme of a URI: a version's own folder and the places that it names may differ in it."""

from collections.abc import Mapping

from modelswap_engine.protocol.errors import SourceNotAllowed
from modelswap_engine.sources.remote.port import Folder, Opener


class ByScheme:
    """All openers; see :class:`sources.remote.port.Opener`.

    Args:
        openers: by scheme, in lower case.
    """

    def __init__(self, openers: Mapping[str, Opener]) -> None:
        self._openers = dict(openers)

    @property
    def schemes(self) -> list[str]:
        """What can be opened."""
        return sorted(self._openers)

    async def open(self, uri: str, *, credentials: str) -> Folder:
        """Open a folder by the opener of its scheme.

        Raises:
            SourceNotAllowed: there is none; other errors are those of the opener.
        """
        scheme = uri.partition(":")[0].lower()
        opener = self._openers.get(scheme)
        if opener is None:
            raise SourceNotAllowed(f"no source of bytes knows the scheme {scheme[:32]!r}", advice="copy the version")
        return await opener.open(uri, credentials=credentials)
