"""What was found at which URI, kept on disk: so a known version needs no question, and an unchanged one no hashing.

Losing a record costs time, never correctness: tensors are known by their hashes, and a record that cannot be read is
none.
"""

import contextlib
import hashlib
import os
from collections.abc import Collection
from pathlib import Path
from typing import Final

import msgspec

from modelswap_engine.checkpoint import manifest as manifests
from modelswap_engine.checkpoint.layout import Evidence
from modelswap_engine.checkpoint.manifest import Manifest
from modelswap_engine.protocol.errors import ModelswapError
from modelswap_engine.sources.remote.contents import Places
from modelswap_engine.sources.remote.port import FileStat

MAX_RECORDS: Final = 64
MAX_ADAPTERS: Final = 256
"""As many as a slot may have."""
_LAID_OUT: Final = ".manifest"


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """The version ``digest`` was at ``uri`` when the files were these (place → name → what it was)."""

    uri: str
    digest: str
    places: dict[str, dict[str, FileStat]]
    evidence: Evidence | None = None

    @property
    def revision(self) -> str:
        """See :func:`revision_of`."""
        return revision_of(self.places)


def revision_of(places: Places) -> str:
    """Return one name for the revisions of all files; "" when one of them has none."""
    if any(not stat.revision for files in places.values() for stat in files.values()):
        return ""
    text = msgspec.json.encode([[place, sorted(files.items())] for place, files in sorted(places.items())])
    return hashlib.sha256(text).hexdigest()


class Records:
    """Files by digest and by URI in a folder that is made when needed; everything here blocks."""

    def __init__(self, folder: Path) -> None:
        self._manifests = folder / "manifests"
        self._uris = folder / "uris"
        self._adapters = folder / "adapters"

    def found(self, uri: str) -> Found | None:
        """Return what was found at a URI last."""
        with contextlib.suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
            found = msgspec.json.decode(self._uri(uri).read_bytes(), type=Found)
            return found if found.uri == uri else None
        return None

    def manifest(self, found: Found) -> Manifest | None:
        """Return the manifest of a version; one that is damaged is none.

        Where there is a signature it is made of the bytes that were signed.
        """
        with contextlib.suppress(OSError, ModelswapError):
            signed = found.evidence.manifest if found.evidence is not None else None
            # Of this very place: the same content can lie in other files elsewhere.
            manifest = manifests.decode(signed or self._uri(found.uri).with_suffix(_LAID_OUT).read_bytes())
            return manifest if manifest.digest == found.digest else None
        return None

    def keep(self, found: Found, manifest: Manifest) -> None:
        """Remember a version and where it is; a disk that does not take it is no failure."""
        with contextlib.suppress(OSError):
            _replace(self.manifest_file(manifest.digest), manifests.encode(manifest))
            _replace(self._uri(found.uri).with_suffix(_LAID_OUT), manifests.encode(manifest))
            _replace(self._uri(found.uri), msgspec.json.encode(found))
            _prune(self._uris, keep=())

    def forget(self, uri: str) -> None:
        """Forget where the files of a version were found; what it is stays known."""
        with contextlib.suppress(OSError):
            self._uri(uri).unlink(missing_ok=True)

    def keep_adapter(self, digest: str, manifest: Manifest) -> None:
        """Remember what an adapter's files are by its content digest, which is not its manifest's; see :meth:`keep`."""
        with contextlib.suppress(OSError):
            _replace(self._adapter(digest), manifests.encode(manifest))
            _prune(self._adapters, keep=(), most=MAX_ADAPTERS)

    def adapter(self, digest: str) -> bytes | None:
        """Return the manifest of an adapter as it was kept, to be proved."""
        with contextlib.suppress(OSError):
            return self._adapter(digest).read_bytes()
        return None

    def given(self, digest: str) -> Path:
        """Return where what other pods get for the digest of a version or of an adapter is, or would be."""
        adapter = self._adapter(digest)
        return adapter if adapter.exists() else self.manifest_file(digest)

    def _adapter(self, digest: str) -> Path:
        return self._adapters / f"{digest.removeprefix('sha256:')}.json"

    def retain(self, digests: Collection[str]) -> None:
        """Forget the oldest manifests of versions that are not in use, when there are many."""
        _prune(self._manifests, keep={digest.removeprefix("sha256:") for digest in digests})

    def manifest_file(self, digest: str) -> Path:
        """Return where the manifest of a version is, or would be."""
        return self._manifests / f"{digest.removeprefix('sha256:')}.json"

    def _uri(self, uri: str) -> Path:
        return self._uris / f"{hashlib.sha256(uri.encode('utf-8', 'surrogatepass')).hexdigest()}.json"


def _replace(file: Path, data: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_bytes(data)
    temporary.replace(file)


def _prune(folder: Path, *, keep: Collection[str], most: int = MAX_RECORDS) -> None:
    with contextlib.suppress(OSError):
        files = sorted(folder.glob("*.json"), key=lambda file: file.stat().st_mtime_ns, reverse=True)
        for file in [file for file in files if file.stem not in keep][most:]:
            file.unlink(missing_ok=True)
            file.with_suffix(_LAID_OUT).unlink(missing_ok=True)
