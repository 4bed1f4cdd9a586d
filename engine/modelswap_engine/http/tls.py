"""The certificate of the control port: read from files, and read again when they change.

cert-manager renews a Secret in place and the kubelet replaces its files, so a certificate is exchanged without a
restart: each handshake takes the newest, connections under way keep theirs. Files that cannot be used (half of a pair
written, the key of another certificate) are named in the log, and the certificate before them stays.
It refuses to know what is served.
"""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Final

import structlog
from cryptography import x509

from modelswap_engine.protocol.errors import BadRequest
from modelswap_engine.swap.clock import Clock

LOOK_SECONDS: Final = 5.0
_NO_PASSWORD: Final = ""
"""An encrypted key is an error; without this OpenSSL would ask for its password on a terminal."""

_Stamp = tuple[tuple[int, int, int], ...]
_log = structlog.get_logger("modelswap.tls")


class Certificate:
    """A certificate with its key, as the files hold it now.

    Attributes:
        context: what a port listens with.
        expires: when what is shown does not hold any more, in seconds of the epoch.
    """

    def __init__(self, *, certificate: Path, key: Path) -> None:
        self._files = (certificate, key)
        self._tried = _stamp(self._files)
        self._newest = self.context = _context(certificate, key)
        self.expires = _expires(certificate)
        # Asked in each handshake, whether or not the client names a server.
        self.context.sni_callback = self._choose

    def look(self) -> bool:
        """Read the files again if they have changed; True when there is another certificate from now on.

        Blocks. Files that cannot be used are told once, and tried again when they change.
        """
        stamp = _stamp(self._files)
        if stamp == self._tried:
            return False
        self._tried = stamp
        try:
            self._newest, self.expires = _context(*self._files), _expires(self._files[0])
        except BadRequest as error:
            _log.error("the control port keeps its certificate", reason=error.message, next=error.advice)
            return False
        _log.info("the control port has another certificate", certificate=str(self._files[0]))
        return True

    def _choose(self, connection: ssl.SSLObject | ssl.SSLSocket, _name: str, _context: ssl.SSLContext) -> None:
        connection.context = self._newest


@contextlib.asynccontextmanager
async def certified(
    certificate: Path | None, key: Path | None, *, clock: Clock, expires: Callable[[float], None] = lambda _: None
) -> AsyncIterator[ssl.SSLContext | None]:
    """Follow the files while the context lasts; yields what to listen with, None without files: plain HTTP.

    ``expires`` is told when the certificate does not hold any more, at once and whenever there is another.

    Raises:
        BadRequest: the files cannot be used.
    """
    if certificate is None or key is None:
        yield None
        return
    found = await asyncio.to_thread(lambda: Certificate(certificate=certificate, key=key))
    expires(found.expires)
    following = asyncio.create_task(_follow(found, clock, expires), name="control port's certificate")
    try:
        yield found.context
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def _follow(certificate: Certificate, clock: Clock, expires: Callable[[float], None]) -> None:
    while True:
        await clock.sleep(LOOK_SECONDS)
        await asyncio.to_thread(certificate.look)
        expires(certificate.expires)


def _context(certificate: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certificate, key, password=_NO_PASSWORD)
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        raise BadRequest(
            f"certificate {certificate} with key {key}: {getattr(error, 'reason', None) or error}",
            advice="both are PEM, the key is not encrypted and belongs to the first certificate of the file",
        ) from None
    return context


def _expires(certificate: Path) -> float:
    """Return when the first of the certificates of a file ends: it is shown with those that vouch for it."""
    try:
        found = x509.load_pem_x509_certificates(certificate.read_bytes())
    except (OSError, ValueError) as error:
        raise BadRequest(f"certificate {certificate}: {error}", advice="it is a PEM file") from None
    return min(shown.not_valid_after_utc.timestamp() for shown in found)


def _stamp(files: tuple[Path, ...]) -> _Stamp:
    """Return what changes whenever a file is replaced or written; a missing one counts as empty."""
    found = []
    for file in files:
        try:
            seen = file.stat()
        except OSError:
            found.append((0, 0, 0))
        else:
            found.append((seen.st_ino, seen.st_mtime_ns, seen.st_size))
    return tuple(found)
