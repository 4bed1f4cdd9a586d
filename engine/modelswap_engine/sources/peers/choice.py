"""Which peer is asked for which blob. Pure.

Each blob goes to the one of its holders that was asked for the fewest bytes so far, so that load is even, and among
equals to the one that the hash says: with a salt for each fetch, so that pods that fetch the same do not all begin with
the same peer. A peer is asked for a blob once.
"""

import hashlib
from collections.abc import Collection, Mapping
from typing import NamedTuple


class Peer(NamedTuple):
    """The control port of another pod."""

    host: str
    port: int


class Choice:
    """See the module.

    Args:
        holders: who has what, by sha256.
        salt: of this fetch.
    """

    def __init__(self, holders: Mapping[str, Collection[Peer]], *, salt: str) -> None:
        self._left = {sha256: set(peers) for sha256, peers in holders.items()}
        self._asked: dict[Peer, int] = {}
        self._salt = salt

    def pick(self, sha256: str, nbytes: int) -> Peer | None:
        """Return who is to be asked for a blob next; None when nobody is left."""
        left = self._left.get(sha256)
        if not left:
            return None
        peer = min(left, key=lambda peer: (self._asked.get(peer, 0), self._weight(sha256, peer)))
        left.remove(peer)
        self._asked[peer] = self._asked.get(peer, 0) + nbytes
        return peer

    def leave_out(self, peer: Peer) -> None:
        """Ask a peer for nothing more."""
        for left in self._left.values():
            left.discard(peer)

    def _weight(self, sha256: str, peer: Peer) -> bytes:
        return hashlib.sha256(f"{self._salt} {sha256} {peer.host} {peer.port}".encode()).digest()
