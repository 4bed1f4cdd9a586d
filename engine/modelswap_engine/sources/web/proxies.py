"""Which proxy a URL is asked through: what ``HTTPS_PROXY``, ``HTTP_PROXY``, ``ALL_PROXY`` and ``NO_PROXY`` say. Pure.

The same variables, in the same sense, as the object stores' client reads by itself; other files (netrc) are not looked
at. A proxy's password is shown to nobody.
"""

import ipaddress
from collections.abc import Mapping
from typing import Final, NamedTuple

from yarl import URL

from modelswap_engine.protocol.errors import BadRequest
from modelswap_engine.sources.web.authorization import basic

_SCHEMES: Final = frozenset({"http", "https"})
_VARIABLES: Final = {"https": ("HTTPS_PROXY", "ALL_PROXY"), "http": ("HTTP_PROXY", "ALL_PROXY")}
"""What names the proxy for URLs of a scheme; the first that is set counts."""


class Proxy(NamedTuple):
    """Where it is, and who we are there (a ``Basic`` header; "" for nobody)."""

    url: URL
    secret: str


class Proxies:
    """The proxies of a process.

    Args:
        environment: the variables; those in small letters come first.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        def value(name: str) -> str:
            return (environment.get(name.lower()) or environment.get(name) or "").strip()

        self._values = {
            scheme: next(((name, found) for name in names if (found := value(name))), None)
            for scheme, names in _VARIABLES.items()
        }
        self._direct = [entry.strip().lower() for entry in value("NO_PROXY").split(",") if entry.strip()]

    def for_url(self, url: URL) -> Proxy | None:
        """Return the proxy for a URL; None: it is asked directly.

        Raises:
            BadRequest: what the environment names is no HTTP proxy; only who needs it is told.
        """
        found = self._values.get(url.scheme)
        if found is None or any(_names(entry, url.host or "") for entry in self._direct):
            return None
        return _proxy(*found)


DIRECT: Final = Proxies({})


def _proxy(name: str, value: str) -> Proxy:
    try:
        url = URL(value if "://" in value else f"http://{value}")
    except ValueError:
        url = URL()
    if url.scheme not in _SCHEMES or not url.host:  # it may hold a password, so it is not repeated
        raise BadRequest(f"{name} is no address of an HTTP proxy", advice="write it like http://proxy.example:3128")
    return Proxy(url.origin(), basic(url.user, url.password or "") if url.user else "")


def _names(entry: str, host: str) -> bool:
    """Say whether an entry of NO_PROXY means a host: it, a domain above it, an address or network that it is in."""
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(entry, strict=False)
    except ValueError:
        domain = entry.removeprefix("*").removeprefix(".")
        return not domain or host == domain or host.endswith(f".{domain}")
