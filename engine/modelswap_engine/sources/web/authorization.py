"""How a server is told who asks: what is mounted, as the value of one header."""

import base64
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from modelswap_engine.protocol.errors import SourceDenied

TOKEN: Final = "token"  # noqa: S105 - a name
USER: Final = "username"
PASSWORD: Final = "password"  # noqa: S105 - the names that Secrets of type kubernetes.io/basic-auth have


class Authorizer(Protocol):
    """Knows the header for one server."""

    def header(self) -> str:
        """Return the value of ``Authorization`` to ask with; "" for none."""

    async def challenged(self, challenges: Sequence[str], *, sent: str) -> bool:
        """Say whether to ask again, after the server did not take what was sent.

        Args:
            challenges: the values of ``WWW-Authenticate``.
            sent: what the request had.
        """


class Fixed:
    """One header, whatever the server says.

    Args:
        value: of ``Authorization``; "" sends none.
    """

    def __init__(self, value: str) -> None:
        self._value = value

    def header(self) -> str:
        """Return the value."""
        return self._value

    async def challenged(self, challenges: Sequence[str], *, sent: str) -> bool:
        """There is no other."""
        return False


def bearer(token: str) -> str:
    """Return the header for a token.

    Raises:
        SourceDenied: it cannot be a token.
    """
    if not token.isascii() or not token.isprintable() or " " in token:
        raise SourceDenied("the mounted token has characters that no token has", advice="look at the Secret")
    return f"Bearer {token}"


def basic(user: str, password: str) -> str:
    """Return the header for a name and a password."""
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def mounted(values: Mapping[str, str]) -> str:
    """Return the header that mounted credentials are: a token, or a name and a password; "" where there are none."""
    if values.get(TOKEN):
        return bearer(values[TOKEN])
    return basic(values[USER], values.get(PASSWORD, "")) if values.get(USER) else ""
