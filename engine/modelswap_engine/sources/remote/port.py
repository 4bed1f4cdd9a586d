"""The port of places whose bytes travel: a folder of named files, each known by a revision, read by ranges.

An opener per scheme knows its protocol and its credentials, and nothing of checkpoints; who reads a checkpoint from it
knows no protocol. What an opener raises is what a person is told, so it names the file and never a credential.
"""

from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Final, Protocol

import msgspec

RETRY_AFTER: Final = "retryAfterSeconds"
"""In the details of an error: the place asked for a longer pause than anybody waits here; it is not asked again now."""


class FileStat(msgspec.Struct, frozen=True, kw_only=True):
    """A file as it was seen: ``size`` in bytes, and what changes when its bytes do.

    ``revision`` is an ETag, a blob's digest or a commit; "" where the place knows none: then nothing shows a change
    but the hashes of tensors.
    """

    size: int
    revision: str


class Folder(Protocol):
    """A folder in such a place; whoever opened it closes it."""

    @property
    def uri(self) -> str:
        """Where it is, without credentials."""

    async def files(self, names: Iterable[str]) -> Mapping[str, FileStat]:
        """Return those of the named files that are there; a place that lists its folders may return all of them.

        Raises:
            SourceNotFound: there is no such folder, where the place can tell.
            SourceDenied: the credentials do not suffice.
            SourceUnreadable: not now.
        """

    def stream(self, name: str, start: int, stop: int, *, stat: FileStat) -> AsyncIterator[bytes]:
        """Yield bytes ``start`` to ``stop`` (excluded) of a file, in pieces of a few MiB at most.

        Raises:
            SourceChanged: it is not the file of that revision any more.
            SourceDenied: the credentials do not suffice, or not any more.
            SourceUnreadable: it broke off or answered something else than those bytes; what was yielded is good.
        """

    async def close(self) -> None:
        """Let go of connections."""


class Opener(Protocol):
    """One kind of place."""

    async def open(self, uri: str, *, credentials: str) -> Folder:
        """Open a folder by its URI.

        Args:
            uri: of a scheme that the opener knows.
            credentials: name of mounted credentials; "" takes what the process has of itself.

        Raises:
            SourceNotAllowed: not a URI of this kind.
            CredentialsNotMounted: nothing is mounted under that name.
            SourceNotFound, SourceUnreadable: it has to be asked for, and is not there or not now.
        """
