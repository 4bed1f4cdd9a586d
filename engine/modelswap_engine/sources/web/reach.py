"""Which addresses a URL may lead to. Pure, but for the resolver that asks for them.

What a server answers must not make a pod ask its own node, cluster or cloud: a URI that a person wrote may lead to a
private network (an internal mirror is one), one that a server sends the pod to may not. Decided is on the very
addresses that are connected to: a name that changes between the look and the connection gains nothing.
"""

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from socket import AF_INET, AddressFamily
from typing import Final
from urllib.parse import urlsplit

from aiohttp.abc import AbstractResolver, ResolveResult

from modelswap_engine.protocol.errors import SourceNotAllowed

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")
_HOSTS: Final = frozenset({"https", "oci"})
"""Schemes whose URIs begin with the host that is asked."""


@dataclass(frozen=True, slots=True)
class Reach:
    """How far servers may send a pod.

    Attributes:
        hosts: whose addresses may be private although a server named them: those of allowed prefixes.
        anywhere: all addresses are allowed.
    """

    hosts: frozenset[str] = frozenset()
    anywhere: bool = False

    @classmethod
    def of(cls, prefixes: Iterable[str], *, anywhere: bool) -> "Reach":
        """Return the reach of an engine that may read what is below some prefixes."""
        parts = [urlsplit(prefix) for prefix in prefixes]
        return cls(frozenset(p.hostname or "" for p in parts if p.scheme.lower() in _HOSTS), anywhere)

    def check(self, address: str, *, host: str, chosen: bool) -> None:
        """Refuse an address.

        Args:
            address: what a host's name leads to.
            host: its name, for the message.
            chosen: a person wrote that host; link-local addresses, where clouds keep secrets, are refused all the same.

        Raises:
            SourceNotAllowed: it is refused.
        """
        kind = _kind(_meant(ipaddress.ip_address(address.partition("%")[0])))
        if self.anywhere or not kind or (chosen and kind != "link-local"):
            return
        raise SourceNotAllowed(
            f"{host[:253]} leads to {kind} address {address}, "
            + ("which is never read from" if chosen else "where a server must not send this engine"),
            advice="if that is meant, allow the host by --allow-source, or all by --allow-private-redirects",
            details={"host": host[:253], "address": address},
        )


class CheckedResolver(AbstractResolver):
    """Resolves names, and hands on only addresses that may be connected to.

    Args:
        inner: does the work.
        reach: decides.
        chosen: see :meth:`Reach.check`.
    """

    def __init__(self, inner: AbstractResolver, reach: Reach, *, chosen: bool) -> None:
        self._inner, self._reach, self._chosen = inner, reach, chosen

    async def resolve(self, host: str, port: int = 0, family: AddressFamily = AF_INET) -> list[ResolveResult]:
        """Return the addresses of a host.

        Raises:
            SourceNotAllowed: one of them is refused: who mixes them is not to be trusted with the others.
        """
        found = await self._inner.resolve(host, port, family)
        for result in found:
            self._reach.check(result["host"], host=host, chosen=self._chosen)
        return found

    async def close(self) -> None:
        """Close the one that does the work."""
        await self._inner.close()


def _meant(address: Address) -> Address:
    """Return the IPv4 address that an IPv6 address stands for, if it does."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or address


def _kind(address: Address) -> str:
    if address.is_link_local:
        return "link-local"
    if address.is_loopback:
        return "loopback"
    return "" if address.is_global and not address.is_multicast else "private"
