"""Where the other pods of the slot are: the addresses behind names, without this pod's own. Blocks; see ``find``."""

import asyncio
import contextlib
import socket
from collections.abc import Sequence
from typing import Final

import structlog

from modelswap_engine.sources.peers.choice import Peer

FIND_SECONDS: Final = 2.0
_log = structlog.get_logger("modelswap.peers")


async def find(names: Sequence[Peer], *, own_port: int) -> list[Peer]:
    """Return the addresses behind names; none in time are none.

    Args:
        names: host names (a headless Service has one address for each pod) or addresses, with ports.
        own_port: the control port of this pod.
    """
    try:
        async with asyncio.timeout(FIND_SECONDS):
            return await asyncio.to_thread(_look_up, names, own_port)
    except TimeoutError:
        _log.warning("the names of peers were not resolved in time", seconds=FIND_SECONDS)
        return []


def _look_up(names: Sequence[Peer], own_port: int) -> list[Peer]:
    found: set[Peer] = set()
    for host, port in names:
        with contextlib.suppress(OSError, UnicodeError):  # a Service without pods has no addresses
            entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            found |= {Peer(str(address[0]), port) for *_, address in entries}
    return sorted(peer for peer in found if peer.port != own_port or not _own(peer))


def _own(peer: Peer) -> bool:
    """Say whether an address is one of this pod: then what is sent there would be sent from it. Nothing is sent."""
    family = socket.AF_INET6 if ":" in peer.host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((peer.host, peer.port))
            return str(probe.getsockname()[0]) == peer.host
    except OSError:
        return False
