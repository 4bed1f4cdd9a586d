"""The port of all sources: a URI goes in, a manifest and the place of each tensor's bytes come out.

The coordinator knows these Protocols and neither file systems nor networks. A source hands out nothing that it has not
validated, and promises no more than it can keep: bytes may still change under it, which is why every range carries its
hash.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from modelswap_engine.backends.port import TensorRange
from modelswap_engine.checkpoint.layout import Evidence
from modelswap_engine.checkpoint.manifest import Manifest, TensorEntry
from modelswap_engine.protocol.looking import SourceLook


class Brought(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of tensors that travelled: from the source, and from other pods of the slot."""

    source: int = 0
    peers: int = 0


Travelled = Callable[[Brought], None]
"""Called on the event loop with what has come so far."""


class Resolved(Protocol):
    """A checkpoint that was found, read and validated."""

    @property
    def uri(self) -> str:
        """The URI that was asked for."""

    @property
    def credentials(self) -> str:
        """Name of the credentials that it was asked for with."""

    @property
    def manifest(self) -> Manifest:
        """The whole manifest; the hash of every tensor is known."""

    @property
    def evidence(self) -> Evidence | None:
        """What the manifest came with; None where the source has none, or nothing beside it."""

    @property
    def header_bytes(self) -> int:
        """Bytes read for headers, index, shipped manifest and side files; tensor bytes do not count."""

    async def obtain(self, names: Iterable[str], *, travelled: Travelled | None = None) -> Brought | None:
        """Bring the bytes of tensors to where :meth:`range_of` says they are.

        Returns how many bytes travelled for it; None where they are read at the source itself.

        Raises:
            ManifestMismatch: what came, twice, does not hash to what the manifest says that lies there.
            DigestMismatch: the same where none lies there: the source holds other content than the known version.
            SourceChanged: the source is not the one that was resolved any more.
            SourceUnreadable, SourceDenied, InsufficientDisk: not now.
        """

    def range_of(self, name: str) -> TensorRange:
        """Say where the bytes of a tensor of the manifest are, once they were obtained.

        An unknown name is a ``KeyError``.
        """

    async def copy_side_files(self, destination: Path) -> None:
        """Make ``destination`` a folder with exactly the manifest's side files, verified by hash.

        It appears complete or not at all; one that is there already and means the same is left alone.

        Raises:
            SourceChanged: the bytes are no longer those of the manifest.
            SourceUnreadable: reading or writing failed.
        """

    async def unchanged(self, *, suspected: bool = False) -> None:
        """Check that no bytes of the checkpoint were touched since it was resolved.

        Args:
            suspected: bytes were read that are not those of the manifest.

        Raises:
            SourceChanged: a file was replaced, rewritten, removed or damaged; resolving it again may help.
        """

    async def moved(self) -> SourceLook:
        """Look, without reading tensors, whether the place holds another content under its name by now.

        A manifest beside it decides; without one, a file that was written again is another. The revision that is
        returned depends on what is there alone, and not on when this was resolved.

        Raises:
            Refused, SourceDenied, SourceUnreadable, SourceChanged: it cannot be told now.
        """


def others(names: Iterable[str]) -> str:
    """Say which files are not those that were resolved; "" where there are none."""
    found = sorted(set(names))
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return f"other files ({', '.join(found[:3])}{more})" if found else ""


class ResolvedHere(Resolved, Protocol):
    """A checkpoint whose bytes lie in mounted folders, which may hang."""

    async def read(self, where: TensorRange, begin: int, count: int) -> bytes:
        """Read some bytes of a tensor where they lie; fewer where the file ended. Whoever gives up leaves it behind.

        Raises:
            OSError: it cannot be read.
        """


Mounted = Callable[[], Sequence[ResolvedHere]]
"""Returns versions of mounted folders that were resolved and may be in use."""


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """How an adapter's content is known: ``of`` makes its digest out of the hashes of its tensors (name → sha256).

    ``pinned`` is the digest that is wanted; "" where any will do.
    """

    of: Callable[[Mapping[str, str]], str]
    pinned: str = ""


class OpenedAdapter(Protocol):
    """A LoRA adapter that was found: its config and its header were read, no bytes of its tensors."""

    @property
    def config(self) -> bytes:
        """``adapter_config.json`` as it is."""

    @property
    def tensors(self) -> Mapping[str, TensorEntry]:
        """Its tensors by name, hashes unknown."""

    @property
    def evidence(self) -> Evidence | None:
        """Its manifest and the signature beside it, to be proved; None where it did not come with both."""

    @property
    def revision(self) -> str:
        """One name for its config and weights as they were found, "" where there is none; see :class:`SourceLook`."""

    async def hash(self, identity: Identity | None = None) -> dict[str, str]:
        """Return name → sha256 of the bytes of every tensor, which are then where :meth:`range_of` says.

        With its identity others who have what is pinned are asked before the source, and can ask for it later; whether
        that is what came is for the caller to see.

        Raises:
            InvalidCheckpoint, ManifestMismatch: they are not what its manifest lists, where that was looked at.
            SourceChanged, SourceUnreadable: not now.
        """

    def range_of(self, entry: TensorEntry, *, sha256: str) -> TensorRange:
        """Say where the bytes of a tensor are."""


class Source(Protocol):
    """One kind of place."""

    async def resolve(self, uri: str, *, digest: str = "", credentials: str = "") -> Resolved:
        """Find and validate the checkpoint at a URI.

        Args:
            uri: of a scheme that the source knows.
            digest: what it is known to be, or "": a source that has it need not ask; one that finds another says so
                by what it returns.
            credentials: name of mounted credentials; "" takes what the process has of itself.

        Raises:
            SourceNotAllowed, SourceNotFound, UnsupportedFormat, InvalidCheckpoint, ManifestMismatch: refused.
            CredentialsNotMounted, InsufficientDisk: refused.
            SourceUnreadable, SourceDenied, SourceChanged: not now.
        """

    async def open_adapter(self, uri: str, *, credentials: str = "") -> OpenedAdapter:
        """Find the LoRA adapter at a URI and read its header.

        Raises:
            SourceNotAllowed, SourceNotFound, UnsupportedFormat, InvalidCheckpoint, CredentialsNotMounted: refused.
            SourceUnreadable, SourceDenied, SourceChanged: not now.
        """

    async def retain(self, digests: Collection[str]) -> None:
        """Say which versions are in use; what is kept of others may go."""
