"""Reading what was published before: the base of a version, from any place that gives ranges of files."""

from collections.abc import Sequence
from urllib.parse import urlsplit

from modelswap_engine.checkpoint import build
from modelswap_engine.checkpoint.manifest import MANIFEST_FILE
from modelswap_engine.protocol.errors import SourceNotFound
from modelswap_engine.publishing.publisher import Base
from modelswap_engine.sources.allowed import Allowed
from modelswap_engine.sources.remote.contents import RemoteContents, read_remote
from modelswap_engine.sources.remote.folders import Folders


def allowed_beside(uris: Sequence[str], more: Sequence[str] = ()) -> Allowed:
    """Return what may be read when somebody names these URIs: their buckets or hosts, and what is allowed besides.

    A manifest names other folders; whoever wrote it must not decide where credentials are used.

    Raises:
        SourceNotAllowed: one of them has a secret in it, or can be understood in two ways.
    """
    Allowed(uris)
    return Allowed([*(f"{urlsplit(uri).scheme}://{urlsplit(uri).netloc}" for uri in uris), *more])


async def read_base(folders: Folders, uri: str) -> tuple[Base, RemoteContents]:
    """Read the manifest of a published version, and hold it against the headers that it speaks of.

    Args:
        folders: its places, open.
        uri: its own.

    Raises:
        SourceNotFound: there is no version, or none with a manifest.
        ManifestMismatch, InvalidCheckpoint, UnsupportedFormat, SourceNotAllowed: refused.
        SourceDenied, SourceUnreadable, SourceChanged, CredentialsNotMounted: not now.
    """
    uri = uri.rstrip("/")
    contents = await read_remote(folders)
    if contents.manifest is None:
        raise SourceNotFound(
            f"{uri}: a checkpoint without {MANIFEST_FILE} cannot be a base",
            advice=f"write it with: modelswap manifest build {uri}",
            details={"file": MANIFEST_FILE},
        )
    build.check_shipped(contents.manifest, contents, file=MANIFEST_FILE)
    return Base(uri=uri, manifest=contents.manifest), contents
