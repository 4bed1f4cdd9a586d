"""Which URIs may be read: those below the prefixes that whoever runs the engine allows. Pure.

Any author of a ModelVersion could otherwise have a pod read whatever its cloud identity can. A prefix names exactly its
folder: ``s3://b/m`` allows ``s3://b/m/1.1`` and not ``s3://b/m-private``. What two readers could understand in two ways
(dot segments, encoded separators, empty segments) is refused instead of being cleaned.
"""

from collections.abc import Sequence
from typing import Final, NoReturn
from urllib.parse import urlsplit

from modelswap_engine.checkpoint.rules import invisible, shown
from modelswap_engine.protocol.errors import SourceNotAllowed

_REVISIONS: Final = {"hf": "@", "oci": ":@"}
"""What begins the revision in the last segment, by scheme."""


class Allowed:
    """Prefixes.

    Args:
        prefixes: URIs of folders, repositories or whole buckets.

    Raises:
        SourceNotAllowed: one of them is no such URI.
    """

    def __init__(self, prefixes: Sequence[str]) -> None:
        self._prefixes = tuple(prefixes)
        self._parts = [_parts(prefix.rstrip("/")) for prefix in prefixes]

    def check(self, uri: str) -> None:
        """Refuse a URI that is not below a prefix.

        Raises:
            SourceNotAllowed: it is not, or can be understood in two ways.
        """
        scheme, host, path = _parts(uri.rstrip("/"))
        for allowed, at, below in self._parts:
            if (scheme, host) == (allowed, at) and _below(path, below, marks=_REVISIONS.get(scheme, "")):
                return
        raise SourceNotAllowed(
            f"{shown(uri, 200)}: not below a source that this engine may read",
            advice=f"allowed: {', '.join(self._prefixes) or 'none'}; add one by --allow-source (chart: sources.allow)",
        )


def _below(path: tuple[str, ...], prefix: tuple[str, ...], *, marks: str) -> bool:
    if len(path) < len(prefix):
        return False
    if path[: len(prefix)] == prefix:
        return True
    if not prefix or path[: len(prefix) - 1] != prefix[:-1]:
        return False
    return any(path[len(prefix) - 1].startswith(prefix[-1] + mark) for mark in marks)


def _parts(uri: str) -> tuple[str, str, tuple[str, ...]]:
    if invisible(uri) or "\\" in uri or "%2f" in uri.lower() or "%2e" in uri.lower():
        _refuse("it has characters that do not belong there")
    try:
        parts = urlsplit(uri)
    except ValueError:
        _refuse("it is not a URI")
    if "@" in parts.netloc:
        _refuse("it has a user or a password in it; mount credentials instead (credentialsRef)")
    if parts.query or parts.fragment or "?" in uri or "#" in uri:
        _refuse("it has a query or a fragment; signed URLs are not taken, mount credentials instead (credentialsRef)")
    if not parts.scheme or not parts.netloc:
        _refuse("it is not of the form scheme://place/path")
    path = tuple(parts.path.split("/")[1:])
    if any(segment in {"", ".", ".."} for segment in path):
        _refuse("it has an empty or a dot segment")
    return parts.scheme.lower(), parts.netloc.lower() if parts.scheme.lower() == "https" else parts.netloc, path


def _refuse(why: str) -> NoReturn:
    # The URI may hold a secret, so it is not repeated.
    raise SourceNotAllowed(f"the source's URI cannot be read: {why}", advice="write it as the guide of its scheme does")
