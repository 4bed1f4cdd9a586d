"""Which control ports are spoken to, and whose certificates are believed there.

A pod says by the name of its port whether it speaks TLS, and names of ports cannot be changed in a pod; the mode says
what is allowed. Nothing is ever tried in plain text because TLS has failed. Pods are reached by address, so that what
a certificate must carry is a name that the installation chose, with the pod's namespace in it: a certificate of one
namespace is worth nothing in another. The authorities are read again when their file changes.
"""

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

import structlog

from modelswap_engine.protocol.errors import Unavailable

SERVER_NAME: Final = "modelswap-control.{namespace}.svc"
LOOK_SECONDS: Final = 5.0

_log = structlog.get_logger(__name__)


class EngineTlsMode(Unavailable):
    """The pod speaks plain HTTP where TLS is required, or TLS where it is disabled."""

    code = "EngineTlsMode"


class EngineTlsRefused(Unavailable):
    """The pod did not prove its name."""

    code = "EngineTlsRefused"


class AuthoritiesUnreadable(Unavailable):
    """The file of authorities holds none."""

    code = "AuthoritiesUnreadable"


class ControlTls(StrEnum):
    """Whether control ports speak TLS."""

    DISABLED = "disabled"
    OPTIONAL = "optional"
    REQUIRED = "required"


@dataclass(frozen=True)
class Channel:
    """How a connection is opened: what aiohttp takes as ``ssl`` and ``server_hostname``."""

    context: ssl.SSLContext | bool
    server_name: str | None


_PLAIN: Final = Channel(True, None)


class Trust:
    """The installation's rule, with its authorities as their file holds them now.

    Args:
        mode: what is allowed.
        ca_file: the authorities, PEM.
        server_name: the name in certificates; ``{namespace}`` stands for the pod's.
        clock: seconds that never go back.
        expires: told when the last of the authorities does not hold any more, in seconds of the epoch.
    """

    def __init__(
        self,
        *,
        mode: ControlTls = ControlTls.DISABLED,
        ca_file: Path | None = None,
        server_name: str = SERVER_NAME,
        clock: Callable[[], float],
        expires: Callable[[float], None] = lambda _: None,
    ) -> None:
        self._expires = expires
        self._mode, self._file, self._server_name, self._clock = mode, ca_file, server_name, clock
        self._context: ssl.SSLContext | None = None
        self._read = b""
        self._looked = 0.0

    async def load(self) -> None:
        """Read the authorities now, so that a bad file is told at start.

        Raises:
            AuthoritiesUnreadable: there are none in it.
        """
        if self._file is not None:
            self._looked = self._clock()
            await asyncio.to_thread(self._look, self._file)

    async def channel(self, pod: str, *, namespace: str, tls: bool) -> Channel:
        """Return how a pod is reached.

        Raises:
            EngineTlsMode: it may not be.
        """
        if not tls:
            if self._mode is ControlTls.REQUIRED:
                raise EngineTlsMode(
                    f"pod {pod} speaks plain HTTP, and this operator requires TLS",
                    advice="set controlTls.enabled in the engine chart's values",
                )
            return _PLAIN
        if self._file is None or self._mode is ControlTls.DISABLED:
            raise EngineTlsMode(
                f"the control port of pod {pod} speaks TLS, and this operator knows no authority",
                advice="set controlTls.mode and controlTls.ca in the operator chart's values",
            )
        if self._context is None or self._clock() - self._looked >= LOOK_SECONDS:
            await self._again(self._file)
        if self._context is None:
            raise EngineTlsRefused(f"no authority could be read from {self._file}", advice="see the operator's log")
        return Channel(self._context, self._server_name.replace("{namespace}", namespace))

    async def _again(self, file: Path) -> None:
        """Look at the file; where it cannot be used the authorities before it stay."""
        self._looked = self._clock()  # first, so that the calls beside this one do not look as well
        try:
            await asyncio.to_thread(self._look, file)
        except AuthoritiesUnreadable as error:
            _log.error("the authorities of control ports stay as they were", reason=error.message)

    def _look(self, file: Path) -> None:
        try:
            read = file.read_bytes()
            if read == self._read:
                return
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # an intermediate authority may stand for itself
            context.load_verify_locations(cadata=read.decode("ascii", "ignore"))  # comments may have other letters
        except (OSError, ValueError) as error:
            raise AuthoritiesUnreadable(
                f"authorities {file}: {getattr(error, 'strerror', None) or error}", advice="it is a PEM file"
            ) from None
        if self._read:
            _log.info("the authorities of control ports have changed", file=str(file))
        self._read, self._context = read, context
        ends = [ssl.cert_time_to_seconds(str(found["notAfter"])) for found in context.get_ca_certs()]
        if ends:  # what is believed by itself, without being an authority, is not among them
            self._expires(max(ends))


PLAIN_ONLY: Final = Trust(clock=lambda: 0.0)
"""For sidecars that speak plain HTTP."""
