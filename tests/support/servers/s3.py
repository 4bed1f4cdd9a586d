"""A real S3 server (versitygw over a folder) on loopback, with one key that may do everything.

What obstore 0.12 (object_store 0.14) makes of faults before it, as `tests/sources/test_s3.py` sees it:

- Truncation, reset, a read that stalls beyond ``read_timeout``, 429 and 5xx: asked again, in the middle of a body from
  where it was on and with If-Match; after ``max_retries`` (per request, ten by default) a ``GenericError``, whose text
  is all that tells these apart. Retry-After is not looked at.
- Replaced before the request (If-Match): ``PreconditionError``. Replaced between two parts of one body: a
  ``GenericError`` that speaks of a precondition.
- Another range than asked, or all of the object: ``GenericError``, at once. Other bytes under the right range: nothing.
- An answer with another ETag than If-Match said: nothing; whoever cares compares ``meta["e_tag"]``.
- 401 ``UnauthenticatedError``, 403 ``PermissionDeniedError``, 404 ``FileNotFoundError``; S3's ExpiredToken (400) is a
  ``GenericError`` with the code in its text. All at once. The texts hold the endpoint and key, no credentials.
- Redirects are followed wherever they lead, to loopback and link-local addresses too, without Authorization and with
  all other headers (x-amz-security-token), and no option forbids it: who names an endpoint trusts it. Without
  ``allow_http`` they are followed to https alone.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

from obstore.store import S3Store

from tests.support.free_ports import free_port
from tests.support.servers.faults import expired
from tests.support.servers.listening import listening
from tests.support.tools import source_server

REGION = "us-east-1"
KEY = "tester"
SECRET = "not-a-secret"


class S3Server:
    """One server; a bucket is a folder of its own. See :class:`tests.support.servers.stores.ObjectServer`."""

    scheme = "s3"
    secret = SECRET
    expired = expired()

    def __init__(self, home: Path) -> None:
        """Start it with its data below `home`."""
        self._buckets = home / "buckets"
        self._buckets.mkdir(parents=True)
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        settings = (f"ROOT_ACCESS_KEY={KEY}", f"ROOT_SECRET_KEY={SECRET}")
        serve = (str(source_server("versitygw")), "--quiet", "--region", REGION, "--port", f"127.0.0.1:{port}")
        command = (shutil.which("env") or "env", *settings, *serve, "posix", str(self._buckets))
        self._child = listening("versitygw", command, port=port, home=home)

    def bucket(self, name: str) -> str:
        """Make a bucket, and return its name."""
        (self._buckets / name).mkdir()
        return name

    def settings(self, endpoint: str, *, mistaken: bool = False) -> Mapping[str, str]:
        """Return the keys of a Secret."""
        return {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": "wrong" if mistaken else SECRET,
            "AWS_REGION": REGION,
            "AWS_ENDPOINT": endpoint,
            "AWS_ALLOW_HTTP": "true",
        }

    def store(self, bucket: str, *, endpoint: str | None = None, stall: float = 60.0, retries: int = 2) -> S3Store:
        """Return a client of a bucket, maybe through another endpoint, that waits so many seconds for a byte."""
        return S3Store(
            bucket,
            endpoint=endpoint or self.url,
            access_key_id=KEY,
            secret_access_key=SECRET,
            region=REGION,
            virtual_hosted_style_request=False,
            client_options={"allow_http": True, "read_timeout": timedelta(seconds=stall)},
            retry_config={
                "max_retries": retries,
                "backoff": {"init_backoff": timedelta(milliseconds=1), "max_backoff": timedelta(milliseconds=10)},
            },
        )

    def close(self) -> None:
        """Stop it."""
        self._child.stop()
