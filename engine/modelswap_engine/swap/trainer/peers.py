"""Whom this engine may exchange weights with: addresses in the networks on a list, and nobody else."""

import ipaddress
import socket
from collections.abc import Callable, Sequence

from modelswap_engine.protocol.errors import BadRequest, PeerNotAllowed

Lookup = Callable[[str], Sequence[str]]


def look_up(host: str) -> list[str]:
    """Return the addresses of a host; blocks."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return [str(entry[4][0]) for entry in found]


class Peers:
    """The networks.

    Args:
        networks: in CIDR notation.
        lookup: finds the addresses of a host name; may block.

    Raises:
        BadRequest: not a network.
    """

    def __init__(self, networks: Sequence[str], *, lookup: Lookup = look_up) -> None:
        try:
            self._networks = tuple(ipaddress.ip_network(network) for network in networks)
        except ValueError as error:
            raise BadRequest(
                f"not a network in CIDR notation: {error}", advice="write for example 10.0.0.0/8"
            ) from None
        self._lookup = lookup

    def admit(self, host: str) -> str:
        """Return the address to use for a host: the checked one, so that a name cannot mean another one later.

        Raises:
            PeerNotAllowed: none of its addresses is in an allowed network.
        """
        for text in self._addresses(host):
            address = ipaddress.ip_address(text)
            if any(address.version == network.version and address in network for network in self._networks):
                return text
        raise PeerNotAllowed(
            f"{host[:253]!r} is in no network that this engine may exchange weights with",
            advice=f"allowed: {', '.join(map(str, self._networks)) or 'none'}; add one with --weight-peer",
            details={"address": host[:253]},
        )

    def _addresses(self, host: str) -> Sequence[str]:
        try:
            return [str(ipaddress.ip_address(host))]
        except ValueError:
            return self._lookup(host)
