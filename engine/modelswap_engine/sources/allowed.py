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
        credentials: (name, prefix) of what URIs are asked with that name no credentials; the longest prefix counts.

    Raises:
        SourceNotAllowed: one of them is no such URI.
    """

    def __init__(self, prefixes: Sequence[str], *, credentials: Sequence[tuple[str, str]] = ()) -> None:
        self._prefixes = tuple(prefixes)
        self._parts = [_parts(prefix.rstrip("/")) for prefix in prefixes]
        by_length = sorted(credentials, key=lambda pair: len(pair[1]), reverse=True)
        self._credentials = [(name, _parts(prefix.rstrip("/"))) for name, prefix in by_length]

    def check(self, uri: str) -> None:
        """Refuse a URI that is not below a prefix.

        Raises:
            SourceNotAllowed: it is not, or can be understood in two ways.
        """
        place = _parts(uri.rstrip("/"))
        if any(_below(place, prefix) for prefix in self._parts):
            return
        raise SourceNotAllowed(
            f"{shown(uri, 200)}: not below a source that this engine may read",
            advice=f"allowed: {', '.join(self._prefixes) or 'none'}; add one by --allow-source (chart: sources.allow)",
        )

    def credentials(self, uri: str) -> str:
        """Return the name of the credentials for a URI that may be read and names none; "" for none."""
        place = _parts(uri.rstrip("/"))
        return next((name for name, prefix in self._credentials if _below(place, prefix)), "")


_Place = tuple[str, str, tuple[str, ...]]
"""Scheme, host, segments of the path."""


def _below(place: _Place, prefix: _Place) -> bool:
    (scheme, host, path), (allowed, at, above) = place, prefix
    if (scheme, host) != (allowed, at) or len(path) < len(above):
        return False
    if path[: len(above)] == above:
        return True
    if path[: len(above) - 1] != above[:-1]:
        return False
    return any(path[len(above) - 1].startswith(above[-1] + mark) for mark in _REVISIONS.get(scheme, ""))


def _parts(uri: str) -> _Place:
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
