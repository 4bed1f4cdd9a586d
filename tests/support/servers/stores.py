"""What tests ask of any server of objects: buckets, the keys of a Secret for it, a client that goes past the proxy."""

from __future__ import annotations

from collections.abc import Mapping
from http.client import HTTPConnection
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

import pytest
from obstore.store import ObjectStore, from_url

from tests.support.servers.faults import Fault

EVERYWHERE: Final = pytest.mark.parametrize(
    "object_server", ["s3_server", "google_server", "azure_server"], ids=["s3", "gs", "az"], indirect=True
)
"""Has a test run with each server; without it, it runs with S3's."""


class ObjectServer(Protocol):
    """One server on loopback, with credentials that may do everything.

    Attributes:
        scheme: of the URIs of its objects.
        url: where it is.
        secret: what must never be told of its credentials.
        expired: its answer to credentials whose time is over.
    """

    scheme: str
    url: str
    secret: str
    expired: Fault

    def bucket(self, name: str) -> str:
        """Make a bucket, and return its name."""

    def settings(self, endpoint: str, *, mistaken: bool = False) -> Mapping[str, str]:
        """Return the keys of a Secret for the server at an address, or of one with a wrong key."""


def direct(server: ObjectServer, bucket: str) -> ObjectStore:
    """Return a client of a bucket that asks the server itself."""
    config: Any = {key.lower(): value for key, value in server.settings(server.url).items() if "ALLOW_HTTP" not in key}
    return from_url(f"{server.scheme}://{bucket}", config=config, client_options={"allow_http": True})


def ask(url: str, method: str, path: str, *, body: bytes | None = None, headers: Mapping[str, str]) -> None:
    """Send one request as it is, with no header but these.

    Raises:
        RuntimeError: the answer is no success.
    """
    address = urlsplit(url)
    connection = HTTPConnection(address.hostname or "", address.port, timeout=30)
    try:
        connection.request(method, path, body=body, headers=dict(headers))
        answer = connection.getresponse()
        text = answer.read()
    finally:
        connection.close()
    if answer.status >= 300:
        raise RuntimeError(f"{method} {path}: {answer.status} {text[:300]!r}")
