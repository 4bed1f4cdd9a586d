"""The port of all sources: a URI goes in, a manifest and the place of each tensor's bytes come out.

The coordinator knows these two Protocols and no file system. A source hands out nothing that it has not validated,
and promises no more than it can keep: bytes may still change under it, which is why every range carries its hash.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from modelswap_engine.backends.port import TensorRange
from modelswap_engine.checkpoint.manifest import Manifest, TensorEntry


class Resolved(Protocol):
    """A checkpoint that was found, read and validated."""

    @property
    def uri(self) -> str:
        """The URI that was asked for."""

    @property
    def manifest(self) -> Manifest:
        """The whole manifest; the hash of every tensor is known."""

    @property
    def header_bytes(self) -> int:
        """Bytes read for headers, index, shipped manifest and side files; tensor bytes do not count."""

    def range_of(self, name: str) -> TensorRange:
        """Say where the bytes of a tensor of the manifest are; an unknown name is a ``KeyError``."""

    async def copy_side_files(self, destination: Path) -> None:
        """Make ``destination`` a folder with exactly the manifest's side files, verified by hash.

        It appears complete or not at all; one that is there already and means the same is left alone.

        Raises:
            SourceChanged: the bytes are no longer those of the manifest.
            SourceUnreadable: reading or writing failed.
        """

    async def unchanged(self) -> None:
        """Check that no file of the checkpoint was touched since it was resolved.

        Raises:
            SourceChanged: a file was replaced, rewritten or removed.
        """


class OpenedAdapter(Protocol):
    """A LoRA adapter that was found: its config and its header were read, no bytes of its tensors."""

    @property
    def config(self) -> bytes:
        """``adapter_config.json`` as it is."""

    @property
    def tensors(self) -> Mapping[str, TensorEntry]:
        """Its tensors by name, hashes unknown."""

    async def hash(self) -> dict[str, str]:
        """Return name → sha256 of the bytes of every tensor.

        Raises:
            SourceChanged, SourceUnreadable: not now.
        """

    def range_of(self, entry: TensorEntry, *, sha256: str) -> TensorRange:
        """Say where the bytes of a tensor are."""


class Source(Protocol):
    """One kind of place."""

    scheme: str

    async def resolve(self, uri: str) -> Resolved:
        """Find and validate the checkpoint at a URI.

        Raises:
            SourceNotAllowed, SourceNotFound, UnsupportedFormat, InvalidCheckpoint, ManifestMismatch: refused.
            SourceUnreadable, SourceChanged: not now.
        """

    async def open_adapter(self, uri: str) -> OpenedAdapter:
        """Find the LoRA adapter at a URI and read its header.

        Raises:
            SourceNotAllowed, SourceNotFound, UnsupportedFormat, InvalidCheckpoint: refused.
            SourceUnreadable, SourceChanged: not now.
        """
